"""Children are real processes here: modules that each test writes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2pml.cli import children
from p2pml.cli.children import Child, Family

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.one_loop

REPORT = """
import json, sys, time
def report(name, **fields):
    print(json.dumps({"event": name, "peer": "", "time": time.time(), **fields}), flush=True)
"""
OBEDIENT = """
import threading
from p2pml.cli.children import end_with_parent
ended = threading.Event()
end_with_parent(ended.set)
report("started")
assert ended.wait(30)
report("bye")
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a module that children can run."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))

    def write(name: str, code: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(REPORT) + textwrap.dedent(code))
        return name

    return write


class Log:
    """What a family's children reported."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.came = asyncio.Event()

    def __call__(self, child: Child, event: Any) -> None:
        self.events.append((child.name, dict(event)))
        self.came.set()

    @property
    def names(self) -> list[str]:
        return [event["event"] for _, event in self.events]

    async def until(self, name: str) -> None:
        while name not in self.names:
            self.came.clear()
            await self.came.wait()


async def test_reports_come_in_order_and_other_output_is_kept_apart(write: Any) -> None:
    code = "report('one', x=1)\nprint('a user prints'); print('[1, 2]')\nreport('two')\nprint('and warns', file=sys.stderr)"
    log = Log()
    async with Family(log) as family:
        child = await family.start("a", [write("child_reports", code)])
        await family.finished()
    assert log.names == ["one", "two"]
    assert log.events[0][1]["x"] == 1
    assert sorted(child.tail) == ["[1, 2]", "a user prints", "and warns"]
    assert (child.status, child.failed) == (0, False)


async def test_a_failure_is_told_with_its_traceback(write: Any) -> None:
    log = Log()
    async with Family(log) as family:
        child = await family.start(
            "a", [write("child_fails", "def broken():\n    raise KeyError('the reason')\nbroken()")]
        )
        await family.finished()
    assert child.failed
    ((name, told),) = log.events
    assert (name, told["event"], told["status"]) == ("a", "exited", "exit status 1")
    assert "Traceback (most recent call last):" in told["tail"]
    assert told["tail"][-1] == "KeyError: 'the reason'"


async def test_a_killed_child_is_told_with_the_signal(write: Any) -> None:
    log = Log()
    async with Family(log) as family:
        child = await family.start("a", [write("child_waits", OBEDIENT)])
        await log.until("started")
        os.kill(child.process.pid, signal.SIGKILL)
        await family.finished()
    assert log.events[-1][1]["status"] == "signal SIGKILL"


async def test_children_end_in_order_with_the_block(write: Any) -> None:
    log = Log()
    async with Family(log) as family:
        child = await family.start("a", [write("child_obeys", OBEDIENT)])
        await log.until("started")
    assert log.names == ["started", "bye"]
    assert (child.status, child.failed) == (0, False)


async def test_children_that_do_not_end_are_killed(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "PATIENCE", 0.3)
    log = Log()
    async with Family(log) as family:
        child = await family.start("a", [write("child_deaf", "report('started')\ntime.sleep(60)")])
        await log.until("started")
    assert child.status == -signal.SIGKILL


async def test_an_error_in_the_block_comes_out_as_it_is(write: Any) -> None:
    log, born = Log(), []

    async def fail() -> None:
        async with Family(log) as family:
            born.append(await family.start("a", [write("child_obeys_too", OBEDIENT)]))
            await log.until("started")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert born[0].status is not None


async def test_cancelled_families_leave_nothing(write: Any) -> None:
    log, born = Log(), []

    async def live() -> None:
        async with Family(log) as family:
            born.append(await family.start("a", [write("child_obeys_still", OBEDIENT)]))
            await family.finished()

    task = asyncio.create_task(live())
    await log.until("started")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(born[0].process.pid)


PARENT = """
import asyncio
from p2pml.cli.children import Family
async def main():
    async with Family(lambda child, event: print(child.process.pid, flush=True)) as family:
        await family.start("a", ["{child}"])
        await family.finished()
asyncio.run(main())
"""


@pytest.mark.parametrize("pipe_only", [False, True])
def test_children_end_when_their_parent_is_killed(write: Any, pipe_only: bool) -> None:
    """By the kernel's signal, and where there is none by the end of the pipe."""
    code = "import sys; sys.platform = 'other'\n" + OBEDIENT if pipe_only else OBEDIENT
    parent_module = write("parent_of_one", PARENT.format(child=write("child_orphan", code)))
    with subprocess.Popen([sys.executable, "-m", parent_module], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait(10)
    _, alive = psutil.wait_procs([child], timeout=10)
    assert alive == []
