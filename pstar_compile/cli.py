"""The ``pstar`` command: arguments in, calls out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pstar_compile import __version__
from pstar_compile.demo.run import DemoConfig, run_demo


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"pstar: error: {message} (see {self.prog} --help)\n")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    default = DemoConfig()
    parser = _Parser(prog="pstar", description="Train models larger than GPU memory.")
    parser.add_argument("--version", action="version", version=f"pstar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="train a small GPT with a quarter of the memory its parameters need",
        description="Train a byte-level GPT on the sources of Python's standard library, its "
        "parameters paged through an arena of a quarter of their size.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--steps", type=_positive, default=default.steps, help="optimizer steps")
    # What has no default to show is left to DemoConfig.
    unset = argparse.SUPPRESS
    demo.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default=unset,
        help="where to compute (default: cuda if there is one)",
    )
    demo.add_argument(
        "--device-memory",
        default=unset,
        metavar="SIZE",
        help="device memory for chunks and activations together, such as 2GiB, instead of an "
        "arena of a quarter of the parameters' size",
    )
    demo.add_argument("--batch", type=_positive, default=default.batch, help="sequences in a step")
    demo.add_argument(
        "--sequence", type=_positive, default=default.sequence, help="bytes in a sequence"
    )
    demo.add_argument("--seed", type=int, default=default.seed, help="for weights and data")
    demo.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        default=default.checkpoint,
        help="where to keep the latest checkpoint",
    )
    demo.add_argument(
        "--resume", action="store_true", default=unset, help="go on from the checkpoint"
    )
    demo.add_argument(
        "--inner",
        choices=["inductor", "eager"],
        default=default.inner,
        help="what compiles the segments",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 2 when the user has to change something."""
    arguments = vars(_parser().parse_args(argv))
    del arguments["command"]
    try:
        run_demo(DemoConfig(**arguments))
    except ValueError as error:
        print(f"pstar: error: {error}", file=sys.stderr)
        return 2
    return 0
