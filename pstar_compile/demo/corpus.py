"""Real text that every machine has: the sources of Python's own standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_VALIDATION_EVERY = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Text as bytes, split by files, so that no file is in both parts.

    Attributes:
        train: uint8, one dimension.
        validation: uint8, one dimension: every tenth file.
        files: how many files were read.
    """

    train: Tensor
    validation: Tensor
    files: int


def load_corpus(root: Path | None = None, *, max_bytes: int = 8_000_000) -> Corpus:
    """Read the Python sources under ``root`` (default: the standard library).

    Files are taken in the order of the SHA-256 of their path, so that the same library gives the
    same corpus and the limit leaves out no subject as a whole.

    Args:
        root: the folder to walk.
        max_bytes: stop before the file that would make the corpus larger than this.

    Raises:
        ValueError: if there are too few files for a training and a validation part.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    names = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not _SKIPPED.intersection(path.relative_to(root).parts)
    ]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())

    texts: list[bytes] = []
    total = 0
    for name in names:
        text = (root / name).read_bytes()
        total += len(text)
        if total > max_bytes:
            break
        texts.append(text)
    validation = b"".join(texts[_VALIDATION_EVERY - 1 :: _VALIDATION_EVERY])
    if not validation:
        raise ValueError(
            f"the corpus needs at least {_VALIDATION_EVERY} Python sources with text in them and "
            f"within {max_bytes} bytes, got {len(texts)} under {root}; is the standard library "
            f"installed as source files?"
        )
    del texts[_VALIDATION_EVERY - 1 :: _VALIDATION_EVERY]
    return Corpus(
        train=_as_tensor(b"".join(texts)),
        validation=_as_tensor(validation),
        files=len(texts) + len(texts) // (_VALIDATION_EVERY - 1),
    )


def sample_batch(
    text: Tensor, *, batch: int, sequence: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw ``batch`` random windows: the bytes, and the byte that follows each. int64.

    Raises:
        ValueError: if the text is shorter than one window.
    """
    if len(text) <= sequence:
        raise ValueError(
            f"a sequence must be shorter than the text of {len(text)} bytes, got {sequence}"
        )
    starts = torch.randint(len(text) - sequence, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(sequence + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
