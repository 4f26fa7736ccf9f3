"""What tests may rely on of `tests.driver`: time, computations, peers that come and go, commands and failures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pml import statemachine as sm
from p2pml.errors import LinkClosed, MachineFailed
from p2pml.statemachine import Effect, Received, Send, StateMachine, on
from p2pml.wire.options import ChannelOptions
from tests.driver import Cluster, Stuck
from tests.unit.sketches.puppet import SEEDS, Note, Puppet, notes, pair

# ---------------------------------------------------------------------------------------------- time, computations


def test_timers_fire_in_order_and_can_be_replaced_and_cancelled() -> None:
    cluster, a, _ = pair(7)
    set_timers = [
        sm.SetTimer("late", 3.0),
        sm.SetTimer("early", 1.0),
        sm.SetTimer("moved", 0.5),
        sm.SetTimer("off", 2.0),
    ]
    cluster.command("a", "do", [*set_timers, sm.SetTimer("moved", 4.0), sm.CancelTimer("off"), sm.CancelTimer("none")])
    cluster.run()
    assert [event.name for event in a.all(sm.TimerFired)] == ["early", "late", "moved"]
    assert 4.0 < cluster.now < 4.5


def test_a_timer_that_was_due_but_is_cancelled_does_not_fire() -> None:
    cluster, a, _ = pair(8)
    cluster.command("a", "do", [sm.SetTimer("x", 0.0)])
    cluster.command("a", "do", [sm.CancelTimer("x")])
    cluster.command("a", "do", [sm.SetTimer("y", 0.0)])
    cluster.run()
    fired = [event.name for event in a.all(sm.TimerFired)]
    assert fired in (["y"], ["x", "y"])


def test_a_lane_keeps_its_order_and_lanes_run_side_by_side() -> None:
    orders = set()
    for seed in range(20):
        cluster, a, _ = pair(seed)
        jobs = [sm.Compute((lane, i), int, ("7",), lane=lane) for i in range(3) for lane in ("x", "y")]
        cluster.command("a", "do", jobs)
        cluster.run()
        tags = [event.tag for event in a.all(sm.Computed)]
        for lane in ("x", "y"):
            assert [tag for tag in tags if tag[0] == lane] == [(lane, 0), (lane, 1), (lane, 2)]
        assert {event.result for event in a.all(sm.Computed)} == {7}
        orders.add(tuple(tags))
    assert len(orders) > 3


def test_a_computation_takes_its_time_and_may_fail() -> None:
    cluster, a, _ = pair(9, pace={"a": 0.5})
    cluster.command("a", "do", [sm.Compute("slow", len, ("abc",), cost=4.0), sm.Compute("bad", int, ("x",), cost=2.0)])
    cluster.run()
    assert a.all(sm.Computed)[0].seconds == pytest.approx(2.0, abs=0.01)
    assert cluster.now == pytest.approx(3.0, abs=0.05)
    assert isinstance(a.all(sm.ComputeFailed)[0].error, ValueError)


# ------------------------------------------------------------------------------------------------- coming and going


@given(seed=SEEDS, after=st.integers(0, 40))
def test_what_a_dead_peer_sent_arrives_up_to_some_point_and_then_it_has_left(seed: int, after: int) -> None:
    cluster, _, b = pair(seed)
    cluster.command("a", "do", notes(4, "one") + notes(9, "two"))
    start = cluster.steps
    cluster.run(until=lambda: cluster.steps >= start + after or (cluster.steps > start and not cluster._may))
    cluster.kill("a")
    cluster.run()
    for channel in ("one", "two"):
        assert b.numbers(channel) == list(range(len(b.numbers(channel))))
    assert b.events[-1] == sm.PeerLeft("a", "the peer died")
    assert cluster.alive == ["b"]


def test_of_what_was_under_way_when_a_peer_died_a_part_arrives() -> None:
    arrived = set()
    for seed in range(40):
        cluster, _, b = pair(seed)
        cluster.command("a", "do", notes(9, "two"))
        cluster.run(until=lambda cluster=cluster, b=b: "wait, credit" in cluster.story())  # type: ignore[misc]
        cluster.run(until=lambda cluster=cluster: "wait, credit" not in cluster.story())  # type: ignore[misc]
        before = len(b.numbers("two"))
        cluster.kill("a")
        cluster.run()
        arrived.add((len(b.numbers("two")) > before, len(b.numbers("two")) < 9))
    assert {(True, True), (False, True)} <= arrived


@given(seed=SEEDS, after=st.integers(0, 40))
def test_nothing_of_a_dead_peer_arrives_once_it_is_there_again(seed: int, after: int) -> None:
    cluster, _, b = pair(seed)
    cluster.command("a", "do", notes(4, "one") + notes(9, "two"))
    start = cluster.steps
    cluster.run(until=lambda: cluster.steps >= start + after)
    cluster.kill("a")
    cluster.join("a", Puppet())
    cluster.run(until=lambda: "b" in cluster._peers["a"].members)
    cluster.command("a", "do", Send("b", Note(100), "one"))
    cluster.run()
    left = b.events.index(sm.PeerLeft("a", "the peer died"))
    later = [event.message.number if isinstance(event, Received) else type(event) for event in b.events[left + 1 :]]
    assert later == [sm.PeerJoined, 100]


@given(seed=SEEDS, after=st.integers(0, 40))
def test_over_a_cut_link_every_tagged_send_ends_once_and_the_link_can_come_again(seed: int, after: int) -> None:
    cluster, a, b = pair(seed)
    cluster.command("a", "do", notes(4, "one") + notes(9, "two"))
    start = cluster.steps
    cluster.run(until=lambda: cluster.steps >= start + after)
    cluster.cut("a", "b")
    cluster.command("a", "do", sm.Connect("b", []))
    cluster.run()
    ended = [event.tag for event in a.events if isinstance(event, (sm.Delivered, sm.SendFailed))]
    assert len(ended) == len(set(ended)) == 13
    for machine in (a, b):
        seen = [type(event) for event in machine.events if isinstance(event, (sm.PeerJoined, sm.PeerLeft))]
        assert seen == [sm.PeerJoined, sm.PeerLeft, sm.PeerJoined]
    cluster.command("b", "do", Send("a", Note(5), "one"))
    cluster.run()
    assert a.numbers("one") == [5]


@given(seed=SEEDS)
def test_the_last_words_of_a_machine_that_finishes_arrive(seed: int) -> None:
    cluster, a, b = pair(seed)
    cluster.command("a", "do", [*notes(4, "one"), sm.Finish("done")])
    cluster.run()
    assert cluster.result("a") == "done"
    assert b.numbers("one") == [0, 1, 2, 3]
    assert b.events[-1:] == [sm.PeerLeft("a", "its machine has finished")]
    with pytest.raises(LookupError, match="b has not finished"):
        cluster.result("b")
    cluster.command("b", "do", Send("a", Note(1), "one", tag="late"))
    cluster.run()
    assert b.events[-1:] == [sm.SendFailed("a", "late", "the peer is not here")]
    assert not a.all(Received)


def test_last_words_without_credit_are_given_up_after_a_while() -> None:
    cluster, _, b = pair(10)
    cluster.command("a", "do", [*notes(1, "manual"), sm.Finish()])
    cluster.run()
    assert b.events[-1] == sm.PeerLeft("a", "its machine has finished")
    assert 1.0 <= cluster.now < 1.1


def test_peers_join_late_leave_and_join_again_under_the_same_id() -> None:
    cluster, a, _ = pair(11)
    c, again = Puppet(), Puppet()
    c.info = {"role": "late"}
    cluster.join("c", c)
    with pytest.raises(ValueError, match="c runs already"):
        cluster.join("c", Puppet())
    cluster.run(until=lambda: sm.PeerJoined("c", {"role": "late"}) in a.events)
    cluster.kill("c")
    cluster.join("c", again, links=["a"])
    cluster.command("c", "do", sm.Connect("nobody", []))
    cluster.run()
    assert [type(event) for event in a.events[-2:]] == [sm.PeerLeft, sm.PeerJoined]
    assert again.events == [sm.Started(), sm.PeerJoined("a"), sm.PeerLeft("nobody", "cannot be reached")]


def test_a_link_can_be_closed_with_a_reason() -> None:
    cluster, a, b = pair(12)
    cluster.command("a", "do", [*notes(2, "two"), sm.Disconnect("b", "enough")])
    cluster.run()
    assert b.numbers("two") == [0, 1]
    assert b.events[-1] == sm.PeerLeft("a", "enough")
    assert a.all(sm.PeerLeft) == [sm.PeerLeft("b", "enough")]


def test_machines_of_other_names_are_not_seen() -> None:
    class Stranger(Puppet):
        name = "stranger"

    a, b = Puppet(), Stranger()
    Cluster({"a": a, "b": b}, 13).run()
    assert a.events == b.events == [sm.Started()]


# --------------------------------------------------------------------------------- commands, reports, and failures


def test_commands_are_answered_in_order() -> None:
    cluster, _, _ = pair(14)
    answers = [cluster.command("a", "do", []) for _ in range(3)]
    cluster.command("b", "do", sm.Report("progress", {"round": 1}))
    cluster.feed("a", sm.Command("do", [sm.Reply("do", 1), sm.Reply("do", ValueError("no")), sm.Reply("other")]))
    cluster.run()
    assert answers[0].result() == 1
    with pytest.raises(ValueError, match="no"):
        answers[1].result()
    with pytest.raises(LookupError, match="no Reply yet"):
        answers[2].result()
    cluster.command("a", "do", sm.Finish())
    cluster.run()
    for answer in (answers[2], cluster.command("a", "do")):
        with pytest.raises(LinkClosed, match="finished"):
            answer.result()
    assert cluster.reports == {"a": [], "b": [sm.Report("progress", {"round": 1})]}


def test_a_handler_that_raises_ends_the_run_with_the_story_or_is_told_to_the_others() -> None:
    cluster, _, _ = pair(15)
    cluster.command("a", "fail", KeyError("gone"))
    with pytest.raises(MachineFailed, match=r"puppet on a failed in its handler of Command\(name='fail'") as failed:
        cluster.run()
    assert failed.value.peer == "a"
    assert any("a failed" in note for note in failed.value.__notes__)
    cluster, _, b = pair(15, tolerant=True)
    cluster.command("a", "fail", KeyError("gone"))
    cluster.run()
    assert [event.peer for event in b.all(sm.PeerLeft)] == ["a"]


@pytest.mark.parametrize("wrong", [b"1234567", bytearray(7)])
def test_a_place_that_does_not_fit_fails_the_machine(wrong: Any) -> None:
    class Misplaced(Puppet):
        name = "puppet"
        channels = {"one": ChannelOptions(eager=0)}

        def into(self, peer: str, head: Any) -> Any:
            return [wrong]

    cluster = Cluster({"a": Puppet(), "b": Misplaced()}, 16)
    cluster.command("a", "do", Send("b", Note(1, np.zeros(7 if wrong == b"1234567" else 8, np.uint8)), "one"))
    with pytest.raises(MachineFailed, match=r"its place for Note.*not writable memory"):
        cluster.run(until=lambda: False)


def test_what_is_no_effect_fails_the_machine() -> None:
    cluster, _, _ = pair(17)
    cluster.command("a", "do", "nonsense")
    with pytest.raises(MachineFailed, match="'nonsense' is no effect"):
        cluster.run()


def test_a_run_that_goes_on_for_ever_ends_with_what_happened_last() -> None:
    class Restless(StateMachine):
        @on(sm.Started, sm.TimerFired)
        def again(self, event: sm.Event) -> Iterable[Effect]:
            yield sm.SetTimer("again", 1.0)

    with pytest.raises(Stuck, match=r"not done after 50 steps(.|\n)*TimerFired(.|\n)*-> SetTimer"):
        Cluster({"a": Restless()}, 18).run(max_steps=50)
