"""`p2pml start`: open a group, as its mobile agent and first peer, and train when the others have joined."""

from __future__ import annotations

import argparse
from typing import Any

from p2pml.cli import options
from p2pml.cli.outcome import Misuse

DESCRIPTION = """\
Open a group and print the addresses at which other machines join it (`p2pml join ADDRESS`). When all have come, they train
one model, each on its own part of the data: by default the smartwatch data, two of its eight subjects for each of four peers.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "start", help="open a group that other machines can join, and train with it", description=DESCRIPTION
    )
    options.add_training(parser)
    parser.add_argument(
        "--listen",
        type=options.address,
        action="append",
        metavar="ADDRESS",
        help="where to listen, may be given several times (default: tcp://127.0.0.1:7700, or with --insecure tcp://:7700)",
    )
    parser.add_argument(
        "--part",
        type=options.part,
        metavar="K/N",
        help="the part of the data that is trained on here (default: the first)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="begin with the model that --checkpoint has, after its last round"
    )
    options.add_peer(parser)
    options.add_shared(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train; returns the exit status."""
    default = "tcp://:7700" if arguments.insecure else "tcp://127.0.0.1:7700"
    listen = arguments.listen or [options.address(default)]
    options.check_listen(listen, arguments.insecure)
    if arguments.resume and arguments.checkpoint is None:
        raise Misuse("--resume needs --checkpoint, which says where the model is")
    if arguments.part is not None and arguments.part[1] != arguments.peers:
        raise Misuse(f"--part: the data is dealt in {arguments.peers} parts (--peers), not in {arguments.part[1]}")

    from p2pml.cli.member import open_group, run_member
    from p2pml.cli.progress import Progress

    progress = Progress(arguments.peers, arguments.rounds or 0)
    return run_member(arguments, progress, lambda member: open_group(member, arguments, [str(one) for one in listen]))
