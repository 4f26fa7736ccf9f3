from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pml.cli import plot, results
from p2pml.cli.baselines import CENTRAL, Curve
from p2pml.cli.deviation import Deviation
from p2pml.cli.group import GroupRun
from p2pml.cli.outcome import Unwritable
from p2pml.cli.progress import Progress
from p2pml.cli.show import write_json
from p2pml.errors import MissingExtra

NAMES = ["peer-1", "peer-2"]


def arguments(folder: Path, **more: Any) -> argparse.Namespace:
    given = {
        "task": "watch",
        "peers": 2,
        "rounds": None,
        "steps_per_round": None,
        "weighting": "equal",
        "combine": "parameters",
        "seed": 0,
        "loop": "auto",
        "report": "auto",
        "json": folder / "deep" / "out.json",
        "plot": folder / "deep" / "plot.png",
        "no_plot": False,
    }
    return argparse.Namespace(**{**given, **more})


def finished(*, rounds: int = 2, accuracy: float | None = 0.9) -> GroupRun:
    progress = Progress(2, rounds)
    for number in range(1, rounds + 1):
        for index, name in enumerate(NAMES):
            figures = {"bytes_sent": 1000 * number, "bytes_received": 0, "peak_rss_bytes": (index + 1) << 20}
            progress.feed(
                {
                    **{"event": "round", "peer": name, "time": float(number), "round": number, "loss": 1.0},
                    **{"accuracy": accuracy, "loop_lag_p99_seconds": 0.001 * (index + 1), **figures},
                }
            )
    run = GroupRun(progress, NAMES, seconds=2.0)
    run.summaries = {name: {} for name in NAMES}
    run.deviation = Deviation(2, 1.5e-7, 1e-7, True)
    return run


def curves() -> dict[str, Curve]:
    return {"peer-1": Curve([0.5, 0.6]), "peer-2": Curve([0.3, 0.7]), CENTRAL: Curve([0.8, 0.95])}


def test_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results.conclude(arguments(tmp_path), finished(), curves()) == 0
    found = json.loads((tmp_path / "deep/out.json").read_text())
    assert found["accuracy"] == pytest.approx(0.9)
    assert (found["alone_accuracy"], found["central_accuracy"]) == (0.7, 0.95)
    assert (found["bytes_sent"], found["peak_rss_bytes"], found["loop_lag_p99_seconds"]) == (4000, 2 << 20, 0.002)
    assert (found["max_deviation_from_mean"], found["verified_rounds"]) == (1.5e-7, 2)
    assert found["versions"]["p2pml"]
    assert (tmp_path / "deep/plot.png").stat().st_size > 10_000
    text = capsys.readouterr().out
    assert "The group is 0.200 better than the best peer alone." in text
    assert "the same bits on all peers" in text


def test_a_failure_shows_in_the_status_and_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished()
    run.failures["peer-2"] = "signal SIGKILL"
    assert results.conclude(arguments(tmp_path), run, curves()) == 1
    assert "peer-2 FAILED (signal SIGKILL)" in capsys.readouterr().out
    assert json.loads((tmp_path / "deep/out.json").read_text())["by_peer"]["peer-2"]["failure"] == "signal SIGKILL"


def test_a_failed_baseline_is_a_failure_too(tmp_path: Path) -> None:
    assert results.conclude(arguments(tmp_path), finished(), {**curves(), CENTRAL: Curve(error="exit status 1")}) == 1


def test_models_that_differ_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished()
    run.deviation = Deviation(2, 0.1, 0.1, False)
    assert results.conclude(arguments(tmp_path), run, curves()) == 1
    assert "DIFFERENT on the peers" in capsys.readouterr().out


def test_a_task_without_accuracy(tmp_path: Path) -> None:
    run, none = finished(accuracy=None), {name: Curve([None, None]) for name in curves()}
    assert results.conclude(arguments(tmp_path), run, none) == 0
    found = json.loads((tmp_path / "deep/out.json").read_text())
    assert found["accuracy"] is found["alone_accuracy"] is found["plot"] is None


def test_a_group_that_never_trained(tmp_path: Path) -> None:
    run = GroupRun(Progress(2), NAMES, failures={"peer-1": "exit status 1"})
    assert results.conclude(arguments(tmp_path), run, {}) == 1
    assert json.loads((tmp_path / "deep/out.json").read_text())["rounds"] == 0


def test_a_plot_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'p2pml\[plot\]'"):
        plot.require()


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unwritable, match=r"out\.json cannot be written"):
        write_json(tmp_path / "file" / "out.json", {})
    with pytest.raises(Unwritable, match=r"out\.png cannot be written"):
        plot.draw(tmp_path / "file" / "out.png", "", [0.5], {}, [])
