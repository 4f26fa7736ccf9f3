from __future__ import annotations

import io
import itertools
import json
from typing import Any

import pytest
from rich.console import Console

from p2pml.cli.live import render
from p2pml.cli.progress import Progress
from p2pml.cli.show import JsonLines, Lines, duration, size

NAMES = ["peer-1", "peer-2", "peer-3"]


def event(kind: str, peer: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "peer": peer, "time": time, **fields}


def figures(sent: int) -> dict[str, Any]:
    return {
        "bytes_sent": sent,
        "bytes_received": 2 * sent,
        "peak_rss_bytes": 300_000_000,
        "loop_lag_p99_seconds": 0.004,
    }


def opening() -> list[dict[str, Any]]:
    ready = [
        event("ready", name, 100.0, task="watch", part=part, parts=3, samples=800, rounds=4)
        for part, name in enumerate(NAMES)
    ]
    joined = [event("joined", "peer-1", 100.0, member=name, members=n) for n, name in enumerate(NAMES[1:], 2)]
    told = event("open", "peer-1", 99.0, addresses=["tcp://127.0.0.1:7700"], task="watch", parts=3)
    return [told, *ready, *joined]


def round_(number: int, time: float, names: list[str] = NAMES) -> list[dict[str, Any]]:
    pairs = [
        event("pair", "peer-1", time - 0.1, round=number, sender=sender, receiver=receiver)
        for sender, receiver in [("peer-2", "peer-1"), ("peer-3", "peer-1")]
    ]
    ends = [
        event(
            "round",
            name,
            time + 0.001 * n,
            round=number,
            loss=1.0 / number + n,
            accuracy=0.2 * number,
            **figures(1000 * number),
        )
        for n, name in enumerate(names)
    ]
    return [*pairs, *ends]


def fed(events: list[dict[str, Any]]) -> Progress:
    progress = Progress()
    for each in events:
        progress.feed(each)
    return progress


def test_a_round_is_closed_when_all_have_reported_it() -> None:
    *most, last = [*opening(), *round_(1, 102.0)]
    progress = fed(most)
    assert progress.closed == []
    assert progress.round == 1
    progress.feed(last)
    (first,) = progress.closed
    assert (first.number, first.loss, first.accuracy) == (1, 2.0, pytest.approx(0.2))
    assert first.seconds == pytest.approx(2.002)
    assert first.bytes_sent == 3000
    assert progress.pairs == [("peer-2", "peer-1"), ("peer-3", "peer-1")]
    assert progress.seconds_left(102.002) == pytest.approx(3 * 2.002)
    assert progress.seconds_left(103.002) == pytest.approx(3 * 2.002 - 1)


def test_what_is_left_shrinks_to_nothing() -> None:
    events = opening()
    for number in range(1, 5):
        events += round_(number, 100.0 + 2 * number)
    progress = fed(events)
    assert [done.number for done in progress.closed] == [1, 2, 3, 4]
    assert progress.seconds_left(109.0) == 0.0
    assert progress.bytes_per_second == pytest.approx(3 * 500, rel=0.01)


def test_a_peer_that_fails_holds_no_round_up() -> None:
    progress = fed([*opening(), *round_(1, 102.0), *round_(2, 104.0, NAMES[:2])])
    assert len(progress.closed) == 1
    progress.feed(event("exited", "peer-3", 104.5, status="signal SIGKILL", tail=[]))
    progress.feed(event("left", "peer-1", 104.6, member="peer-3", reason="the connection was closed", members=2))
    assert [done.number for done in progress.closed] == [1, 2]
    assert progress.peers["peer-3"].state == "failed"
    assert "signal SIGKILL" in progress.peers["peer-3"].reason
    assert list(progress.members) == ["peer-1", "peer-2"]


def test_a_round_that_somebody_never_reported_is_closed_by_the_next() -> None:
    progress = fed([*opening(), *round_(1, 102.0, NAMES[:2]), *round_(2, 104.0)])
    assert [done.number for done in progress.closed] == [1, 2]


def test_the_order_of_the_peers_does_not_matter() -> None:
    ends = round_(1, 102.0)[2:]
    for order in itertools.permutations(ends):
        (first,) = fed([*opening(), *order]).closed
        assert first.loss == 2.0


def test_a_peer_by_itself() -> None:
    """As `start` and `join` see it: only their own reports, and the members' names at the agent."""
    events = [*opening()[:2], *opening()[4:]]
    events += [end for number in (1, 2) for end in round_(number, 100.0 + number, NAMES[:1])]
    progress = fed(events)
    assert [done.number for done in progress.closed] == [1, 2]
    assert list(progress.members) == NAMES


def test_unknown_events_are_no_fault() -> None:
    assert fed([event("weather", "peer-1", 1.0, sun=True)]).closed == []


def test_lines() -> None:
    out = io.StringIO()
    lines = Lines(Progress(), out)
    waiting = [event("waiting", "peer-2", 99.5, address="tcp://h:1", reason="tcp://h:1: refused")] * 2
    trouble = [
        event("refused", "peer-1", 103.0, round=2, member="peer-2", reason="conv.weight has NaN at 7"),
        event("exited", "peer-3", 105.0, status="signal SIGKILL", tail=["last words"]),
    ]
    for each in [*opening(), *waiting, *round_(1, 102.0), *trouble]:
        lines(each)
    assert out.getvalue().splitlines() == [
        "peer-1 opened a group of 3 to train watch; to join:  p2pml join tcp://127.0.0.1:7700",
        "peer-1 is ready with part 1 of 3 (800 examples)",
        "peer-2 is ready with part 2 of 3 (800 examples)",
        "peer-3 is ready with part 3 of 3 (800 examples)",
        "peer-2 joined; members: 2",
        "peer-3 joined; members: 3",
        "peer-2 cannot join yet: tcp://h:1: refused; trying again",
        "round 1/4  loss 2.000  accuracy 0.200  3.0 kB at 1.5 kB/s  2.0 s  peer-2→peer-1 peer-3→peer-1  ETA 6 s",
        "round 2: the contribution of peer-2 is not used: conv.weight has NaN at 7",
        "peer-3 ended with signal SIGKILL",
        "  | last words",
    ]


def test_json_lines_are_json_also_where_a_loss_is_not_a_number() -> None:
    out = io.StringIO()
    sink = JsonLines(Progress(), out)
    sink(event("round", "a", 1.0, round=1, loss=float("nan"), accuracy=0.5, more={"x": [float("inf"), 1]}))
    found = json.loads(out.getvalue(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert (found["loss"], found["more"], found["accuracy"]) == (None, {"x": [None, 1]}, 0.5)


def drawn(progress: Progress, now: float, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(render(progress, ["a note"], now))
    return captured.get()


def test_the_live_display() -> None:
    progress = fed([*opening(), *round_(1, 102.0), *round_(2, 104.0)])
    text = drawn(progress, 104.5)
    for part in ("watch", "round 2/4", "ETA", "0.400", "peer-3", "3/3", "peer-2 → peer-1", "4.0 ms", "a note"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_live_display_before_anything_is_known() -> None:
    assert "0 of 4 peers are here" in drawn(Progress(4), 0.0)


@pytest.mark.parametrize("width", [20, 40, 200])
def test_the_live_display_fits_any_terminal(width: int) -> None:
    progress = fed([*opening(), *round_(1, 102.0)])
    assert max(map(len, drawn(progress, 102.0, width).splitlines())) <= width


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_960, "100 kB"), (999_600, "1.0 MB"), (3e13, "30000 GB")],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (3725, "1:02:05")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
