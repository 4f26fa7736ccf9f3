"""The command line in processes of its own, with a task that trains in no time."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]

TASK = """
import os, time
import torch
from torch import nn
from p2pml.protocols.training.data import Data
from p2pml.protocols.training.task import Task

def digits(part, parts):
    generator = torch.Generator().manual_seed(part)
    inputs = torch.randn(64, 6, generator=generator)
    return Data(inputs, inputs[:, :3].argmax(1))

def model():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

def data(part, parts):
    if part == int(os.environ.get("TEST_BAD_PART", -1)):
        raise RuntimeError("the disk is on fire")
    return digits(part, parts)

def slowly(inputs, generator):
    time.sleep(float(os.environ.get("TEST_BATCH_SECONDS", 0)))
    return inputs

def task():
    return Task(name="tiny", model=model, data=data, test=lambda: digits(99, 1), classes=3, augment=slowly, batch_size=32, epochs=3)
"""


class Command:
    """A running ``p2pml`` command. `events` are what it reported so far, as JSON lines; `errors` its standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        self.errors = ""
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._threads = [threading.Thread(target=self._read_output), threading.Thread(target=self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()

    def until(self, wanted: Callable[[dict[str, Any]], bool], timeout: float = 40) -> dict[str, Any]:
        """The first event like this from now on."""
        while True:
            line = self._lines.get(timeout=timeout)
            assert line is not None, f"it ended with {self.process.wait()} before that came:\n{self.errors}"
            self.events.append(json.loads(line))
            if wanted(self.events[-1]):
                return self.events[-1]

    def event(self, name: str, peer: str | None = None, **fields: Any) -> dict[str, Any]:
        """The first event of this name and these fields from now on."""
        wanted = {"event": name, **fields, **({} if peer is None else {"peer": peer})}
        return self.until(lambda found: wanted.items() <= found.items())

    def finish(self, timeout: float = 40) -> int:
        """Wait for its end; returns the exit status."""
        status = self.process.wait(timeout)
        for thread in self._threads:
            thread.join(timeout)
        while (line := self._lines.get_nowait()) is not None:
            self.events.append(json.loads(line))
        return status

    def all(self, name: str, peer: str | None = None) -> list[dict[str, Any]]:
        """The events of this name."""
        return [found for found in self.events if found["event"] == name and peer in (None, found["peer"])]


class Commands:
    """Starts commands; `task` is the name of the quick task. All of them and their children are gone at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.task = f"task_in_{folder.name}:task"  # unique, so that processes can be found by it
        (folder / f"task_in_{folder.name}.py").write_text(TASK)
        self._running: list[Command] = []

    def __call__(self, *arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> Command:
        """Start ``p2pml`` with these arguments."""
        path = os.pathsep.join([str(self.folder), str(ROOT)])
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "p2pml.cli", *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": path} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(Command(process))
        return self._running[-1]

    def left(self) -> list[psutil.Process]:
        """The processes that still work on the task."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(self.task in argument for argument in process.cmdline()):
                    found.append(process)
        return found

    def close(self) -> None:
        for process in self.left():
            process.kill()
        for command in self._running:
            if command.process.poll() is None:
                command.process.kill()
            command.process.wait(10)
            for thread in command._threads:
                thread.join(10)
            for stream in (command.process.stdout, command.process.stderr):
                assert stream is not None
                stream.close()


@pytest.fixture
def p2pml(tmp_path: Path) -> Iterator[Commands]:
    """The command line, in the test's own folder."""
    commands = Commands(tmp_path)
    try:
        yield commands
    finally:
        commands.close()
