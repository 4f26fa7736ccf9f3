"""Schedules and the broadcast tree; and why the weights of Eq. 3 are needed."""

from __future__ import annotations

import random
from fractions import Fraction
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pml.protocols.chainsgd.broadcast import ranked, subtrees, trees
from p2pml.protocols.chainsgd.schedule import ChainScheduler, Phase, RandomScheduler, Schedule, Scheduler, TreeScheduler


def peers(count: int) -> list[str]:
    return [f"p{index}" for index in range(count)]


def run(scheduler: Scheduler, count: int, seed: int) -> tuple[list[tuple[str, str]], Schedule]:
    """All pairs of an attempt, in the order in which they are merged, with devices ready in random order."""
    rng = random.Random(seed)
    schedule = Schedule(peers(count))
    scheduler.begin(schedule)
    merged: list[tuple[str, str]] = []
    waiting = peers(count)
    rng.shuffle(waiting)
    while len(merged) < count - 1:
        while len(schedule.remaining()) > 1 and (pair := scheduler.next_pair()) is not None:
            schedule.name(*pair)
        # A pair is merged when the sender has merged all of its own, and both are ready.
        senders = schedule.in_flight()
        due = [
            (sender, receiver)
            for sender, receiver in senders
            if {sender, receiver} <= schedule.ready and not any(other == sender for _, other in senders)
        ]
        if due and (not waiting or rng.random() < 0.5):
            pair = rng.choice(due)
            schedule.merge(pair[0])
            merged.append(pair)
        else:
            schedule.ready.add(waiting.pop())
    return merged, schedule


@pytest.mark.parametrize("kind", ["tree", "chain", "random"])
@given(count=st.integers(1, 33), seed=st.integers(0, 999))
def test_every_device_but_the_root_sends_once_and_theta_of_the_root_is_n(kind: str, count: int, seed: int) -> None:
    schedulers = {"tree": TreeScheduler(), "chain": ChainScheduler(), "random": RandomScheduler(random.Random(seed))}
    merged, schedule = run(schedulers[kind], count, seed)
    assert len({sender for sender, _ in merged}) == count - 1
    (root,) = schedule.remaining()
    theta = dict.fromkeys(peers(count), 1)
    for sender, receiver in merged:
        theta[receiver] += theta[sender]
    assert theta[root] == count
    assert sum(schedule.aggregations.values()) == count - 1
    assert all(schedule.phase(device) is Phase.DONE for device in peers(count) if device != root)


def merge(values: list[Fraction], *, weighted: bool) -> Fraction:
    """Nine devices in a chain, each pair averaged: with the weights of Eq. 3, or plainly as in NeighborSGD."""
    merged, schedule = run(ChainScheduler(), len(values), 1)
    value = dict(zip(peers(len(values)), values, strict=True))
    theta = dict.fromkeys(value, 1)
    for sender, receiver in merged:
        i, j = (theta[receiver], theta[sender]) if weighted else (1, 1)
        value[receiver] = (i * value[receiver] + j * value[sender]) / Fraction(i + j)
        theta[receiver] += theta[sender]
    return value[schedule.remaining()[0]]


def test_without_theta_a_chain_of_nine_weighs_its_devices_by_powers_of_two() -> None:
    def weights(*, weighted: bool) -> list[Fraction]:
        ones = [[Fraction(int(at == device)) for at in range(9)] for device in range(9)]
        return [merge(one, weighted=weighted) for one in ones]

    assert weights(weighted=True) == [Fraction(1, 9)] * 9
    assert sorted(weights(weighted=False)) == [Fraction(1, 256), *(Fraction(1, 2**k) for k in range(8, 0, -1))]


def test_the_tree_is_that_of_the_paper() -> None:
    scheduler = TreeScheduler()
    pairs = scheduler.pairs(Schedule(peers(6)))
    assert pairs == [("p1", "p0"), ("p3", "p2"), ("p5", "p4"), ("p2", "p0"), ("p4", "p0")]


@pytest.mark.parametrize("pair", [("p1", "p1"), ("p0", "p9"), ("p1", "p2"), ("p2", "p1")])
def test_pairs_that_break_the_rule_are_refused(pair: tuple[str, str]) -> None:
    schedule = Schedule(peers(3))
    schedule.name("p1", "p0")
    with pytest.raises(ValueError, match="the scheduler named"):
        schedule.name(*pair)


@given(count=st.integers(1, 70))
def test_a_broadcast_reaches_min_n_2_to_the_r_peers_in_round_r(count: int) -> None:
    tree = peers(count)
    sent_to: dict[str, list[str]] = {}

    def descend(part: list[str]) -> None:
        below = subtrees(part)
        sent_to[part[0]] = [each[0] for each in below]
        assert [len(each) for each in below] == sorted((len(each) for each in below), reverse=True)
        for each in below:
            descend(each)

    descend(tree)
    assert set(sent_to) == set(tree)
    reached, rounds = {tree[0]: 0}, 0
    while len(reached) < count:
        rounds += 1
        for peer in list(reached):
            if reached[peer] < len(sent_to[peer]):
                reached[sent_to[peer][reached[peer]]] = 0
                reached[peer] += 1
        assert len(reached) == min(count, 2**rounds)
    assert rounds == ceil(log2(count))


def test_the_tree_of_eight_is_that_of_the_paper() -> None:
    assert [part[0] for part in subtrees(peers(8))] == ["p1", "p2", "p4"]
    assert [part[0] for part in subtrees(subtrees(peers(8))[0])] == ["p3", "p5"]


def test_who_has_more_resources_forwards_more() -> None:
    tree = ranked("p2", peers(5), {"p4": 3.0, "p1": 2.0, "p0": 1.0, "p3": 1.0})
    assert tree == ["p2", "p4", "p1", "p0", "p3"]


@given(sources=st.integers(1, 9), targets=st.integers(0, 9))
def test_each_target_has_one_source_and_sources_share_them_evenly(sources: int, targets: int) -> None:
    given_to = [f"t{index}" for index in range(targets)]
    found = trees(peers(sources), given_to)
    assert sorted(peer for tree in found for peer in tree[1:]) == given_to
    sizes = [len(tree) for tree in found]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(found) == min(sources, targets)
