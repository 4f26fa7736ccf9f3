"""Running a command's coroutine so that whoever wants it to stop can: it is cancelled, and so ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from p2pml import loops
from p2pml.cli.children import end_with_parent
from p2pml.cli.outcome import Terminated

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], loop: str, *, is_child: bool = False) -> T:
    """Run `work` on a loop of this kind. A child is told to stop by its parent, too.

    Raises what it raises, `KeyboardInterrupt` after Ctrl-C, `Terminated`.
    """
    try:
        return loops.run(_stoppable(work, is_child), loop)
    except asyncio.CancelledError:
        raise Terminated("told to stop") from None


async def _stoppable(work: Coroutine[Any, Any, T], is_child: bool) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
            loop.call_soon_threadsafe(task.cancel)

    with contextlib.suppress(NotImplementedError):  # Windows has no such signal
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    if is_child:
        end_with_parent(stop)
    return await work
