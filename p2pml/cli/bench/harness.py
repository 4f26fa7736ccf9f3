"""Groups of worker processes that do the same thing at the same time, each call bounded in time.

A `Group` starts `size` processes, makes a `Member` in each, and runs one of its coroutines in all of them at once. The event
loop of a worker keeps turning between calls, so that links stay alive while other groups have their turn. Whatever happens,
no worker outlives the group's ``with`` block or the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, ClassVar, Self

from p2pml.errors import P2PMLError
from p2pml.loops import new_event_loop

START_SECONDS = 90.0
"""How long workers may take to start, import what they need and connect. (torch alone: seconds for each on a busy machine.)"""
CALL_SECONDS = 120.0
"""How long one call may take in all workers."""
STOP_SECONDS = 5.0
"""How long workers may take to end by themselves, before they are killed."""

LOOPS = ("asyncio", "uvloop")


class ContestantFailed(P2PMLError):
    """A contestant raised, died or took too long; the message names the worker and the cause. The others go on."""


class Member(ABC):
    """What one process does in a group: worker `rank` of `size`. Coroutines may block: each has its process for itself."""

    needs: ClassVar[Mapping[str, str]] = {}
    """Modules to be installed, and what installs each."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.resources = contextlib.AsyncExitStack()
        """What is to be closed in the end, in whatever state that comes."""

    @abstractmethod
    async def listen(self) -> str:
        """Get ready to be found; returns the address, or '' where this rank has none."""

    @abstractmethod
    async def join(self, addresses: Sequence[str]) -> None:
        """Connect, given the addresses of all ranks."""

    @classmethod
    def missing(cls) -> str | None:
        """What to install before this can run here, or None."""
        lacking = [install for module, install in cls.needs.items() if find_spec(module) is None]
        return f"not installed: {', '.join(lacking)}" if lacking else None


def installed_loops() -> list[str]:
    """The loops that this machine has, the fastest last."""
    return [name for name in LOOPS if find_spec(name) is not None]


class Group:
    """`size` worker processes, each with a member made by ``member(rank, size, **options)``, a class in an importable module."""

    def __init__(
        self,
        name: str,
        member: type[Member],
        size: int,
        *,
        loop: str = "asyncio",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._made_by = (f"{member.__module__}:{member.__qualname__}", loop, dict(options or {}))
        self._size = size
        self._workers: list[BaseProcess] = []
        self._controls: list[Connection] = []

    def __enter__(self) -> Self:
        # Spawned, as forked event loops and threads cannot be trusted; and a worker's memory is its own from the start.
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(self._size):
                ours, theirs = context.Pipe()
                self._controls.append(ours)
                # Not a daemon in the sense of multiprocessing, which could not have children of its own (hivemind's do).
                worker = context.Process(
                    target=_work, args=(theirs, rank, self._size, *self._made_by), name=f"{self.name}-{rank}"
                )
                worker.start()
                self._workers.append(worker)
                theirs.close()
            addresses = self.call("listen", timeout=START_SECONDS)
            self.call("join", addresses, timeout=START_SECONDS)
        except BaseException:
            self._stop(0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(STOP_SECONDS if error is None else 0.0)

    def call(self, method: str, *arguments: Any, timeout: float = CALL_SECONDS) -> list[Any]:
        """Run a coroutine of the members in all workers at once; returns the results by rank.

        Raises `ContestantFailed`, after which the workers are gone: what one left behind must not disturb the others' turns.
        """
        try:
            return self._call(method, arguments, timeout)
        except ContestantFailed:
            self._stop(0.0)
            raise

    def _call(self, method: str, arguments: Sequence[Any], timeout: float) -> list[Any]:
        for rank, control in enumerate(self._controls):
            try:
                control.send((method, arguments))
            except OSError:
                raise self._died(rank) from None
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < self._size:
            pending = {control: rank for rank, control in enumerate(self._controls) if rank not in results}
            ready = set(wait(list(pending), max(0.0, deadline - time.monotonic())))
            if not ready:
                late = ", ".join(str(rank) for rank in pending.values())
                raise ContestantFailed(f"no answer to '{method}' from worker {late} within {timeout:g} s")
            for control, rank in pending.items():
                if control not in ready:
                    continue
                try:
                    good, value = control.recv()
                except (EOFError, OSError):
                    raise self._died(rank) from None
                if not good:
                    raise ContestantFailed(f"worker {rank} failed in '{method}':\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self._size)]

    def _died(self, rank: int) -> ContestantFailed:
        worker = self._workers[rank]
        worker.join(STOP_SECONDS)
        return ContestantFailed(f"worker {rank} died (exit status {worker.exitcode})")

    def _stop(self, patience: float) -> None:
        for control in self._controls:
            control.close()  # the workers take it as the sign to close
        deadline = time.monotonic() + patience
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            _kill_family(worker.pid)
            if worker.exitcode is None:
                worker.kill()
        for worker in self._workers:
            worker.join()
            worker.close()
        self._workers.clear()
        self._controls.clear()


# ------------------------------------------------------------------------------------------------------- in the workers


def _work(control: Connection, rank: int, size: int, member: str, loop: str, options: Mapping[str, Any]) -> None:
    # A group of its own: Ctrl-C is then the parent's matter, and the processes that a library starts can be ended with it.
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    module, _, name = member.partition(":")
    with asyncio.Runner(loop_factory=lambda: new_event_loop(loop)) as runner:
        runner.run(_serve(control, lambda: getattr(importlib.import_module(module), name)(rank, size, **options)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _kill_family(os.getpid())
    os._exit(1)


def _kill_family(worker: int | None) -> None:
    """End a worker and what it started (as far as that stayed in its process group)."""
    if hasattr(os, "killpg") and worker is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)


async def _serve(control: Connection, make: Callable[[], Member]) -> None:
    member: Member | None = None
    try:
        while True:
            try:
                method, arguments = await asyncio.to_thread(control.recv)
            except EOFError:
                return
            try:
                member = member or make()
                gc.collect()
                gc.freeze()  # what imports made (a million objects with torch) is not looked at in the midst of a measurement
                answer = (True, await getattr(member, method)(*arguments))
            except Exception:
                # Not handled here, but reported: the parent drops this contestant, with the trace as the reason.
                answer = (False, traceback.format_exc())
            with contextlib.suppress(BrokenPipeError):
                control.send(answer)
    finally:
        if member is not None:
            await member.resources.aclose()
