"""Recompute: how much fewer activations a step that does not fit may save for its backward.

In: the bytes that are missing, and the estimated peak of non-model data for a given activation
memory budget (the fraction of the activations saved by default that the partitioner may save; what
it does not save, the backward computes again). Out: the next fraction to try. Rewrites nothing.

Peaks of compiled code are known only for what was compiled, so differences of estimates are used.
"""

from __future__ import annotations

from collections.abc import Callable

FRACTIONS = (0.8, 0.6, 0.4, 0.2, 0.1, 0.05)
"""Fractions to try, one after another. None is 0: then the backward begins by computing everything
again, and keeps it."""


def lower(
    present: float, missing_bytes: int, peak_at: Callable[[float], int], *, present_peak: int
) -> float | None:
    """The largest fraction below ``present`` that should make the step fit.

    Args:
        present: the fraction with which the step does not fit.
        missing_bytes: by how much.
        peak_at: estimated peak of non-model bytes for a fraction.
        present_peak: the same for ``present``.

    Returns:
        A fraction; if none saves enough, that with the lowest peak; None if no peak is lower.
    """
    best: tuple[int, float] | None = None
    for fraction in FRACTIONS:
        if fraction >= present:
            continue
        peak = peak_at(fraction)
        if peak <= present_peak - missing_bytes:
            return fraction
        if peak < present_peak and (best is None or peak < best[0]):
            best = peak, fraction
    return None if best is None else best[1]
