"""Channels opened later, and the memory that links and messages take and give back."""

from __future__ import annotations

from typing import Any

from p2pml.errors import (
    HandshakeRefused,
    LinkClosed,
)
from p2pml.wire import events
from p2pml.wire.credits import MemoryBudget
from p2pml.wire.options import ChannelOptions
from tests.unit.wire.joined import End, Joined, Note, join

SMALL = ChannelOptions(messages=4, bytes=1 << 14, eager=1000)


def opened(left: End, right: End) -> Joined:
    return Joined(left, right).settle()


def end(name: str, *, dialer: bool, channels: dict[str, ChannelOptions] | None = None, **options: Any) -> End:
    return End(name, {"data": ChannelOptions()} if channels is None else channels, dialer=dialer, **options)


def test_a_channel_opened_later_is_announced_and_its_window_counts() -> None:
    joined, left, right = join()
    left.send("more", bytes(100_000))
    left.send("more", Note(1))
    joined.settle()
    before = right.budget.fixed
    right.session.add_channel("more", SMALL)
    joined.settle()
    assert [len(message) if isinstance(message, memoryview) else message for message in right.messages("more")] == [
        100_000,
        Note(1),
    ]
    assert right.budget.fixed == before + SMALL.bytes == right.session.receiver.link.size
    assert left.session.sender.link.limit >= before + SMALL.bytes


def test_a_link_without_channels_takes_memory_for_the_first_one_too() -> None:
    joined, left, right = join({})
    assert right.budget.used == 0
    right.session.add_channel("data", SMALL)
    left.send("data", Note(1))
    joined.settle()
    assert right.messages("data") == [Note(1)]
    assert right.budget.used == right.budget.fixed == SMALL.bytes


def test_a_channel_for_which_memory_is_not_free_yet_gives_credit_once_it_is() -> None:
    budget = MemoryBudget((1 << 20) + 200_000)
    joined, left, right = join(right={"budget": budget})
    right.reading = False
    left.send("data", bytes(190_000))
    joined.settle()
    right.session.add_channel("more", SMALL)
    left.send("more", Note(1))
    left.send("data", bytes(100_000))
    joined.settle()
    assert right.messages("more") == []
    assert budget.used == (1 << 20) + 190_000
    right.read(1)
    joined.settle()
    assert right.messages("more") == [Note(1)]
    assert budget.fixed == (1 << 20) + SMALL.bytes
    assert [len(message) for message in right.messages("data")] == [190_000, 100_000]


def test_a_link_with_no_memory_for_a_new_channel_is_closed_for_now() -> None:
    joined, left, right = join(right={"budget": MemoryBudget((1 << 20) + 1000)})
    right.session.add_channel("more", SMALL)
    right.collect()
    joined.settle()
    for one in (left, right):
        assert isinstance(one.closed.error, HandshakeRefused)
        assert one.closed.error.retryable
        assert "no receive memory left for channel 'more'" in str(one.closed.error)
    assert right.budget.used == 0


def test_a_link_whose_windows_do_not_fit_is_refused_for_now() -> None:
    right = end("right", dialer=False, budget=MemoryBudget(1000))
    left = end("left", dialer=True)
    opened(left, right)
    for one in (left, right):
        assert isinstance(one.closed.error, HandshakeRefused)
        assert one.closed.error.retryable
        assert "no receive memory left for another link (1000 bytes in all)" in str(one.closed.error)
    assert right.budget.used == right.budget.fixed == 0


def test_an_offer_that_waits_for_memory_is_accepted_when_another_link_frees_it() -> None:
    budget = MemoryBudget((2 << 20) + 100_000)
    first, left, right = join(right={"budget": budget})
    second, other, also = join(right={"budget": budget})
    woken: list[str] = []
    also.session.shared.on_output = lambda: woken.append("also")
    right.reading = False
    left.send("data", bytes(90_000))
    first.settle()
    other.send("data", bytes(80_000))
    second.settle()
    assert also.messages("data") == []
    assert woken == []
    right.read(1)
    assert woken == ["also"]
    second.settle()
    assert also.messages("data") == [bytes(80_000)]


def test_nobody_waits_for_memory_that_other_links_hold_as_long_as_they_stand() -> None:
    """It would hold up the queue for everybody."""
    budget = MemoryBudget((2 << 20) + 100_000)
    first, left, _ = join(right={"budget": budget})
    second, other, also = join(right={"budget": budget})
    left.send("data", bytes(1_000_000))
    other.send("data", bytes(100_000))
    first.settle()
    second.settle()
    assert "do not fit" in str(left.of(events.MessageFailed)[0].error)
    assert also.messages("data") == [bytes(100_000)]


def test_what_was_received_and_not_yet_read_keeps_its_memory_after_the_end() -> None:
    """So a peer that comes back again and again cannot fill the memory of a reader that is slow."""
    budget = MemoryBudget((1 << 20) + 300_000)
    joined, left, right = join(right={"budget": budget})
    right.reading = False
    left.send("data", bytes(1000))
    left.send("data", bytes(100_000))
    joined.settle()
    left.send("data", bytes(150_000))
    joined.pull(0, once=True)
    joined.now += 1
    joined.deliver(0, joined.now)
    assert budget.used == (1 << 20) + 250_000
    left.session.close()
    joined.settle()
    assert budget.used == 1000 + 100_000
    assert budget.fixed == 1000
    right.read(1)
    assert budget.used == 100_000
    right.read(1)
    assert budget.used == budget.fixed == 0


def test_the_end_of_a_link_grants_nothing_to_its_own_offers() -> None:
    budget = MemoryBudget((1 << 20) + 100_000)
    joined, left, right = join(right={"budget": budget})
    for _ in range(3):
        left.send("data", bytes(90_000))
    joined.pull(0, once=True)
    joined.now += 1
    joined.deliver(0, joined.now)
    assert len(b"".join(right.session.pull())) > 0
    right.session.lost(LinkClosed("cut"))
    assert budget.used == budget.fixed == 0
    assert right.session.pull() == []


def test_a_channel_that_still_waits_for_memory_at_the_end_waits_no_more() -> None:
    budget = MemoryBudget((1 << 20) + 100_000)
    joined, left, right = join(right={"budget": budget})
    right.reading = False
    left.send("data", bytes(100_000))
    joined.settle()
    right.session.add_channel("more", SMALL)
    assert budget.fixed == (1 << 20) + SMALL.bytes
    right.session.lost(LinkClosed("cut"))
    right.read(1)
    assert budget.used == budget.fixed == 0
    assert budget.try_reserve(budget.total)


def test_whenever_credit_is_told_all_of_it_is_told() -> None:
    """So that limits do not lag behind what was read by up to half a window longer than they need to."""
    joined, left, right = join({"data": SMALL, "other": SMALL})
    left.send("data", bytes(900))
    joined.run(0.1).settle()  # the acknowledgement tells it; a quarter of the window is no reason by itself
    outlet = left.session.sender.channel("data")
    assert outlet is not None
    assert outlet.messages.limit == SMALL.messages + 1
    assert outlet.bytes.limit == SMALL.bytes + 900
    assert left.session.sender.link.limit == 2 * SMALL.bytes + 900
    assert right.session.receiver.link.limit == 2 * SMALL.bytes + 900


def test_what_is_granted_during_the_handshake_is_told_after_it() -> None:
    for granter in (0, 1):
        ends = [
            end(name, dialer=name == "left", channels={"data": ChannelOptions(manual=True)})
            for name in ("left", "right")
        ]
        joined = Joined(*ends)
        for turn in range(4):  # the prefaces and both HELLOs
            joined.pull(turn % 2)
            joined.now += 1
            if turn < 3:
                joined.deliver(turn % 2, joined.now)
        assert not any(one.session.is_open for one in ends)
        ends[granter].session.receiver.grant("data", 1)
        ends[1 - granter].send("data", Note(1))
        joined.settle()
        assert ends[granter].messages("data") == [Note(1)]
