"""Which event loop to use: uvloop where the platform has it, asyncio's own elsewhere; and a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

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
    """`asyncio.run` on a loop of this kind. Where one runs already, as in a notebook, await the coroutine or use `LoopThread`."""
    try:
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("a running event loop is in this thread already: await the coroutine, or use a LoopThread")
        with asyncio.Runner(loop_factory=lambda: new_event_loop(kind)) as runner:
            return runner.run(work)
    finally:
        work.close()  # where it did not come to run


class LoopThread:
    """An event loop in a thread of its own, for programs that block: scripts, notebooks, ordinary training loops.

    Coroutines are run by `call` from any other thread, also from one with a running loop (which waits meanwhile). It is closed
    at the interpreter's exit if not before; `close` cancels what still runs and waits for it. It does not survive a fork.
    """

    def __init__(self, kind: str = "auto") -> None:
        self._loop = new_event_loop(kind)
        self._stop = asyncio.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="p2pml", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop and return its future at once. Raises `RuntimeError` if the thread has ended."""
        with self._lock:  # what comes before the stop is begun, and so it is cancelled, and does not wait for ever
            if not self._closed and self._thread.is_alive():
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError("the event loop's thread has ended")

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
        """Cancel what runs, and wait until the loop and its thread have ended; safe to call twice, and from any thread."""
        atexit.unregister(self.close)
        with self._lock:
            if not self._closed and self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._stop.set)
            self._closed = True
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
