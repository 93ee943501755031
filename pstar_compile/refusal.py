"""Errors for users, raised where users can catch them.

What a torch.compile backend raises, Dynamo wraps in an error of its own with a long stack. An error
that says what the user has to change is therefore raised by the call that the graph was compiled
for, as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def refuse_at_call(build: Callable[[], Compiled]) -> Compiled | Callable[..., Any]:
    """What ``build`` returns; or, if it raises a ValueError of ours, a function that raises it."""
    try:
        return build()
    except ValueError as error:
        if not _is_ours(error):
            raise
        refusal = error.with_traceback(None)

    def refuse(*args: Any) -> Any:
        raise refusal.with_traceback(None)

    return refuse


def _is_ours(error: ValueError) -> bool:
    """Whether one of our packages raised it, rather than a library below."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.split(".")[0] in ("pstar_compile", "passes")
