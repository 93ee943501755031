import subprocess
import sys
from pathlib import Path

import pytest

from pstar_compile import __version__, cli
from pstar_compile.demo.run import DemoConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["demo", "--steps", "0"], "must be a whole number of at least 1, got '0'"),
        (["demo", "--inner", "nvcc"], "invalid choice: 'nvcc'"),
        (["demo", "--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_argument_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith("pstar: error: ")
    assert error.count("\n") == 1
    assert message in error


def test_user_error_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: DemoConfig) -> None:
        raise ValueError("the arena needs 3 MiB, got 1 MiB")

    monkeypatch.setattr(cli, "run_demo", refuse)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "pstar: error: the arena needs 3 MiB, got 1 MiB\n"


def test_arguments_reach_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoConfig] = []
    monkeypatch.setattr(cli, "run_demo", seen.append)
    line = "demo --steps 7 --device cpu --device-memory 2GiB --batch 3 --sequence 9 --seed 5"
    assert cli.main([*line.split(), "--checkpoint", "d", "--resume", "--inner", "eager"]) == 0
    assert cli.main(["demo"]) == 0
    assert seen == [
        DemoConfig(
            steps=7,
            device="cpu",
            device_memory="2GiB",
            batch=3,
            sequence=9,
            seed=5,
            checkpoint=Path("d"),
            resume=True,
            inner="eager",
        ),
        DemoConfig(),
    ]


def test_module_is_the_command() -> None:
    command = [sys.executable, "-m", "pstar_compile", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"pstar {__version__}\n"


def test_every_setting_of_the_demo_says_its_default_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "None" not in text and "False" not in text and ") (" not in text
    assert f"optimizer steps (default: {DemoConfig().steps})" in text
    assert "(default: cuda if there is one)" in text
