"""`p2pml join`: join a group that another machine opened, and train with it."""

from __future__ import annotations

import argparse
from typing import Any

from p2pml.cli import options

DESCRIPTION = """\
Join the group that `p2pml start` opened at one of the addresses, which may be there only later: joining is tried until it
works. What is trained, and on which part of the data here, comes from there; a task that isn't one of p2pml's own has to be
named here too, as its code runs here.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "join", help="join a group that was opened on another machine", description=DESCRIPTION
    )
    parser.add_argument(
        "addresses",
        type=options.address,
        nargs="+",
        metavar="ADDRESS",
        help="what `p2pml start` printed; several are tried",
    )
    parser.add_argument("--task", help="the task as module:function, if the group's is of one's own")
    parser.add_argument(
        "--part",
        type=options.part,
        metavar="K/N",
        help="the part of the data, such as 2/4 (default: as the group deals it)",
    )
    parser.add_argument(
        "--listen",
        type=options.address,
        action="append",
        metavar="ADDRESS",
        help="where the other members find this one (default: a free port, on this machine if ADDRESS is, else on all networks)",
    )
    parser.add_argument(
        "--wait", type=options.seconds, metavar="SECONDS", help="how long to try (default: until it works)"
    )
    options.add_peer(parser)
    options.add_shared(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train; returns the exit status."""
    here_only = all(one.is_loopback for one in arguments.addresses)
    default = "tcp://127.0.0.1:0" if here_only else "tcp://:0"
    listen = arguments.listen or [options.address(default)]
    options.check_listen(listen, arguments.insecure)

    from p2pml.cli.member import join_group, run_member
    from p2pml.cli.progress import Progress

    return run_member(arguments, Progress(), lambda member: join_group(member, arguments, [str(one) for one in listen]))
