"""Updates: run each chunk's optimizer step inside the backward, as soon as nothing needs it later.

In: actions in issue order, chunks, moments. Out: the same with an update for each chunk that gets a
gradient: behind its offload (or its last reduce, for a chunk at home on the device), and behind the
last moment that reads the chunk, so that no gradient is computed with new parameters. A no-op for
inference.

Before::

    compute m3, reduce 1, offload 1, compute m4 (reads 1)

After::

    compute m3, reduce 1, offload 1, compute m4 (reads 1), update_host 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from passes.plan import Action, Chunk, Home, Kind, Moment


def with_updates(
    actions: Sequence[Action], chunks: Mapping[int, Chunk], moments: Sequence[Moment]
) -> list[Action]:
    """Add the updates; ``actions`` are not numbered yet."""
    by_index = {m.index: m for m in moments}
    last = _last_concerned(actions, by_index)
    found: list[Action] = []
    due: dict[int, list[int]] = {}
    for chunk in sorted({c for m in moments for c in m.reduces}):
        due.setdefault(last[chunk], []).append(chunk)
    for position, action in enumerate(actions):
        found.append(action)
        for chunk in due.get(position, ()):
            home = chunks[chunk].home
            found.append(
                Action(
                    index=0,
                    kind=Kind.UPDATE if home is Home.DEVICE else Kind.UPDATE_HOST,
                    moment=action.moment,
                    chunk=chunk,
                )
            )
    return found


def _last_concerned(actions: Sequence[Action], moments: Mapping[int, Moment]) -> dict[int, int]:
    """Chunk -> position of the last action that reads it or moves its gradient."""
    last: dict[int, int] = {}
    for position, action in enumerate(actions):
        if action.kind is Kind.COMPUTE:
            for chunk in moments[action.moment].needs:
                last[chunk] = position
        elif action.chunk is not None and action.kind is not Kind.DISCARD:
            last[action.chunk] = position
    return last
