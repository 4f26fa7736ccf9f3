from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2pml.protocols.chainsgd.machine import ChainGroup, Contribution
from p2pml.protocols.chainsgd.messages import Plan, Result, Segment
from p2pml.protocols.training.errors import ModelMismatch, TrainingError
from p2pml.statemachine import Compute, Report, Send
from tests.driver import Cluster
from tests.unit.chainsgd.groups import SCHEDULERS, SMALL, Group
from tests.unit.chainsgd.models import bits, make_model


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=12)
@given(count=st.integers(2, 9), seed=st.integers(0, 2**32), segment_bytes=st.sampled_from([16, 64, 4096]))
def test_every_order_gives_the_weighted_mean_bit_for_bit_on_all(
    scheduler: str, count: int, seed: int, segment_bytes: int
) -> None:
    group = Group(count, seed, scheduler=scheduler, segment_bytes=segment_bytes)
    group.formed()
    assert len({tuple(bits(model).items()) for model in group.models.values()}) == 1
    for round_ in (1, 2):
        answers = group.contribute(group.models, round_)
        group.run(answers)
        group.assert_averaged(answers, group.models)
        assert {answer.result().round for answer in answers.values()} == {round_}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=3)
@given(count=st.integers(10, 33), seed=st.integers(0, 2**32))
@example(count=26, seed=7300)  # a result overtakes both its plan and the news of a link
def test_large_groups(scheduler: str, count: int, seed: int) -> None:
    group = Group(count, seed, scheduler=scheduler, shapes=SMALL, segment_bytes=128)
    group.formed()
    answers = group.contribute(group.models, weight=lambda number: 1.0)
    group.run(answers)
    group.assert_averaged(answers, group.models)
    assert answers["p0"].result().weight == count


def test_the_group_starts_with_the_agents_model() -> None:
    group = Group(5, 3)
    initial = bits(group.models["p0"])
    group.formed()
    assert all(bits(model) == initial for model in group.models.values())


def test_a_group_of_one_gets_its_own_model_at_once() -> None:
    group = Group(1)
    group.formed()
    answers = group.contribute(["p0"])
    before = bits(group.models["p0"])
    steps = group.cluster.steps
    group.run(answers)
    assert group.cluster.steps - steps <= 2
    assert bits(group.models["p0"]) == before
    group.assert_averaged(answers, ["p0"])


def test_a_large_result_is_written_by_a_worker() -> None:
    shapes = {"weight": ("float32", (300_000,))}
    group = Group(2, shapes=shapes, segment_bytes=1 << 18)
    group.formed()
    answers = group.contribute(group.models)
    group.run(answers)
    group.assert_averaged(answers, group.models)
    assert any("has computed" in line for line in group.cluster.trace)


def test_a_lent_result_is_in_the_accumulator_and_stays_until_the_next_round() -> None:
    group = Group(3)
    group.formed()
    for round_ in (1, 2, 3):
        group.train(group.models, round_)
        before = {peer: bits(model) for peer, model in group.models.items()}
        commands = {peer: group.cluster.command(peer, "average", Contribution(in_place=False)) for peer in group.models}
        group.run(commands)
        group.cluster.run()
        views = [answer.result().tensors for answer in commands.values()]
        assert len({tuple(bits(view).items()) for view in views}) == 1
        assert {peer: bits(model) for peer, model in group.models.items()} == before
        reduction = group.machines["p0"].reduction
        assert reduction is not None
        assert any(
            np.shares_memory(views[0]["precise"].numpy(), buffer) for buffer in reduction.accumulator.buffers.values()
        )


def test_accumulators_are_made_once() -> None:
    group = Group(4)
    group.formed()
    before = [[view.ctypes.data for view in machine.reduction.accumulator.views] for machine in group.machines.values()]  # type: ignore[union-attr]
    for round_ in range(3):
        group.run(group.contribute(group.models, round_))
    assert before == [
        [view.ctypes.data for view in machine.reduction.accumulator.views]  # type: ignore[union-attr]
        for machine in group.machines.values()
    ]


def test_first_arrivals_are_placed_and_later_ones_are_not() -> None:
    """In a tree of four, the root gets two segments for each place and one other peer gets one."""
    placed: list[str] = []

    class Watched(ChainGroup):
        name = "chainsgd"

        def _place_segment(self, peer: str, head: Any) -> Any:
            memory = super()._place_segment(peer, head)
            if head.type is Segment:
                placed.append("place" if memory is not None else "fresh")
            return memory

    shapes = {"weight": ("float32", (98_304,))}
    group = Group(4, 1, machine=Watched, shapes=shapes, segment_bytes=1 << 17)
    group.formed()
    answers = group.contribute(group.models)
    group.run(answers)
    group.assert_averaged(answers, group.models)
    segments = 3
    assert placed.count("place") == 2 * segments
    assert placed.count("fresh") == segments


def test_a_leaf_sends_its_own_memory() -> None:
    group = Group(2, shapes={"weight": ("float32", (1000,))}, segment_bytes=1 << 10)
    group.formed()
    sent: list[Send] = []
    machine = group.machines["p1"]
    handle = machine.handle

    def watch(event: Any, now: float) -> Any:
        effects = handle(event, now)
        sent.extend(effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Segment))
        return effects

    machine.handle = watch  # type: ignore[method-assign]
    group.run(group.contribute(group.models, weight=lambda number: 1.0))
    assert len(sent) == 4
    for effect in sent:
        assert np.shares_memory(np.frombuffer(effect.message.data.data, np.uint8), group.models["p1"]["weight"])


@pytest.mark.parametrize("what", ["shape", "dtype", "name", "missing"])
def test_a_model_of_another_kind_is_rejected_with_its_parameter_and_both_sides(what: str) -> None:
    group = Group(2, shapes=SMALL)
    group.formed()
    other = {"shape": ("float32", (41,)), "dtype": ("float64", (40,))}
    shapes: dict[str, Any] = {**SMALL, "weight": other.get(what, SMALL["weight"])}
    if what == "name":
        shapes = {"other": SMALL["weight"], **{name: shapes[name] for name in list(shapes)[1:]}}
    if what == "missing":
        del shapes["half"]
    machine = ChainGroup(make_model(3, shapes), agent="p0")
    group.cluster.join("p2", machine)
    group.cluster.run(until=lambda: group.cluster.finished("p2"))
    end = group.cluster.result("p2")
    assert end.expelled
    expected = {
        "shape": "weight: float32[40] in the group of p0, but weight: float32[41] in peer p2",
        "dtype": "weight: float32[40] in the group of p0, but weight: float64[40] in peer p2",
        "name": "weight: float32[40] in the group of p0, but other: float32[40] in peer p2",
        "missing": "half: bfloat16[24] in the group of p0, but no further tensor in peer p2",
    }
    assert end.reason == expected[what]
    answers = group.contribute(["p0", "p1"])
    group.run(answers)
    group.assert_averaged(answers, ["p0", "p1"])


def test_contributions_that_cannot_be_used_are_answered_with_the_reason() -> None:
    group = Group(2, shapes=SMALL)
    group.formed()
    other = {**make_model(1, SMALL), "weight": np.zeros(39, np.float32)}
    frozen = make_model(1, SMALL)
    frozen["weight"].flags.writeable = False
    bad = {
        r"weight: float32\[40\] in the group, but weight: float32\[39\]": Contribution(other),
        "weight: its memory is read-only": Contribution(frozen),
        "the weight of a contribution": Contribution(weight=float("nan")),
        "the weight of a contribution is": Contribution(weight=-1.0),
    }
    answers = [(message, group.cluster.command("p1", "average", given)) for message, given in bad.items()]
    group.cluster.run(until=lambda: all(answer.done for _, answer in answers))
    for message, answer in answers:
        with pytest.raises((ModelMismatch, TrainingError), match=message):
            answer.result()
    good = group.contribute(group.models)
    group.run(good)
    group.assert_averaged(good, group.models)


def test_all_weights_zero_is_an_error_for_all_and_the_next_round_works() -> None:
    group = Group(3)
    group.formed()
    answers = group.contribute(group.models, weight=lambda number: 0.0)
    before = {peer: bits(model) for peer, model in group.models.items()}
    group.run(answers)
    for answer in answers.values():
        with pytest.raises(TrainingError, match="all weights are zero"):
            answer.result()
    assert {peer: bits(model) for peer, model in group.models.items()} == before
    answers = group.contribute(group.models)
    group.run(answers)
    group.assert_averaged(answers, group.models)


def test_non_contiguous_tensors_are_averaged() -> None:
    models = {
        peer: {"weight": np.arange(24.0).reshape(4, 6)[:, ::2] * (index + 1)} for index, peer in enumerate(["p0", "p1"])
    }
    machines = {peer: ChainGroup(model, agent=None if peer == "p0" else "p0") for peer, model in models.items()}
    cluster = Cluster(machines, 1)
    joined = [cluster.command(peer, "joined") for peer in models]
    cluster.run(until=lambda: all(answer.done for answer in joined))
    for index, model in enumerate(models.values()):
        model["weight"][...] = np.arange(24.0).reshape(4, 6)[:, ::2] * (index + 1)
    answers = [cluster.command(peer, "average", Contribution()) for peer in models]
    cluster.run(until=lambda: all(answer.done for answer in answers))
    for model in models.values():
        assert np.array_equal(model["weight"], np.arange(24.0).reshape(4, 6)[:, ::2] * 1.5)


def test_pairs_and_rounds_are_reported() -> None:
    group = Group(4)
    group.formed()
    group.run(group.contribute(group.models))
    group.cluster.run()
    reports = group.cluster.reports["p0"]
    pairs = [
        report.fields for report in reports if report == Report("pair", report.fields) and report.fields["round"] == 1
    ]
    assert [(pair["sender"][0], pair["receiver"]) for pair in pairs][-1][1] == "p0"
    assert len(pairs) == 3
    assert group.closed()["contributors"][0] == "p0"
    assert {report.fields["peer"] for report in reports if report.name == "joined"} == {"p1", "p2", "p3"}


def test_messages_of_a_round_are_as_few_as_they_can_be() -> None:
    """N - 1 models up, N - 1 down."""
    group = Group(6, shapes={"weight": ("float32", (256,))}, segment_bytes=256)
    group.formed()
    group.cluster.run()
    kinds: list[type] = []
    for machine in group.machines.values():

        def watch(event: Any, now: float, handle: Any = machine.handle) -> Any:
            effects = handle(event, now)
            kinds.extend(type(effect.message) for effect in effects if isinstance(effect, Send))
            assert not any(isinstance(effect, Compute) for effect in effects)
            return effects

        machine.handle = watch  # type: ignore[method-assign]
    group.run(group.contribute(group.models))
    assert kinds.count(Segment) == kinds.count(Result) == 5 * 4
    group.cluster.run()
    assert kinds.count(Plan) == 5  # of the next round
