from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pml.protocols.training._torch import torch
from p2pml.protocols.training.data import Data, deal_evenly, dirichlet_partition, stratified_split
from p2pml.protocols.training.errors import TaskError


def test_a_subset_by_indices_and_by_mask() -> None:
    data = Data.of(np.arange(6.0).reshape(3, 2), np.arange(3))
    assert data.subset([2, 0]).targets.tolist() == [2, 0]
    assert data.subset(np.array([False, True, False])).inputs.tolist() == [[2.0, 3.0]]
    assert len(data) == 3


def test_data_of_arrays_is_a_copy() -> None:
    array = np.zeros((2, 1))
    data = Data.of(array, np.zeros(2))
    array[:] = 5
    assert data.inputs.sum() == 0


@given(st.integers(1, 40), st.integers(1, 40))
def test_dealing_gives_everything_to_somebody_in_order(items: int, parts: int) -> None:
    if parts > items:
        with pytest.raises(TaskError, match=f"to {items} peers at most, not to {parts}"):
            deal_evenly(range(items), 0, parts)
        return
    shares = [deal_evenly(range(items), part, parts) for part in range(parts)]
    assert np.concatenate(shares).tolist() == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("part", [-1, 4])
def test_a_part_that_is_not_there(part: int) -> None:
    with pytest.raises(TaskError, match=f"no part {part} of 4"):
        deal_evenly(range(8), part, 4)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.data())
def test_a_stratified_split_gives_each_class_its_share(labels: list[int], draw: st.DataObject) -> None:
    count = draw.draw(st.integers(1, len(labels)))
    train, test = stratified_split(labels, count, np.random.default_rng(0))
    assert sorted([*train, *test]) == list(range(len(labels)))
    assert len(test) == count
    for label in set(labels):
        got = sum(labels[index] == label for index in test)
        assert abs(got - labels.count(label) * count / len(labels)) < 1 + 1e-9


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.integers(1, 9),
    st.sampled_from([0.001, 0.1, 1.0, 100.0]),
    st.integers(0, 4),
    st.integers(0, 2**32),
)
def test_a_dirichlet_partition_loses_nothing_and_leaves_nobody_without(
    labels: list[int], parts: int, alpha: float, least: int, seed: int
) -> None:
    if least * parts > len(labels):
        with pytest.raises(TaskError, match=f"at least {least} each"):
            dirichlet_partition(labels, parts, alpha, np.random.default_rng(seed), least)
        return
    shares = dirichlet_partition(labels, parts, alpha, np.random.default_rng(seed), least)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(labels)))
    assert len(shares) == parts
    assert min(map(len, shares)) >= least
    again = dirichlet_partition(labels, parts, alpha, np.random.default_rng(seed), least)
    assert all(map(np.array_equal, shares, again))


def test_alpha_says_how_much_peers_differ() -> None:
    labels = np.repeat(np.arange(10), 100)

    def largest_class_share(alpha: float) -> float:
        shares = dirichlet_partition(labels, 5, alpha, np.random.default_rng(3))
        return float(np.mean([np.bincount(labels[share]).max() / len(share) for share in shares]))

    assert largest_class_share(1000.0) < 0.13
    assert largest_class_share(0.05) > 0.3


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_alpha(alpha: float) -> None:
    with pytest.raises(TaskError, match="positive, finite alpha"):
        dirichlet_partition([0, 1], 2, alpha, np.random.default_rng(0))


def test_a_subset_keeps_the_type_of_its_targets() -> None:
    data = Data(torch.zeros(2, 3), torch.tensor([0, 1]))
    assert data.subset([1]).targets.dtype == torch.int64
