"""The `p2pml` command: reads its arguments, runs one of its commands, and turns what happened into an exit status.

Commands import what they need when they run, so that ``p2pml --help`` is there at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import p2pml
from p2pml.cli import demo, join, start
from p2pml.cli.outcome import FAILED, INTERRUPTED, MISUSED, TERMINATED, Misuse, Terminated
from p2pml.errors import AddressError, MachineFailed, P2PMLError

EPILOG = """\
exit status: 0 when the work was done, 1 when it failed (the reason is printed), 2 for arguments that make no sense,
130 after Ctrl-C.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parsed = _parser(given).parse_args(given)
    except SystemExit as end:  # argparse has printed help, or what is wrong
        return end.code if isinstance(end.code, int) else MISUSED
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(parsed.verbose, 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        return int(parsed.run(parsed))
    except KeyboardInterrupt:
        print("p2pml: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, as in `p2pml ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Terminated:
        print("p2pml: stopped", file=sys.stderr)
        return TERMINATED
    except P2PMLError as error:
        if parsed.verbose:
            traceback.print_exc()
            if isinstance(error, MachineFailed) and error.trace:
                print(f"\nat {error.peer}:\n{error.trace}", file=sys.stderr)
        print(f"p2pml: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, (AddressError, Misuse)) else FAILED


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="p2pml",
        description="Train one model on a few machines, without a server.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"p2pml {p2pml.__version__}")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more, and show tracebacks (-vv: all)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    start.add_parser(commands)
    join.add_parser(commands)
    demo.add_parser(commands)
    _add_bench(commands, given)
    return parser


def _add_bench(commands: Any, given: Sequence[str]) -> None:
    """Its parsers come with what they measure, which takes a while to import: only when they are asked for."""
    if "bench" in given:
        from p2pml.cli import bench

        bench.add_parser(commands)
    else:
        commands.add_parser("bench", help="measure p2pml beside other ways to do the same")
