"""What every test is held to, beyond its own assertions.

* Nothing is logged at level ERROR. Exceptions that a loop's handler gets, and those of tasks that nobody awaited, are
  logged there by asyncio itself. (Marker `allow_error_logs` for tests of just that.)
* Garbage is collected before a test is over, so that sockets and transports left open are its failure (warnings are
  errors) and not the next test's.
* An async test leaves no task behind, and runs on asyncio's own loop and on uvloop where there is one. (The marker
  `one_loop` asks for the first only; ``--loop`` names one of them for the whole run.)
* It ends within the `timeout` of pyproject.toml, or within its own, ``@pytest.mark.timeout(seconds)``.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
LOOPS: dict[str, LoopFactory] = {"asyncio": asyncio.SelectorEventLoop}
if find_spec("uvloop") is not None:  # not every platform has it
    LOOPS["uvloop"] = import_module("uvloop").new_event_loop


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--loop", choices=["asyncio", "uvloop"], help="run async tests on this loop only")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    wanted = config.getoption("--loop")
    if wanted is not None and wanted not in LOOPS:
        raise pytest.UsageError(f"--loop {wanted}: it is not installed")
    if wanted is None and item.get_closest_marker("one_loop"):
        wanted = "asyncio"
    return LOOPS if wanted is None else {wanted: LOOPS[wanted]}


def _bounded(test: Callable[..., Awaitable[None]], seconds: float) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def run(*arguments: Any, **options: Any) -> None:
        async with asyncio.timeout(seconds):
            await test(*arguments, **options)

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Generator[None, None, None]:
    """Cancel an async test shortly before pytest-timeout would end it.

    The traceback then shows where the test waits; and uvloop swallows the exception that pytest-timeout raises.
    """
    if item.get_closest_marker("asyncio"):
        marker = item.get_closest_marker("timeout")
        limit = float(marker.args[0] if marker else item.config.getini("timeout"))
        if hasattr(item.obj, "hypothesis"):  # its examples run one by one, and a failing one several times
            holder, name, seconds = item.obj.hypothesis, "inner_test", limit / 10
        else:
            holder, name, seconds = item, "obj", max(limit - 5, limit / 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder, name, _bounded(getattr(holder, name), seconds))
            return (yield)
    return (yield)


def pytest_collection_finish() -> None:
    gc.freeze()  # what the imports made (a million objects with torch) need not be looked at after every test


class _Errors(logging.Handler):
    """Keeps what is logged at level ERROR and above."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


@pytest.fixture(autouse=True)
def no_error_logs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up first and torn down last: what a test leaves to the garbage collector is logged by then."""
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    try:
        yield
        gc.collect()
    finally:
        logging.getLogger().removeHandler(errors)
    if errors.messages and not request.node.get_closest_marker("allow_error_logs"):
        pytest.fail("the test logged errors:\n" + "\n".join(errors.messages), pytrace=False)


@pytest.fixture(autouse=True)
def no_orphan_tasks(request: pytest.FixtureRequest, no_error_logs: None) -> None:
    """For async tests: fixtures that the test names are set up after this one, so they are gone when it looks."""
    if request.node.get_closest_marker("asyncio"):
        request.getfixturevalue("_watch_tasks")


@pytest.fixture
async def _watch_tasks() -> AsyncIterator[None]:
    yield
    orphans = asyncio.all_tasks() - {asyncio.current_task()}
    if orphans:
        _, orphans = await asyncio.wait(orphans, timeout=1)  # time to end what is being closed
    if orphans:
        pytest.fail("the test left tasks running:\n" + "\n".join(map(repr, orphans)), pytrace=False)
