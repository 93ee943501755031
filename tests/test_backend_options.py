from __future__ import annotations

from typing import Any

import pytest

from pstar_compile.config import BackendConfig


def test_defaults() -> None:
    config = BackendConfig.parse(None)
    assert config == BackendConfig.parse({}) == BackendConfig()
    assert (config.inner, config.prefetch, config.chunk_target) == ("inductor", None, None)
    assert config.trust_version_counters is False


def test_all_options() -> None:
    config = BackendConfig.parse(
        {"inner": "eager", "prefetch": 0, "chunk_bytes": "1KiB", "trust_version_counters": True}
    )
    assert (config.inner, config.prefetch, config.chunk_target) == ("eager", 0, 1024)
    assert config.trust_version_counters is True


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"prefech": 2}, ["'prefech'", "did you mean 'prefetch'?", "inner, prefetch, chunk_bytes"]),
        ({"zzz": 2}, ["'zzz'", "known options: inner, prefetch, chunk_bytes"]),
        ({"inner": "triton"}, ["'inner'", "inductor, eager", "got 'triton'"]),
        ({"prefetch": -1}, ["'prefetch'", ">= 0, or None", "got -1"]),
        ({"prefetch": 1.5}, ["'prefetch'", "got 1.5"]),
        ({"prefetch": True}, ["'prefetch'", "got True"]),
        ({"prefetch": "2"}, ["'prefetch'", "got '2'"]),
        ({"chunk_bytes": "64MX"}, ["'chunk_bytes'", "'20GiB'", "got '64MX'"]),
        ({"chunk_bytes": 0}, ["'chunk_bytes'", "positive", "got 0"]),
        ({"trust_version_counters": 1}, ["'trust_version_counters'", "True or False", "got 1"]),
        ({"trust_version_counters": "no"}, ["'trust_version_counters'", "got 'no'"]),
    ],
)
def test_bad_options_say_what_is_taken_and_what_was_got(
    options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        BackendConfig.parse(options)
    for part in parts:
        assert part in str(caught.value)


def test_an_unknown_option_far_from_all_known_ones_gets_no_suggestion() -> None:
    with pytest.raises(ValueError) as caught:
        BackendConfig.parse({"zzz": 1})
    assert "did you mean" not in str(caught.value)
