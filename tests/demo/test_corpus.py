from pathlib import Path

import pytest
import torch

from pstar_compile.demo.corpus import load_corpus, sample_batch


def _sources(root: Path, count: int, size: int = 10) -> None:
    for index in range(count):
        (root / f"m{index}.py").write_bytes(bytes([index]) * size)


def test_every_tenth_file_validates_and_no_file_is_in_both_parts(tmp_path: Path) -> None:
    _sources(tmp_path, 20)
    corpus = load_corpus(tmp_path)
    train, validation = set(corpus.train.tolist()), set(corpus.validation.tolist())
    assert corpus.files == 20
    assert (len(train), len(validation)) == (18, 2)
    assert not train & validation


def test_size_is_bounded_and_tests_are_left_out(tmp_path: Path) -> None:
    _sources(tmp_path, 20)
    (tmp_path / "test").mkdir()
    _sources(tmp_path / "test", 20)
    assert load_corpus(tmp_path).files == 20
    bounded = load_corpus(tmp_path, max_bytes=155)
    assert bounded.files == 15
    assert len(bounded.train) + len(bounded.validation) == 150


def test_too_few_files_are_refused(tmp_path: Path) -> None:
    _sources(tmp_path, 9)
    with pytest.raises(ValueError, match=r"at least 10 Python sources.*got 9"):
        load_corpus(tmp_path)


def test_standard_library_is_enough_text() -> None:
    corpus = load_corpus()
    assert 1_000_000 < len(corpus.train) + len(corpus.validation) <= 8_000_000
    assert torch.equal(load_corpus().train, corpus.train)


def test_targets_are_the_next_bytes_and_follow_the_generator() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    x, y = sample_batch(text, batch=3, sequence=8, generator=torch.Generator().manual_seed(1))
    assert x.shape == (3, 8)
    assert x.dtype == torch.int64
    assert torch.equal(y, x + 1)
    again, _ = sample_batch(text, batch=3, sequence=8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(x, again)


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter than the text of 8 bytes, got 8"):
        sample_batch(
            torch.zeros(8, dtype=torch.uint8), batch=1, sequence=8, generator=torch.Generator()
        )
