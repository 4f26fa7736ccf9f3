"""Peers as processes of their own, which end with whoever started them and whose failures are told in full.

A child reports on its standard output, a JSON object on each line. Its standard input is a pipe that its parent holds: when
that is closed, or its parent is gone, the child ends in order. On Linux the kernel ends it with its parent, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

from p2pml.cli.progress import Event

PATIENCE = 8.0
"""Seconds that children have to end in order, before they are killed."""
TAIL = 100
"""Lines of a child's standard error that are kept."""
MAX_LINE = 1 << 22
"""Bytes of a line that a child may report in."""
PR_SET_PDEATHSIG = 1


class Child:
    """One process; `status` is its exit status, None as long as it runs, negative for a signal."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.tail: deque[str] = deque(maxlen=TAIL)
        self.told_to_end = False
        self.finished = asyncio.Event()
        """Its output is read to the end, and `status` is known."""

    @property
    def status(self) -> int | None:
        return self.process.returncode

    @property
    def failed(self) -> bool:
        """Whether it ended, otherwise than it should."""
        return self.status not in (None, 0) and not self.told_to_end

    def end(self) -> None:
        """Ask it to end in order."""
        self.told_to_end = True
        if self.process.stdin is not None:
            self.process.stdin.close()


class Family:
    """The children of this process: ``async with Family(on_event) as family``. None outlives the block.

    on_event: called with everything that a child reports, and with `exited` for one that failed.
    """

    def __init__(self, on_event: Callable[[Child, Event], None]) -> None:
        self.children: list[Child] = []
        self._on_event = on_event
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            await asyncio.shield(self.end(PATIENCE))
        finally:
            for child in self.children:
                if child.status is None:
                    child.process.kill()
            # Not given the error of the block, which would come out wrapped in a group.
            await self._tasks.__aexit__(None, None, None)

    async def start(self, name: str, arguments: Sequence[str]) -> Child:
        """Start ``python -m`` with these arguments as a child."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE,
            # Ctrl-C is the parent's matter: it ends its children in order.
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
        )
        child = Child(name, process)
        self.children.append(child)
        self._tasks.create_task(self._follow(child))
        return child

    async def finished(self) -> None:
        """Wait until all children have ended, by themselves."""
        await asyncio.gather(*(child.finished.wait() for child in self.children))

    async def end(self, patience: float) -> None:
        """Ask all children to end, and kill those that do not within `patience` seconds."""
        running = [child for child in self.children if child.status is None]
        for child in running:
            child.end()
        try:
            async with asyncio.timeout(patience):
                await asyncio.gather(*(child.process.wait() for child in running))
        except TimeoutError:
            for child in running:
                if child.status is None:
                    child.process.kill()

    async def _follow(self, child: Child) -> None:
        errors = asyncio.create_task(self._read_errors(child))
        try:
            assert child.process.stdout is not None
            async for line in child.process.stdout:
                self._report(child, line)
            await errors
            await child.process.wait()
        finally:
            errors.cancel()
        if child.failed:
            self._on_event(child, event("exited", child.name, status=_describe(child.status), tail=list(child.tail)))
        child.finished.set()

    def _report(self, child: Child, line: bytes) -> None:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict) and isinstance(found.get("event"), str):
            self._on_event(child, found)
        else:  # something in a user's task prints
            child.tail.append(line.decode(errors="replace").rstrip())

    async def _read_errors(self, child: Child) -> None:
        assert child.process.stderr is not None
        async for line in child.process.stderr:
            child.tail.append(line.decode(errors="replace").rstrip())


def event(name: str, peer: str, **fields: Any) -> dict[str, Any]:
    """An event as `p2pml.cli.progress` describes it, of now."""
    return {"event": name, "peer": peer, "time": time.time(), **fields}


def end_with_parent(end: Callable[[], None]) -> None:
    """In a child: have `end` called, in a thread, when the parent wants it or is gone; `PATIENCE` seconds later exit at once."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library; the pipe is watched in any case
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.read(
            0, 1
        ):  # not through sys.stdin, whose lock a daemon thread must not hold when the interpreter ends
            pass
        end()
        time.sleep(PATIENCE)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _describe(status: int | None) -> str:
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"
