from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pml.protocols.training.merge import Accumulator, Unusable, check_weight
from p2pml.protocols.training.segments import BoundTensors
from tests.unit.chainsgd.models import assert_is_mean, bits, copy, make_model

WEIGHTS = st.one_of(st.just(1.0), st.integers(1, 500).map(float), st.floats(0.01, 100.0))


def average(models: list[dict[str, Any]], weights: list[float], order: list[int], *, adopt: bool = False) -> Any:
    """Merge along a chain in the given order, as peers would, and write the result into the last peer's tensors."""
    bounds = [BoundTensors.of(model, 64) for model in models]
    segments = bounds[0].segments
    peers = [Accumulator(segments) for _ in models]
    for index, (here, there) in itertools.product(range(len(segments)), itertools.pairwise([None, *order])):
        if here is not None:
            data = np.frombuffer(peers[here].tensors[index].data, segments.segments[index].group.stored)
            if adopt:
                peers[there].views[index][...] = data
                peers[there].adopt(index, peers[here].weights[index])
            else:
                peers[there].add(index, data, peers[here].weights[index])
        peers[there].add_own(index, bounds[there], weights[there])
    root = order[-1]
    for index in range(len(segments)):
        assert peers[root].weights[index] == pytest.approx(sum(weights))
        peers[root].finish(index)
        bounds[root].scatter(index, peers[root].views[index])
    bounds[root].flush()
    return models[root]


@given(data=st.data(), count=st.integers(1, 6), adopt=st.booleans())
def test_any_order_of_merging_gives_the_weighted_mean(data: st.DataObject, count: int, adopt: bool) -> None:
    models = [make_model(seed) for seed in range(count)]
    weights = data.draw(st.lists(WEIGHTS, min_size=count, max_size=count))
    order = data.draw(st.permutations(range(count)))
    originals = [copy(model) for model in models]
    assert_is_mean(average(models, weights, order, adopt=adopt), originals, weights)


def test_own_first_or_received_first_is_the_same() -> None:
    models = [make_model(seed) for seed in range(2)]
    bounds = [BoundTensors.of(model, 64) for model in models]
    one, two = Accumulator(bounds[0].segments), Accumulator(bounds[0].segments)
    for index, segment in enumerate(bounds[0].segments.segments):
        sender = Accumulator(bounds[0].segments)
        sender.add_own(index, bounds[1], 3.0)
        data = sender.views[index]
        one.add_own(index, bounds[0], 3.0)
        one.add(index, data, 3.0)
        two.add(index, data, 3.0)
        two.add_own(index, bounds[0], 3.0)
        assert np.array_equal(one.views[index], two.views[index]), segment


@given(seed=st.integers(0, 1000), weights=st.lists(WEIGHTS, min_size=2, max_size=5))
def test_bfloat16_and_float16_of_equal_peers_stay_bit_for_bit(seed: int, weights: list[float]) -> None:
    shapes = {"brain": ("bfloat16", (40,)), "half": ("float16", (40,))}
    models = [make_model(seed, shapes) for _ in weights]
    expected = bits(models[0])
    assert bits(average(models, weights, list(range(len(weights))))) == expected


@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=2, max_size=2))
def test_bfloat16_is_rounded_as_torch_rounds(values: list[float]) -> None:
    tensors = [torch.tensor([value]).to(torch.bfloat16) for value in values]
    models = [{"w": tensor.clone()} for tensor in tensors]
    expected = (tensors[0].float() * 0.5 + tensors[1].float() * 0.5).to(torch.bfloat16)
    assert torch.equal(average(models, [1.0, 1.0], [0, 1])["w"], expected)


def test_float16_of_large_values_does_not_overflow() -> None:
    models = [{"w": np.full(5, 60000, np.float16)} for _ in range(9)]
    assert average(models, [1.0] * 9, list(range(9)))["w"].tolist() == [60000.0] * 5


def test_integers_are_rounded_to_even() -> None:
    models = [{"n": np.array([1, 2, -1, 7, 2**40 + 1])}, {"n": np.array([2, 3, -2, 7, 2**40 + 1])}]
    assert average(models, [1.0, 1.0], [0, 1])["n"].tolist() == [2, 2, -2, 7, 2**40 + 1]


def test_booleans_follow_the_weighted_majority() -> None:
    models = [{"b": np.array([True, True, False, False])}, {"b": np.array([True, False, True, False])}]
    assert average(copies(models), [1.0, 1.0], [0, 1])["b"].tolist() == [True, True, True, False]
    assert average(copies(models), [1.0, 2.0], [0, 1])["b"].tolist() == [True, False, True, False]


def copies(models: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [copy(model) for model in models]


def test_a_weight_of_zero_counts_for_nothing() -> None:
    models = [
        {"w": np.ones(3, np.float32), "h": np.ones(3, np.float16)},
        {"w": np.zeros(3, np.float32), "h": np.zeros(3, np.float16)},
    ]
    for order in ([0, 1], [1, 0]):
        result = average(copies(models), [0.0, 2.0], order)
        assert result["w"].tolist() == result["h"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_all_weights_zero_is_refused(dtype: str) -> None:
    models = [{"w": np.ones(3, dtype)} for _ in range(2)]
    with pytest.raises(Unusable, match="all weights are zero"):
        average(models, [0.0, 0.0], [0, 1])


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e17])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of a contribution"):
        check_weight(weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("weight", [1.0, 2.5])
def test_what_is_not_finite_is_named_with_its_place(value: float, dtype: torch.dtype, weight: float) -> None:
    fine, bad = torch.ones(3, 5, dtype=dtype), torch.ones(3, 5, dtype=dtype)
    bad[2, 1] = value
    bound, other = BoundTensors.of({"a": fine, "b": bad}), BoundTensors.of({"a": fine, "b": fine})
    for first in (False, True):
        accumulator = Accumulator(bound.segments)
        if not first:
            accumulator.add_own(0, other, weight)
        with pytest.raises(Unusable, match=r"^b\[11\] is [-+]?(nan|inf)") as caught:
            accumulator.add_own(0, bound, weight)
        assert not caught.value.received
    for first in (False, True):
        accumulator = Accumulator(bound.segments)
        if not first:
            accumulator.add_own(0, other, weight)
        received = np.ones(len(accumulator.views[0]), accumulator.views[0].dtype)
        if dtype == torch.bfloat16:
            received[3] = 0x7F80
        else:
            received[3] = value
        with pytest.raises(Unusable, match=r"^a\[[13]\]") as caught:
            accumulator.add(0, received, weight)
        assert caught.value.received


def test_what_is_not_finite_is_found_in_memory_that_is_sent_as_it_is() -> None:
    bound = BoundTensors.of({"w": np.array([1.0, np.nan], np.float32)})
    with pytest.raises(Unusable, match=r"w\[1\] is nan"):
        Accumulator(bound.segments).own(0, bound, 1.0)


def test_a_sum_that_overflows_is_nobodys_fault() -> None:
    bound = BoundTensors.of({"w": np.array([1.0, 3e38], np.float32)})
    accumulator = Accumulator(bound.segments)
    accumulator.add_own(0, bound, 1.0)
    with pytest.raises(Unusable, match=r"the sum at w\[1\] is inf") as caught:
        accumulator.add(0, np.array([1.0, 3e38], np.float32), 1.0)
    assert not caught.value.received


def test_integers_beyond_exactness_are_refused() -> None:
    for value, weight in ((2**53 + 2, 1.0), (2**52, 4.0), (-(2**63), 1.0)):
        bound = BoundTensors.of({"steps": np.array([5, value])})
        with pytest.raises(Unusable, match=r"steps\[1\] is .*2\*\*53"):
            Accumulator(bound.segments).add_own(0, bound, weight)


def test_views_of_the_result_are_in_the_accumulators_memory() -> None:
    models = [make_model(seed) for seed in range(2)]
    bound = BoundTensors.of(models[0], 64)
    accumulator = Accumulator(bound.segments)
    for index in range(len(bound.segments)):
        accumulator.add_own(index, bound, 1.0)
        accumulator.finish(index)
    result = accumulator.result()
    assert bits(result) == bits(models[0])
    assert np.shares_memory(
        result["precise"].numpy(), next(b for g, b in accumulator.buffers.items() if g.wire == "float64")
    )


def test_memory_stays_the_same_over_rounds() -> None:
    model = make_model(3)
    bound = BoundTensors.of(model, 64)
    accumulator = Accumulator(bound.segments)
    before = [view.__array_interface__["data"][0] for view in accumulator.views]
    for _ in range(3):
        accumulator.reset()
        for index in range(len(bound.segments)):
            accumulator.add_own(index, bound, 2.0)
    assert [view.__array_interface__["data"][0] for view in accumulator.views] == before
    assert sum(buffer.nbytes for buffer in accumulator.buffers.values()) == bound.segments.nbytes
