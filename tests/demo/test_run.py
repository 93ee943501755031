from pathlib import Path

import pytest
import torch

from pstar_compile.demo.model import GPTConfig
from pstar_compile.demo.run import DemoConfig, run_demo


def _run(folder: Path, *, steps: int, resume: bool = False) -> None:
    config = DemoConfig(
        steps=steps,
        device="cpu",
        batch=2,
        sequence=16,
        checkpoint=folder,
        resume=resume,
        inner="eager",
    )
    run_demo(config, shape=GPTConfig(hidden=64, layers=8, heads=2))


def test_demo_trains_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path, steps=2)
    assert (tmp_path / "demo.pt").is_file()
    out = capsys.readouterr().out
    assert "step 2: loss" in out
    assert "planned" in out
    assert "executed" in out
    _run(tmp_path, steps=3, resume=True)
    assert "resumed after step 2" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_gpu_is_said() -> None:
    with pytest.raises(ValueError, match="use --device cpu"):
        run_demo(DemoConfig(device="cuda"))
