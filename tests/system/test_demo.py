"""`p2pml demo` end to end: real peer processes over loopback TCP."""

from __future__ import annotations

import json
import signal
from typing import Any

import psutil
import pytest

from tests.system.commands import Commands, p2pml

__all__ = ["p2pml"]  # a fixture

pytestmark = pytest.mark.timeout(120)

KEYS = {
    "protocol",
    "peers",
    "rounds",
    "accuracy",
    "alone_accuracy",
    "central_accuracy",
    "seconds",
    "bytes_sent",
    "peak_rss_bytes",
    "max_deviation_from_mean",
    "loop_lag_p99_seconds",
    "versions",
}


def read(commands: Commands) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((commands.folder / "out.json").read_text())
    return found


@pytest.mark.parametrize("combine", ["parameters", pytest.param("delta", marks=pytest.mark.slow)])
def test_two_peers_two_rounds(p2pml: Commands, combine: str) -> None:
    demo = p2pml(
        *("demo", "chainsgd", "--peers", "2", "--rounds", "2", "--task", p2pml.task, "--combine", combine),
        *("--json", "out.json", "--plot", "plots/out.png", "--report", "json"),
    )
    assert demo.finish(90) == 0, demo.errors
    found = read(p2pml)
    assert found.keys() >= KEYS
    assert (found["protocol"], found["peers"], found["rounds"]) == ("chainsgd", 2, 2)
    for key in ("accuracy", "alone_accuracy", "central_accuracy"):
        assert 0 <= found[key] <= 1
    assert found["alone_accuracy"] == max(found["alone_accuracies"].values())
    assert found["verified_rounds"] == 2
    assert found["identical_on_all_peers"]
    assert 0 <= found["max_deviation_from_mean"] < 1e-6
    assert found["bytes_sent"] > 2 * 4 * 200
    assert found["peak_rss_bytes"] > 50 << 20
    assert found["seconds"] > 0
    assert (p2pml.folder / "plots/out.png").read_bytes().startswith(b"\x89PNG")
    assert {(one["sender"], one["receiver"]) for one in demo.all("pair")} in (
        {("peer-1", "peer-2")},
        {("peer-2", "peer-1")},
    )
    assert len(demo.all("round")) == 4
    assert demo.all("result")[0]["accuracy"] == found["accuracy"]
    assert p2pml.left() == []


@pytest.mark.slow
def test_lines_for_people(p2pml: Commands) -> None:
    demo = p2pml(
        *("demo", "chainsgd", "--peers", "2", "--rounds", "1", "--task", p2pml.task, "--no-plot", "--no-baselines")
    )
    lines = []
    while (line := demo._lines.get(timeout=60)) is not None:
        lines.append(line)
    assert demo.process.wait(10) == 0
    text = "".join(lines)
    for part in ("peer-2 is ready with part 2 of 2", "round 1/1  loss ", "the group of 2", "1 verified rounds"):
        assert part in text
    assert "\x1b" not in text


@pytest.mark.slow
def test_a_peer_that_cannot_begin_ends_the_demo_at_once(p2pml: Commands) -> None:
    demo = p2pml(
        *(
            "demo",
            "chainsgd",
            "--peers",
            "3",
            "--task",
            p2pml.task,
            "--no-plot",
            "--report",
            "json",
            "--json",
            "out.json",
        ),
        TEST_BAD_PART="2",
    )
    assert demo.finish(60) == 1
    (told,) = demo.all("exited")
    assert told["peer"] == "peer-3"
    assert any("the disk is on fire" in line for line in told["tail"])
    assert any("Traceback" in line for line in told["tail"])
    assert read(p2pml)["by_peer"]["peer-3"]["failure"] == "exit status 1"
    assert p2pml.left() == []


def started(p2pml: Commands, peers: int) -> Any:
    return p2pml(
        *("demo", "chainsgd", "--peers", str(peers), "--rounds", "8", "--task", p2pml.task),
        *("--no-baselines", "--no-plot", "--report", "json", "--json", "out.json"),
        TEST_BATCH_SECONDS="0.1",
    )


def process_of(p2pml: Commands, peer: str) -> psutil.Process:
    (found,) = [process for process in p2pml.left() if peer in process.cmdline()]
    return found


def test_a_peer_that_is_killed_does_not_stop_the_others(p2pml: Commands) -> None:
    demo = started(p2pml, 3)
    demo.event("round", "peer-3", round=2)
    process_of(p2pml, "peer-3").kill()
    assert demo.finish(60) == 1
    (told,) = demo.all("exited")
    assert (told["peer"], told["status"]) == ("peer-3", "signal SIGKILL")
    assert [one["member"] for one in demo.all("left")][:1] == ["peer-3"]
    for peer in ("peer-1", "peer-2"):
        assert demo.all("round", peer)[-1]["round"] == 8
        assert len(demo.all("done", peer)) == 1
    found = read(p2pml)
    assert found["rounds"] == 8
    assert found["by_peer"]["peer-3"]["failure"] == "signal SIGKILL"
    assert 1 <= found["verified_rounds"] < 8
    assert found["max_deviation_from_mean"] < 1e-6
    assert p2pml.left() == []


@pytest.mark.slow
def test_without_the_agent_the_others_end_and_say_why(p2pml: Commands) -> None:
    demo = started(p2pml, 3)
    demo.event("round", "peer-3", round=2)
    process_of(p2pml, "peer-1").kill()
    assert demo.finish(60) == 1
    reasons = {one["peer"]: one["error"] for one in demo.all("failed")}
    assert reasons.keys() == {"peer-2", "peer-3"}
    assert all("peer-1 is gone" in reason and "of 8" in reason for reason in reasons.values())
    assert p2pml.left() == []


@pytest.mark.parametrize(
    "which", [signal.SIGINT, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGTERM, signal.SIGKILL))]
)
def test_nothing_runs_on_when_the_demo_is_stopped(p2pml: Commands, which: signal.Signals) -> None:
    demo = started(p2pml, 3)
    demo.event("round", "peer-3", round=2)
    peers = [process_of(p2pml, f"peer-{number}") for number in (1, 2, 3)]
    demo.process.send_signal(which)
    status = demo.process.wait(20)
    assert status == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[which]
    _, alive = psutil.wait_procs(peers, timeout=10)
    assert alive == []
    if which != signal.SIGKILL:
        demo.finish()
        assert {one["peer"] for one in demo.all("stopped")} == {"peer-1", "peer-2", "peer-3"}
