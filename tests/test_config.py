from __future__ import annotations

from dataclasses import MISSING, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pstar_compile.config import BackendConfig, ManageConfig, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (1, 1),
        (20 * 2**30, 20 * 2**30),
        (1e6, 10**6),
        ("7", 7),
        ("7B", 7),
        ("20GiB", 20 * 2**30),
        ("20gib", 20 * 2**30),
        ("512MB", 512 * 10**6),
        ("1.5 KiB", 1536),
        ("  2 TB ", 2 * 10**12),
        ("3kb", 3000),
    ],
)
def test_sizes(size: int | float | str, nbytes: int) -> None:
    assert parse_bytes(size, name="size") == nbytes


@pytest.mark.parametrize(
    "size",
    ["", "GiB", "-1GiB", "1 XB", "1,5GiB", "1e3", "ten", 0, -1, "0", True, None, [], float("nan"),
     float("inf"), "1G iB", b"1"],
)  # fmt: skip
def test_unreadable_sizes_say_what_is_read(size: object) -> None:
    with pytest.raises(ValueError) as caught:
        parse_bytes(size, name="device_memory")  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith("device_memory must be a positive number of bytes")
    assert "'20GiB'" in message and repr(size) in message


def test_a_fraction_of_a_byte_is_no_size() -> None:
    with pytest.raises(ValueError, match="positive"):
        parse_bytes(0.5, name="size")


@given(st.integers(1, 2**60))
def test_formatted_sizes_read_back_within_their_precision(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes), name="x") == pytest.approx(nbytes, rel=0.06)


def test_format() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**20, 2**40, 5 * 2**50)] == [
        "0 B", "1023 B", "1.0 KiB", "3.0 MiB", "1.0 TiB", "5120.0 TiB",
    ]  # fmt: skip


@pytest.mark.parametrize("config", [BackendConfig, ManageConfig])
def test_every_setting_has_a_default(config: type) -> None:
    assert all((f.default, f.default_factory) != (MISSING, MISSING) for f in fields(config))
