from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import pytest

import p2pml
from p2pml.address import Address
from p2pml.cli import options
from p2pml.cli.main import main

ROOT = Path(__file__).resolve().parents[3]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"p2pml {p2pml.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "required: COMMAND"),
        (["begin"], "invalid choice: 'begin'"),
        (["start", "--peers", "0"], "'0' is not a whole number from 1 on"),
        (["start", "--peers", "two"], "'two' is not a whole number from 1 on"),
        (["start", "--part", "5/4"], "'5/4' is no part"),
        (["start", "--weighting", "random"], "invalid choice: 'random'"),
        (["start", "--listen", "10.0.0.2:7700"], "did you mean 'tcp://10.0.0.2:7700'?"),
        (["start", "--name", "a peer"], "'a peer' is no peer id"),
        (["join"], "required: ADDRESS"),
        (["join", "tcp://host:99999"], "the port is '99999'"),
        (["demo", "other"], "invalid choice: 'other'"),
        (["bench", "link", "--only", "pigeons"], "pigeons: choose from"),
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["start", "--listen", "tcp://0.0.0.0:0"],
            "tcp://0.0.0.0:0: listening beyond this machine is refused without --insecure",
        ),
        (["start", "--listen", "tcp://127.0.0.1:0", "--listen", "tcp://:0"], "tcp://:0: listening beyond this machine"),
        (["join", "tcp://192.0.2.1:7700"], "tcp://:0: listening beyond this machine is refused"),
        (["start", "--resume"], "--resume needs --checkpoint"),
        (["start", "--part", "2/3"], "the data is dealt in 4 parts (--peers), not in 3"),
        (["start", "--listen", "pigeon://roof", "--insecure"], "no transport for 'pigeon://'"),
    ],
)
def test_arguments_that_make_no_sense_together(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_documented_error_is_one_line_and_a_trace_if_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["start", "--listen", "tcp://127.0.0.1:0", "--peers", "1", "--task", "nothing", "--loop", "asyncio"]
    assert main(wrong) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("p2pml: there is no task 'nothing'")
    assert captured.err.count("\n") == 1
    assert main([*wrong, "-v"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_is_there_at_once() -> None:
    def seconds(arguments: list[str]) -> float:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "p2pml.cli", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for heavy in ("torch", "numpy", "rich", "matplotlib"):
            assert f" {heavy}\n" not in done.stderr, f"--help imports {heavy}"
        return time.perf_counter() - began

    assert min(seconds(["--help"]) for _ in range(5)) < 0.3


def test_types() -> None:
    assert options.part("2/4") == (1, 4)
    assert options.part("auto") is None
    assert options.at_least(0)("0") == 0
    assert options.address("tcp://[::1]:1") == Address("tcp", "::1", 1)
    for wrong in ("0/4", "2", "2/x", "-1/4", "²/4"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no part"):
            options.part(wrong)


def test_flags_as_they_were_given() -> None:
    given = argparse.Namespace(task="watch", steps_per_round=5, rounds=None)
    assert options.as_flags(given, "task", "steps_per_round", "rounds") == ["--task", "watch", "--steps-per-round", "5"]
