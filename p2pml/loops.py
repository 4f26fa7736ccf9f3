"""Which event loop to use: uvloop where the platform has it, asyncio's own elsewhere; and a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from p2pml.errors import MissingExtra

T = TypeVar("T")
KINDS = ("auto", "asyncio", "uvloop")


def new_event_loop(kind: str = "auto") -> asyncio.AbstractEventLoop:
    """A new event loop: 'uvloop', 'asyncio', or 'auto' for uvloop if it is installed. Raises `MissingExtra`."""
    if kind not in KINDS:
        raise ValueError(f"an event loop is one of {', '.join(KINDS)}, not {kind!r}")
    if kind != "asyncio":
        try:
            import uvloop
        except ImportError:
            if kind == "uvloop":
                raise MissingExtra("the uvloop event loop is not installed: pip install uvloop") from None
        else:
            return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def run(work: Coroutine[Any, Any, T], kind: str = "auto") -> T:
    """`asyncio.run` on a loop of this kind."""
    with asyncio.Runner(loop_factory=lambda: new_event_loop(kind)) as runner:
        return runner.run(work)


class LoopThread:
    """An event loop in a thread of its own, for programs that block: scripts, notebooks, ordinary training loops.

    Coroutines are run by `call` from any other thread. It is closed at the interpreter's exit if not before; `close` cancels
    what still runs and waits for it.
    """

    def __init__(self, kind: str = "auto") -> None:
        self._loop = new_event_loop(kind)
        self._thread = threading.Thread(target=self._serve, name="p2pml", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            pending = asyncio.all_tasks(self._loop)
            for task in pending:
                task.cancel()
            if pending:
                self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop and return its future at once."""
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the event loop's thread has ended")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result; it is cancelled after `timeout` seconds, and on an interrupt.

        Raises what it raises, and `TimeoutError`.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a blocking call from the event loop's own thread would wait for itself")
        future = self.submit(work)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop and its thread; safe to call twice."""
        atexit.unregister(self.close)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
