from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pstar_compile.demo.corpus import Corpus
from pstar_compile.demo.model import GPT, GPTConfig
from pstar_compile.demo.train import TrainConfig, Trainer, learning_rate

SHAPE = GPTConfig(context=16, hidden=32, layers=2, heads=2)
CONFIG = TrainConfig(steps=10, batch=4, sequence=16, warmup_steps=2, validation_batches=2)


def _trainer(config: TrainConfig = CONFIG, *, seed: int = 0) -> Trainer:
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    text = torch.frombuffer(bytearray(b"the chunk is fetched. " * 100), dtype=torch.uint8)
    corpus = Corpus(train=text, validation=text, files=1)
    return Trainer(model, model, corpus, config, device=torch.device("cpu"))


def test_default_model_has_some_25_million_parameters() -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in GPT(GPTConfig()).parameters())
    assert 24e6 < count < 27e6


def test_loss_falls() -> None:
    trainer = _trainer(replace(CONFIG, steps=60, learning_rate=3e-3))
    losses = [trainer.train_step() for _ in range(60)]
    assert losses[0] > 5
    assert losses[-1] < 2.5
    assert trainer.validate() == trainer.validate() < 2.5


def test_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    path = tmp_path / "demo.pt"
    whole = _trainer()
    expected = [whole.train_step() for _ in range(10)]

    first = _trainer()
    for _ in range(5):
        first.train_step()
    first.save(path)
    resumed = _trainer(seed=1)
    resumed.load(path)
    assert resumed.step == 5
    assert [resumed.train_step() for _ in range(5)] == expected[5:]
    assert [p.name for p in tmp_path.iterdir()] == ["demo.pt"]


def test_checkpoints_that_cannot_be_resumed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "demo.pt"
    with pytest.raises(ValueError, match="no checkpoint"):
        _trainer().load(path)
    trainer = _trainer()
    trainer.train_step()
    trainer.save(path)
    with pytest.raises(ValueError, match="batch was 4 and is 8"):
        _trainer(replace(CONFIG, batch=8)).load(path)
    with pytest.raises(ValueError, match="has done 1 steps already"):
        _trainer(replace(CONFIG, steps=1)).load(path)
    _trainer(replace(CONFIG, steps=20)).load(path)


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    rates = [learning_rate(step, CONFIG) for step in range(CONFIG.steps)]
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert max(rates) == pytest.approx(CONFIG.learning_rate)
    assert rates[-1] == pytest.approx(CONFIG.learning_rate / 10)
