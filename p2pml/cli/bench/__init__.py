"""`p2pml bench`: p2pml beside other ways to do the same, in one run on one machine."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command `bench` with its sub-commands; each sets `run`, which takes the arguments and returns the exit status."""
    from p2pml.cli.bench import link, reduce

    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="measure p2pml beside other ways to do the same"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    link.add_parser(commands)
    reduce.add_parser(commands)
