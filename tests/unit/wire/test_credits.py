"""Windows and the memory budget, each alone; how sessions use them is in test_scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from p2pml.errors import ProtocolError
from p2pml.wire.credits import MemoryBudget, ReceiveWindow, SendWindow
from p2pml.wire.measure import LinkMeter
from p2pml.wire.options import ChannelOptions

amounts = st.integers(0, 60)


@given(st.integers(1, 100), st.lists(st.tuples(st.sampled_from(["send", "read", "tell", "blocked"]), amounts)))
def test_a_pair_of_windows_keeps_its_invariants(size: int, script: list[tuple[str, int]]) -> None:
    """sent <= limit, limits never fall, received - consumed <= size, and at rest limit - consumed = size."""
    send, receive = SendWindow(size), ReceiveWindow(size)
    told = [size]
    for what, amount in script:
        limit = receive.limit
        if what == "send" and amount <= send.available:
            send.charge(amount)
            receive.receive(amount, "test")
        elif what == "read" and amount <= receive.received - receive.consumed:
            receive.consumed += amount
            assert (receive.consumed >= receive.due) == (receive.owed * 2 >= size), "half a window is given back"
            if receive.consumed >= receive.due:
                told.append(receive.renew())
        elif what == "blocked":
            told.append(receive.renew())
            assert not receive.owed
        elif what == "tell":
            assert send.raise_to(told[amount % len(told)]) in (True, False)  # late, twice, or lost: all the same
        assert receive.limit >= limit
        assert send.sent == receive.received <= send.limit <= receive.limit
        assert 0 <= receive.received - receive.consumed <= size
        assert receive.limit - receive.consumed <= size
    receive.consumed = receive.received
    assert receive.renew() - receive.consumed == size


def test_a_limit_is_only_ever_raised() -> None:
    window = SendWindow(10)
    window.charge(4)
    assert not window.raise_to(10)
    assert not window.raise_to(7)
    assert window.available == 6
    assert window.raise_to(12)
    assert window.available == 8


def test_more_than_the_credit_is_refused_and_not_counted() -> None:
    window = ReceiveWindow(10)
    window.receive(8, "bytes")
    with pytest.raises(ProtocolError, match="bytes: 3 beyond the credit of 10"):
        window.receive(5, "bytes")
    assert window.received == 8


def test_a_window_granted_by_hand_gives_nothing_back_by_itself() -> None:
    window = ReceiveWindow(256, manual=True)
    with pytest.raises(ProtocolError):
        window.receive(1, "messages")
    window.grant(2)
    window.receive(2, "messages")
    window.consumed += 2
    assert window.consumed < window.due
    assert not window.owed
    assert window.renew() == 2


def test_a_window_grows_by_what_was_added_and_never_shrinks() -> None:
    window = ReceiveWindow(10)
    window.receive(10, "bytes")
    window.resize(25)
    assert (window.limit, window.size) == (25, 25)
    window.resize(5)
    assert (window.limit, window.size) == (25, 25)


# --------------------------------------------------------------------------------------------------------- budget


class BudgetMachine(RuleBasedStateMachine):
    """Requests are granted in order, none is lost, and the total is never exceeded."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = MemoryBudget(100)
        self.asked: list[tuple[int, int, bool]] = []
        self.held: dict[int, tuple[int, bool]] = {}
        self.calls: dict[int, Callable[[], None]] = {}
        self.granted: list[int] = []

    @rule(amount=st.integers(0, 70), fixed=st.booleans())
    def reserve(self, amount: int, fixed: bool) -> None:
        if not self.budget.could_fit(amount):
            return
        number = len(self.calls)

        def granted() -> None:
            item = self.asked.pop(0)
            assert item[0] == number, "first come, first served"
            self.held[number] = item[1:]

        self.calls[number] = granted
        self.asked.append((number, amount, fixed))
        self.budget.reserve(amount, granted, fixed=fixed)

    @rule(amount=st.integers(0, 100), fixed=st.booleans())
    def try_reserve(self, amount: int, fixed: bool) -> None:
        free = not self.asked and self.budget.used + amount <= self.budget.total
        assert self.budget.try_reserve(amount, fixed=fixed) == free
        if free:
            number = len(self.calls)
            self.calls[number] = lambda: None
            self.held[number] = (amount, fixed)

    @rule(pick=st.integers(0, 50))
    def release(self, pick: int) -> None:
        if self.held:
            amount, fixed = self.held.pop(sorted(self.held)[pick % len(self.held)])
            self.budget.release(amount, fixed=fixed)

    @rule(pick=st.integers(0, 50))
    def withdraw(self, pick: int) -> None:
        if self.asked:
            number, _, _ = self.asked.pop(pick % len(self.asked))
            self.budget.withdraw(self.calls[number])

    @invariant()
    def counts_agree(self) -> None:
        held = self.held.values()
        assert self.budget.used == sum(amount for amount, _ in held) <= self.budget.total
        assert self.budget.used <= self.budget.peak <= self.budget.total
        waiting = [(amount, fixed) for _, amount, fixed in self.asked]
        assert self.budget.fixed == sum(amount for amount, fixed in [*held, *waiting] if fixed)
        assert not waiting or self.budget.used + waiting[0][0] > self.budget.total, "nobody waits for what is free"

    def teardown(self) -> None:
        """With all messages read, and the links still there, everybody in the queue is served."""
        while readable := [number for number, (_, fixed) in self.held.items() if not fixed]:
            self.budget.release(self.held.pop(readable[0])[0])
        assert not self.asked


TestBudget = BudgetMachine.TestCase


def test_a_withdrawn_request_lets_those_behind_it_go_first() -> None:
    budget = MemoryBudget(10)
    granted: list[str] = []

    def large() -> None:
        granted.append("large")

    assert budget.try_reserve(6)
    budget.reserve(9, large)
    budget.reserve(3, lambda: granted.append("small"))
    assert granted == []
    budget.withdraw(large)
    assert granted == ["small"]
    budget.release(6)
    assert granted == ["small"]
    assert budget.used == 3


def test_a_grant_may_give_back_and_ask_again() -> None:
    budget = MemoryBudget(10)
    order: list[int] = []

    def work(number: int) -> None:
        order.append(number)
        budget.release(10)
        if number < 3:
            budget.reserve(10, lambda: work(number + 10))

    assert budget.try_reserve(10)
    for number in range(3):
        budget.reserve(10, lambda number=number: work(number))  # type: ignore[misc]
    budget.release(10)
    assert sorted(order) == [0, 1, 2, 10, 11, 12]
    assert budget.used == 0


# -------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"messages": 0}, "'messages' must be at least 1, not 0"),
        ({"messages": -1, "manual": True}, "'messages' must be at least 0"),
        ({"bytes": 16383}, "'bytes' must be at least 16384"),
        ({"eager": -1}, "'eager' must be at least 0"),
        ({"weight": 0}, "'weight' must be at least 1"),
        ({"queue": 0}, "'queue' must be at least 1"),
        ({"compress": "gzip"}, "'compress' must be one of none, lz4, zstd, auto, not 'gzip'"),
    ],
)
def test_options_that_could_never_carry_a_message_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ChannelOptions(**wrong)


# -------------------------------------------------------------------------------------------------------- measure


def test_a_rate_is_measured_only_between_acknowledgements_of_a_busy_link() -> None:
    meter = LinkMeter()
    assert not meter.acknowledged(100.0, 0, 1 << 20)  # from here on it is busy
    assert not meter.acknowledged(100.1, 1000, 1 << 20)  # too little to tell
    assert meter.acknowledged(101.0, 500_000, 1 << 20)
    assert meter.bytes_per_second == 500_000
    assert meter.acknowledged(102.0, 1 << 20, 1 << 20)  # the last of it
    assert meter.bytes_per_second == 500_000 + 0.25 * ((1 << 20) - 500_000 - 500_000)
    rate = meter.bytes_per_second
    assert not meter.acknowledged(200.0, 2 << 20, 3 << 20)  # it was idle for most of that
    assert meter.bytes_per_second == rate
    assert not meter.acknowledged(200.0, 3 << 20, 3 << 20)  # no time has passed
    assert meter.bytes_per_second == rate


def test_the_round_trip_is_a_moving_average() -> None:
    meter = LinkMeter()
    assert meter.round_trip is None
    meter.answered(0.1)
    assert meter.round_trip == 0.1
    meter.answered(0.3)
    assert meter.round_trip == pytest.approx(0.15)
