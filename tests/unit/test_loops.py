"""Event loops by name, and the loop in a thread that blocking programs use."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from p2pml.errors import MissingExtra
from p2pml.loops import KINDS, LoopThread, new_event_loop, run

INSTALLED = [kind for kind in KINDS if kind != "uvloop" or find_spec("uvloop")]


async def kind_of_loop() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


async def forever(begun: threading.Event, ended: threading.Event) -> None:
    begun.set()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        ended.set()


@pytest.fixture(params=INSTALLED)
def thread(request: pytest.FixtureRequest) -> Iterator[LoopThread]:
    with LoopThread(request.param) as thread:
        yield thread
    assert "p2pml" not in [other.name for other in threading.enumerate()]


@pytest.mark.parametrize("kind", INSTALLED)
def test_a_loop_is_of_the_kind_that_was_asked_for(kind: str) -> None:
    wanted = ("uvloop" if find_spec("uvloop") else "asyncio") if kind == "auto" else kind
    assert run(kind_of_loop(), kind) == wanted


def test_an_unknown_kind_is_refused_and_leaves_no_coroutine_behind() -> None:
    with pytest.raises(ValueError, match=r"one of auto, asyncio, uvloop, not 'trio'"):
        run(kind_of_loop(), "trio")


def test_without_uvloop_auto_is_asyncio_and_uvloop_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert run(kind_of_loop(), "auto") == "asyncio"
    with pytest.raises(MissingExtra, match="pip install uvloop"):
        new_event_loop("uvloop")


async def test_run_within_a_running_loop_is_an_error_without_leftovers() -> None:
    with pytest.raises(RuntimeError, match="is in this thread already"):
        run(kind_of_loop())


def test_a_call_gives_the_result_or_raises_the_error(thread: LoopThread) -> None:
    async def add(a: int, b: int) -> int:
        await asyncio.sleep(0)
        return a + b

    async def fail() -> None:
        raise LookupError("not here")

    assert thread.call(add(1, 2)) == 3
    with pytest.raises(LookupError, match="not here"):
        thread.call(fail())
    assert thread.call(add(3, 4)) == 7


def test_a_call_that_times_out_is_cancelled(thread: LoopThread) -> None:
    begun, ended = threading.Event(), threading.Event()
    with pytest.raises(TimeoutError):
        thread.call(forever(begun, ended), timeout=0.05)
    assert ended.wait(5)


def test_calls_from_several_threads_run_at_once(thread: LoopThread) -> None:
    barrier: list[asyncio.Future[None]] = []

    async def meet() -> int:
        future = asyncio.get_running_loop().create_future()
        barrier.append(future)
        if len(barrier) == 4:
            for other in barrier:
                other.set_result(None)
        await future
        return threading.get_ident()

    found: list[int] = []
    callers = [threading.Thread(target=lambda: found.append(thread.call(meet(), 10))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 4
    assert len(set(found)) == 1


def test_closing_cancels_what_runs_and_wakes_who_waits(thread: LoopThread) -> None:
    begun, ended = threading.Event(), threading.Event()
    future = thread.submit(forever(begun, ended))
    assert begun.wait(5)
    thread.close()
    assert ended.is_set()
    assert future.cancelled()
    thread.close()
    with pytest.raises(RuntimeError, match="has ended"):
        thread.call(kind_of_loop())


def test_what_is_submitted_right_before_closing_does_not_wait_for_ever() -> None:
    for _ in range(50):
        thread = LoopThread()
        closer = threading.Thread(target=thread.close)
        closer.start()
        try:
            future = thread.submit(asyncio.sleep(60))
        except RuntimeError:
            future = None
        closer.join()
        assert future is None or future.cancelled()


def test_close_from_many_threads_at_once() -> None:
    thread = LoopThread()
    closers = [threading.Thread(target=thread.close) for _ in range(8)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(10)
    assert not any(closer.is_alive() for closer in closers)


def test_a_call_from_the_loop_s_own_thread_is_an_error(thread: LoopThread) -> None:
    async def call_back() -> None:
        thread.call(kind_of_loop())

    with pytest.raises(RuntimeError, match="wait for itself"):
        thread.call(call_back())


def test_close_from_the_loop_s_own_thread_does_not_wait_for_itself() -> None:
    thread = LoopThread()

    async def close() -> None:
        thread.close()

    future = thread.submit(close())
    assert future.exception(10) is None
    thread.close()


async def test_it_works_inside_a_running_loop(thread: LoopThread) -> None:
    """flower#5512: a notebook has a loop already."""
    assert thread.call(kind_of_loop()) in ("asyncio", "uvloop")


def test_an_interrupt_of_the_caller_cancels_the_call(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()
    submit = thread.submit

    def interrupted(work: object) -> object:
        future = submit(work)  # type: ignore[arg-type]
        assert begun.wait(5)

        def result(timeout: float | None = None) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(future, "result", result)
        return future

    monkeypatch.setattr(thread, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.call(forever(begun, ended))
    assert ended.wait(5)
    monkeypatch.undo()
    assert thread.call(kind_of_loop())


def work_in_a_child(connection: object) -> None:
    connection.send(LoopThread().call(kind_of_loop()))  # type: ignore[attr-defined]


def test_it_works_under_spawn() -> None:
    """hivemind#498. The child never closes it: the interpreter's exit does."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=work_in_a_child, args=(there,))
    child.start()
    assert here.poll(30)
    assert here.recv() in ("asyncio", "uvloop")
    child.join(30)
    assert child.exitcode == 0
    here.close()
    there.close()
    child.close()


@pytest.mark.parametrize("moment", ["dialing", "linked"])
def test_the_end_of_the_program_closes_it_in_order(moment: str) -> None:
    """cpython#92841: no "loop is closed" at exit; `finally` blocks run, and nodes close, also in the middle of a dial."""
    program = textwrap.dedent(f"""
        import asyncio, threading
        from p2pml import LoopThread, Node
        reached = {{"dialing": threading.Event(), "linked": threading.Event()}}
        async def serve():
            try:
                async with Node("server", listen=["tcp://127.0.0.1:0"]) as server, Node("client") as client:
                    reached["dialing"].set()
                    await client.dial(server.addresses[0])
                    reached["linked"].set()
                    await asyncio.get_running_loop().create_future()
            finally:
                print("closed", flush=True)
        thread = LoopThread()
        thread.submit(serve())
        assert reached["{moment}"].wait(10)
    """)
    options = ["-X", "dev", "-W", "error"]
    done = subprocess.run(
        [sys.executable, *options, "-c", program], text=True, capture_output=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
