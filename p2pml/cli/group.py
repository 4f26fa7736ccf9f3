"""A whole group as processes of this machine: the part of `p2pml demo` in which peers train together."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from p2pml.cli import deviation
from p2pml.cli.children import Child, Family, event
from p2pml.cli.deviation import Deviation
from p2pml.cli.options import as_flags
from p2pml.cli.progress import Event, Progress
from p2pml.cli.show import showing

WAIT = 60
"""Seconds that a peer tries to join, before the demo gives up."""


@dataclass(slots=True)
class GroupRun:
    """How it went. failures: for each peer whose process failed, why. seconds: from all being ready to the last round's end."""

    progress: Progress
    names: list[str]
    summaries: dict[str, Event] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    started_at: float = field(default_factory=time.time)
    deviation: Deviation | None = None

    @property
    def is_complete(self) -> bool:
        """Whether at least one peer got through all rounds."""
        return bool(self.summaries)


async def run_group(arguments: argparse.Namespace) -> GroupRun:
    """Start the peers, show what they report, and wait for them.

    A peer that fails before the first round ends them all; later, the others go on without it.
    """
    names = [f"peer-{number}" for number in range(1, arguments.peers + 1)]
    run = GroupRun(Progress(arguments.peers, arguments.rounds or 0), names)
    with (
        showing(arguments.report, run.progress) as show,
        tempfile.TemporaryDirectory(prefix="p2pml-", ignore_cleanup_errors=True) as folder,
    ):
        group = _Group(arguments, run, show, folder)
        await group.run()
        run.deviation = deviation.measure(Path(folder), arguments.peers)
    return run


class _Group:
    def __init__(
        self, arguments: argparse.Namespace, run: GroupRun, show: Callable[[Event], None], folder: str
    ) -> None:
        self._arguments, self._run, self._show = arguments, run, show
        self._flags = ["--child", "--report", "json", "--threads", "1", "-v", "--verify", folder]
        self._flags += as_flags(arguments, "loop")
        self._addresses: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._given_up = asyncio.Event()

    async def run(self) -> None:
        first, *others = self._run.names
        training = as_flags(
            self._arguments, "task", "peers", "rounds", "steps_per_round", "weighting", "combine", "seed"
        )
        async with Family(self._take) as family:
            listen = ["--listen", "tcp://127.0.0.1:0"]
            await self._start(family, first, "start", *training, *listen)
            addresses = await self._addresses
            own = [*as_flags(self._arguments, "task"), "--wait", str(WAIT)]
            for number, name in enumerate(others if addresses else (), 2):
                part = f"{number}/{self._arguments.peers}"  # the parts that the baselines of the same names have
                await self._start(family, name, "join", *addresses, *own, "--part", part)
            finished = asyncio.create_task(family.finished())
            given_up = asyncio.create_task(self._given_up.wait())
            try:
                await asyncio.wait({finished, given_up}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                finished.cancel()
                given_up.cancel()
        closed = self._run.progress.closed
        if closed:
            self._run.seconds = closed[-1].ended_at - (self._run.progress.began_at or closed[-1].ended_at)

    async def _start(self, family: Family, name: str, command: str, *arguments: str) -> None:
        await family.start(name, ["p2pml.cli", command, *arguments, "--name", name, *self._flags])

    def _take(self, child: Child, found: Event) -> None:
        """An event of a peer."""
        self._show(found)
        kind = found["event"]
        if kind == "open" and not self._addresses.done():
            self._addresses.set_result(list(found["addresses"]))
        elif kind == "done":
            self._run.summaries[child.name] = found
        elif kind == "exited":
            self._run.failures[child.name] = str(found["status"])
            if not self._run.progress.closed and not self._run.progress.round:
                self._show(event("note", child.name, text="nothing can begin without it: the others are stopped"))
                self._given_up.set()
            if not self._addresses.done():
                self._addresses.set_result([])
