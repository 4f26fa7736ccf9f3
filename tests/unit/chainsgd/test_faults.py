from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pml.protocols.chainsgd.machine import Contribution, GroupEnd
from p2pml.protocols.chainsgd.messages import Plan, Result, Segment
from p2pml.protocols.training.errors import TrainingError
from p2pml.statemachine import Send, Stopping
from tests.unit.chainsgd.groups import SCHEDULERS, SMALL, Group
from tests.unit.chainsgd.models import bits

# What an aborted attempt still has in its queues is of no use to anybody, and may change.
LATE = {"memory": "late"}


def ready(count: int, seed: int, **more: Any) -> tuple[Group, dict[str, Any]]:
    """A group whose peers have all handed in their contributions."""
    group = Group(count, seed, shapes=SMALL, cluster=LATE, **more)
    group.formed()
    group.cluster.run()
    return group, group.contribute(group.models)


def assert_survivors_agree(group: Group, answers: dict[str, Any]) -> None:
    """The living got the mean of those who are said to have contributed, and can go on."""
    group.run(answers)
    group.cluster.run()
    closed = group.closed(0)
    assert closed["round"] == 1
    assert set(group.cluster.alive) & answers.keys() <= set(closed["contributors"])
    group.assert_averaged(answers, closed["contributors"])
    more = group.contribute(group.cluster.alive, 2)
    group.run(more)
    group.cluster.run()
    assert set(group.closed()["contributors"]) == set(group.cluster.alive)
    group.assert_averaged(more, group.cluster.alive)


def steps_of_a_round(count: int, seed: int, **more: Any) -> int:
    group, answers = ready(count, seed, **more)
    before = group.cluster.steps
    group.run(answers)
    group.cluster.run()
    return group.cluster.steps - before


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("victim", ["p1", "p2", "p3"])
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_peer_that_dies_at_any_step_of_a_round(scheduler: str, victim: str, stride: int) -> None:
    seed = int(victim[1:])
    for step in range(0, steps_of_a_round(4, seed, scheduler=scheduler) + 1, stride):
        group, answers = ready(4, seed, scheduler=scheduler)
        for _ in range(step):
            group.cluster.step()
        group.cluster.kill(victim)
        assert_survivors_agree(group, answers)


@settings(max_examples=100)
@given(
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    seed=st.integers(0, 2**32),
    deaths=st.lists(st.tuples(st.integers(0, 300), st.sampled_from(["p1", "p2", "p3", "p4"])), min_size=2, max_size=3),
)
def test_two_or_three_of_five_die_at_any_steps(scheduler: str, seed: int, deaths: list[tuple[int, str]]) -> None:
    group, answers = ready(5, seed, scheduler=scheduler)
    for step, victim in deaths:
        for _ in range(step):
            group.cluster.step()
        if victim in group.cluster.alive:
            group.cluster.kill(victim)
    assert_survivors_agree(group, answers)


@settings(max_examples=100)
@given(
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    seed=st.integers(0, 2**32),
    cuts=st.lists(
        st.tuples(st.integers(0, 200), st.sampled_from(["p1", "p2", "p3"]), st.sampled_from(["p2", "p3", "p4"])),
        min_size=1,
        max_size=3,
    ),
)
def test_links_that_are_cut_are_mended_and_nobody_is_lost(
    scheduler: str, seed: int, cuts: list[tuple[int, str, str]]
) -> None:
    group, answers = ready(5, seed, scheduler=scheduler)
    for step, one, other in cuts:
        for _ in range(step):
            group.cluster.step()
        if one != other:
            group.cluster.cut(one, other)
    assert_survivors_agree(group, answers)
    assert len(group.cluster.alive) == 5
    assert not any(group.cluster.finished(peer) for peer in group.models)


@pytest.mark.parametrize("victim", ["p0", "p1", "p2", "p3"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_contribution_that_is_not_finite_is_left_out_and_reported(scheduler: str, victim: str) -> None:
    for seed in range(5):
        group = Group(4, seed, shapes=SMALL, scheduler=scheduler, cluster=LATE)
        group.formed()
        group.train(group.models, 1)
        answers = group.contribute([peer for peer in group.models if peer != victim])
        group.models[victim]["weight"][7] = np.nan
        answers |= {victim: group.cluster.command(victim, "average", Contribution())}
        group.run(answers)
        group.assert_averaged(answers, [peer for peer in group.models if peer != victim])
        refused = answers[victim].result()
        assert not refused.counted
        assert refused.reason == "weight[7] is nan"
        report = next(r for r in group.cluster.reports["p0"] if r.name == "refused")
        assert report.fields == {"round": 1, "peer": victim, "reason": "weight[7] is nan"}


def test_when_all_contributions_are_refused_the_round_has_no_result_and_the_next_one_works() -> None:
    group = Group(3, 1, shapes=SMALL, cluster=LATE)
    group.formed()
    group.train(group.models, 1)
    for model in group.models.values():
        model["weight"][0] = np.inf
    before = {peer: bits(model) for peer, model in group.models.items()}
    answers = {peer: group.cluster.command(peer, "average", Contribution()) for peer in group.models}
    group.run(answers)
    for answer in answers.values():
        with pytest.raises(TrainingError, match=r"no contribution left .*weight\[0\] is inf"):
            answer.result()
    assert {peer: bits(model) for peer, model in group.models.items()} == before
    answers = group.contribute(group.models)
    group.run(answers)
    group.assert_averaged(answers, group.models)


def let_in(group: Group, joined: Any, peers: list[str]) -> None:
    """Go on with rounds of `peers` until the joiner is a member, for which it waits one more round at most."""
    group.cluster.run()
    if not joined.done:
        group.run(group.contribute(peers, 9))
        group.cluster.run()
    assert joined.done


def test_a_peer_that_joins_during_a_round_is_in_the_next_one_with_the_newest_model() -> None:
    for seed in range(20):
        group, answers = ready(3, seed)
        for _ in range(seed * 5):
            group.cluster.step()
        joined = group.join("p3")
        group.run(answers)
        group.assert_averaged(answers, ["p0", "p1", "p2"])
        let_in(group, joined, ["p0", "p1", "p2"])
        assert bits(group.models["p3"]) == bits(group.models["p0"])
        answers = group.contribute(group.models, 2)
        group.run(answers)
        group.assert_averaged(answers, group.models)
        assert sorted(group.machines["p3"].members) == ["p0", "p1", "p2", "p3"]


def test_joiners_are_spread_over_donors() -> None:
    group, answers = ready(4, 1)
    sources: dict[str, set[str]] = {}
    joined = [group.join(f"p{index}", 60 + index) for index in range(4, 8)]
    for peer in ("p4", "p5", "p6", "p7"):

        def watch(event: Any, now: float, peer: str = peer, handle: Any = group.machines[peer].handle) -> Any:
            if isinstance(getattr(event, "message", None), Result):
                sources.setdefault(peer, set()).add(event.peer)
            return handle(event, now)

        group.machines[peer].handle = watch  # type: ignore[method-assign]
    group.cluster.run(until=lambda: len(group.machines["p0"]._agent._meshed) == 4)  # type: ignore[union-attr]
    group.run(answers)
    group.cluster.run(until=lambda: all(answer.done for answer in joined))
    assert {frozenset(found) for found in sources.values()} == {frozenset([f"p{index}"]) for index in range(4)}


def test_a_peer_that_died_may_come_back_under_its_id() -> None:
    group, answers = ready(3, 5)
    group.cluster.kill("p2")
    joined = group.join("p2")
    del answers["p2"]
    group.run(answers)
    group.cluster.run(until=lambda: joined.done)
    answers = group.contribute(group.models, 3)
    group.run(answers)
    group.assert_averaged(answers, group.models)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), step=st.integers(0, 400), killed=st.sampled_from(["p1", "p3", "p4", ""]))
def test_deaths_while_others_join(seed: int, step: int, killed: str) -> None:
    group, answers = ready(3, seed)
    joined = {peer: group.join(peer) for peer in ("p3", "p4")}
    for _ in range(step):
        group.cluster.step()
    if killed:
        group.cluster.kill(killed)
    group.run(answers)
    group.cluster.run()
    group.assert_averaged(answers, group.closed(0)["contributors"])
    living = group.cluster.alive
    for peer in [peer for peer in joined if peer in living]:
        let_in(group, joined[peer], [other for other in living if other not in joined or joined[other].done])
    answers = group.contribute(living, 2)
    group.run(answers)
    group.cluster.run()
    assert set(group.closed()["contributors"]) == set(living)
    group.assert_averaged(answers, living)


def test_the_loss_of_the_agent_ends_all_with_a_clear_reason() -> None:
    group, answers = ready(3, 1)
    group.cluster.kill("p0")
    group.cluster.run()
    for peer in ("p1", "p2"):
        with pytest.raises(TrainingError, match="the group's agent p0 is gone: the peer died"):
            answers[peer].result()
        end = group.cluster.result(peer)
        assert isinstance(end, GroupEnd)
        assert end.reason.startswith("the group's agent p0 is gone")


def test_one_that_leaves_after_its_contribution_still_counts() -> None:
    group, answers = ready(4, 2)
    left = group.cluster.command("p2", "leave")
    group.run(answers)
    group.assert_averaged(answers, group.models)
    group.cluster.run(until=lambda: left.done)
    assert left.result() == GroupEnd(1, "it left the group")
    answers = group.contribute(["p0", "p1", "p3"], 2)
    group.run(answers)
    group.assert_averaged(answers, ["p0", "p1", "p3"])


def test_one_that_leaves_without_a_contribution_does_not_hold_up_the_others() -> None:
    group = Group(4, 2, shapes=SMALL, cluster=LATE)
    group.formed()
    answers = group.contribute(["p0", "p1", "p3"])
    group.cluster.feed("p2", Stopping())
    group.run(answers)
    group.assert_averaged(answers, ["p0", "p1", "p3"])
    group.cluster.run(until=lambda: group.cluster.finished("p2"))
    assert group.cluster.now < 1.0


def test_the_agent_that_stops_ends_the_group() -> None:
    group, answers = ready(3, 2)
    group.run(answers)
    group.cluster.feed("p0", Stopping())
    group.cluster.run(until=lambda: group.cluster.finished(*group.models))
    assert group.cluster.result("p1").reason == "the group's agent p0: it was stopped"


def test_a_straggler_is_left_out_and_gets_the_result_when_it_is_through() -> None:
    group = Group(4, 3, shapes=SMALL, cluster=LATE, round_timeout=0.5)
    group.formed()
    prompt = ["p0", "p1", "p3"]
    for round_ in (1, 2):
        answers = group.contribute(prompt, round_)
        group.run(answers)
        group.cluster.run()
        group.assert_averaged(answers, prompt)
    assert group.closed(0)["excluded"] == {"p2": "it was not ready within 0.5 s"}
    assert group.closed(1)["excluded"] == {"p2": "it is not through with the last round"}
    # By now round 3 runs without p2, which is to get the newest model when it is through.
    answers = group.contribute([*prompt, "p2"], 3)
    group.run(answers)
    assert not answers["p2"].result().counted
    group.assert_averaged(answers, prompt)
    for round_ in (4, 5):
        answers = group.contribute(group.models, round_)
        group.run(answers)
        group.cluster.run()
    group.assert_averaged(answers, group.models)


def lying(group: Group, peer: str, change: Any) -> None:
    """From now on, `peer` sends what `change` makes of its messages."""
    machine = group.machines[peer]
    handle = machine.handle

    def lie(event: Any, now: float) -> Any:
        effects = handle(event, now)
        for effect in effects:
            if isinstance(effect, Send):
                change(effect.message)
        return effects

    machine.handle = lie  # type: ignore[method-assign]


LIES: dict[str, Any] = {
    "index": lambda message: setattr(message, "index", message.index + 7),
    "negative index": lambda message: setattr(message, "index", -1),
    "weight": lambda message: setattr(message, "weight", -1.0),
    "weight of nan": lambda message: setattr(message, "weight", float("nan")),
    "dtype": lambda message: setattr(message, "data", np.zeros(16, np.int32)),
    "size": lambda message: setattr(message, "data", np.zeros(3, np.float32)),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("kind", [Segment, Result])
def test_a_peer_that_lies_is_expelled_and_the_others_finish(lie: str, kind: type) -> None:
    for seed in range(3):
        group, answers = ready(4, seed, scheduler="tree")
        # p1 sends segments only, p2 sends both.
        lying(group, "p2", lambda message: LIES[lie](message) if isinstance(message, kind) else None)
        group.cluster.run()
        if kind is Result and not group.cluster.finished("p2"):
            continue  # it had nobody to forward to
        assert group.cluster.result("p2").expelled
        del answers["p2"]
        group.run(answers)
        group.cluster.run()
        group.assert_averaged({peer: answers[peer] for peer in ("p0", "p1", "p3")}, group.closed(0)["contributors"])


def test_segments_of_attempts_that_never_were_are_ignored() -> None:
    group, answers = ready(3, 1)

    def future(message: Any) -> None:
        if isinstance(message, Segment):
            message.round += 5

    lying(group, "p1", future)
    group.cluster.run()
    assert not group.cluster.finished("p0")
    assert not any(answer.done for answer in answers.values())
    group.cluster.kill("p1")
    group.run(answers)
    group.assert_averaged(answers, ["p0", "p2"])


def test_plans_of_others_than_the_agent_are_ignored() -> None:
    group, answers = ready(3, 1)

    class Once:
        done = False

    def usurp(event: Any, now: float, handle: Any = group.machines["p1"].handle) -> Any:
        effects = handle(event, now)
        if not Once.done:
            Once.done = True
            effects.append(Send("p2", Plan(99, 1, ["p1"], ["p1"], {}, [], []), "control"))
        return effects

    group.machines["p1"].handle = usurp  # type: ignore[method-assign]
    group.run(answers)
    group.assert_averaged(answers, group.models)


def test_two_hundred_aborted_rounds_leave_memory_as_it_was() -> None:
    group = Group(3, 1, shapes=SMALL, cluster=LATE)
    group.formed()
    agent = group.machines["p0"]
    reduction = agent.reduction
    assert reduction is not None
    accumulator = reduction.accumulator
    group.cluster.run()
    for round_ in range(200):
        answers = group.contribute(group.cluster.alive, round_)
        for _ in range(round_ % 60):
            group.cluster.step()
        group.cluster.kill(group.cluster.alive[-1])
        group.run(answers)
        living = group.cluster.alive
        let_in(group, group.join(f"p{3 + round_}"), living)
    aborted = [report for report in group.cluster.reports["p0"] if report.name == "aborted"]
    assert len(aborted) > 100
    assert reduction.accumulator is accumulator
    assert sum(buffer.nbytes for buffer in accumulator.buffers.values()) == reduction.segments.nbytes
    assert not reduction._claims
    assert not reduction._waiting
    assert len(agent.members) == 3
    assert len(agent._agent._addresses) <= 3  # type: ignore[union-attr]
