"""`p2pml demo`: real peer processes on this machine train one model over loopback TCP, and are compared with what they would be
alone and with one machine that has all the data.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from p2pml.cli import options

DESCRIPTION = """\
Start peers as processes of their own, one with `p2pml start` and the others with `p2pml join`, and train one model over TCP on
this machine. Then train each peer alone for as many epochs, and one model on all the data, and show all of it side by side.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command with its protocols."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo", help="see peers train together, on this machine alone"
    )
    protocols = parser.add_subparsers(required=True, metavar="PROTOCOL")
    chainsgd = protocols.add_parser(
        "chainsgd", help="reduce through pairs, broadcast along a tree (MDLdroid)", description=DESCRIPTION
    )
    options.add_training(chainsgd)
    chainsgd.add_argument(
        "--plot", type=Path, metavar="FILE", help="where the picture goes (default: runs/demo-chainsgd-TASK.png)"
    )
    chainsgd.add_argument("--no-plot", action="store_true", help="draw no picture")
    chainsgd.add_argument("--no-baselines", action="store_true", help="train the group only")
    options.add_shared(chainsgd)
    chainsgd.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it all; returns the exit status."""
    from p2pml.cli import plot, results, stopping
    from p2pml.cli.baselines import run_baselines
    from p2pml.cli.group import run_group

    if not arguments.no_plot:
        plot.require()
    group = stopping.run(run_group(arguments), "asyncio")
    curves = {}
    if group.is_complete and not arguments.no_baselines:
        curves = stopping.run(run_baselines(arguments, group.names, group.progress.rounds), "asyncio")
    return results.conclude(arguments, group, curves)
