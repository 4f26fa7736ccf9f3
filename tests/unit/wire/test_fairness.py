"""Whose turn it is: control first, then priorities, then channels by their weight."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from p2pml.wire import events
from p2pml.wire.framing import HEADER, SLICE, FrameType, frame
from p2pml.wire.options import ChannelOptions
from p2pml.wire.outgoing import State, join_small
from tests.unit.wire.joined import Frame, Stranger, credit, join, model, outgoing, read_frames

HUGE = np.zeros(100 << 20, np.uint8).data  # never written to, so it takes no memory
CHUNK = SLICE + HEADER.size


class Receiving(Stranger):
    """By hand: has channels 1, 2, ... of these names, and accepts every offer."""

    def __init__(self, *names: str, preferences: dict[str, ChannelOptions] | None = None) -> None:
        channels = [[number, name, 100, 1 << 20, 1 << 16] for number, name in enumerate(names, 1)]
        super().__init__({}, hello={"channels": channels, "link": 1 << 30})
        self.sender = self.session.sender
        for name, options in (preferences or {}).items():
            self.sender.prefer(name, options)

    def start(self, *names: str, size: int = len(HUGE)) -> None:
        """Have it send a large message on each of these channels."""
        for name in names:
            self.sender.send(name, outgoing(HUGE[:size]))
        for offer in self.pull():
            if offer.kind == FrameType.OFFER:
                self.write(frame(FrameType.ACCEPT, channel=offer.channel, sequence=offer.sequence))

    def pull(self) -> list[Frame]:
        return read_frames(b"".join(self.session.pull()))

    def shares(self, chunks: int) -> Counter[int]:
        """On which channels the next so many frames of data go out."""
        found: Counter[int] = Counter()
        for _ in range(chunks):
            (one,) = self.pull()
            found[one.channel] += 1
        return found


def test_whatever_is_urgent_goes_out_before_the_next_chunk_of_a_transfer_of_100_mb() -> None:
    peer = Receiving("bulk", "small")
    peer.start("bulk")
    sent = 0
    for turn in range(40):
        (one,) = peer.pull()
        assert one.kind == FrameType.DATA
        assert len(one.payload) == SLICE
        sent += len(one.payload)
        if turn % 4 == 0:
            peer.now = peer.session.deadline()
            peer.session.tick(peer.now)
            expected = FrameType.PING
        elif turn % 4 == 1:
            peer.write(frame(FrameType.PING, payload=bytes(8)))
            expected = FrameType.PONG
        elif turn % 4 == 2:
            assert peer.sender.send_small("small", b"", b"message")
            expected = FrameType.DATA
        else:
            peer.sender.send("small", outgoing(b"message"))
            expected = FrameType.DATA
        urgent, *_ = peer.pull()
        assert urgent.kind == expected
        assert len(urgent.payload) <= 8
    assert sent == 40 * SLICE


def test_one_pull_hands_out_at_most_a_chunk_and_a_batch() -> None:
    peer = Receiving("bulk", "other")
    peer.start("bulk", "other")
    for _ in range(20):
        while peer.sender.send_small("other", b"", bytes(1000)) or peer.sender.send_small("bulk", b"", bytes(1000)):
            pass
        assert sum(map(len, peer.session.pull())) <= CHUNK + (1 << 17)


@pytest.mark.parametrize(("one", "two"), [(1, 1), (1, 3), (5, 2)])
def test_channels_of_one_priority_share_by_weight(one: int, two: int) -> None:
    preferences = {"a": ChannelOptions(weight=one), "b": ChannelOptions(weight=two)}
    peer = Receiving("a", "b", preferences=preferences)
    peer.start("a", "b")
    shares = peer.shares(14 * (one + two))
    assert abs(shares[1] - 14 * one) <= 1
    assert abs(shares[2] - 14 * two) <= 1


def test_a_lower_priority_number_goes_first() -> None:
    peer = Receiving("later", "first", preferences={"first": ChannelOptions(priority=0)})
    peer.start("later", "first", size=5 * SLICE)
    assert peer.shares(3) == {2: 3}
    assert peer.shares(4) == {2: 2, 1: 2}


def test_a_channel_that_was_idle_has_earned_nothing() -> None:
    peer = Receiving("a", "b")
    peer.start("b", size=SLICE)
    peer.start("a")
    assert peer.shares(30) == {1: 30}
    peer.start("b")
    shares = peer.shares(20)
    assert abs(shares[1] - shares[2]) <= 1


def test_a_channel_that_waited_for_credit_has_earned_nothing() -> None:
    peer = Receiving("a", "b")
    peer.sender.send("b", outgoing(HUGE))
    offer = next(one for one in peer.pull() if one.kind == FrameType.OFFER)
    peer.start("a")
    assert peer.shares(30) == {1: 30}
    peer.write(frame(FrameType.ACCEPT, channel=2, sequence=offer.sequence))
    shares = peer.shares(21)
    assert abs(shares[1] - shares[2]) <= 1


def test_a_starved_channel_of_a_later_priority_does_not_favour_a_newcomer() -> None:
    peer = Receiving("a", "b", "later", preferences={"later": ChannelOptions(priority=5)})
    peer.start("a", "later")
    assert peer.shares(30) == {1: 30}
    peer.start("b")
    shares = peer.shares(20)
    assert abs(shares[1] - shares[2]) <= 1
    assert shares[3] == 0


def test_a_channel_without_credit_says_so_while_another_is_busy() -> None:
    peer = Receiving("a", "b")
    peer.start("a")
    for _ in range(100):
        assert peer.sender.send_small("b", b"", b"x")
    peer.sender.send("b", outgoing(b"x"))
    kinds = [one.kind for one in peer.pull() if one.channel == 2]
    assert kinds == [FrameType.DATA] * 100 + [FrameType.BLOCKED]
    assert all(one.kind == FrameType.DATA for one in peer.pull()), "once for each limit"
    peer.write(credit((2, 101, 1 << 20, 0)))
    assert any(one.channel == 2 and one.payload == b"x" for one in peer.pull())


def test_whoever_was_declined_hears_when_it_is_worth_asking_again() -> None:
    """As grpclib#43: also when it was the credit of bytes, or of the link, or a message before it, that was in the way."""
    peer = Receiving("a")
    peer.end.events.clear()

    def told() -> int:
        peer.end.collect()
        return len(peer.end.of(events.CreditAvailable))

    outlet = peer.sender.channel("a")
    assert outlet is not None
    outlet.bytes.charge(outlet.bytes.available)
    assert not peer.sender.can_send("a", 10)
    peer.write(credit((1, 100, 2 << 20, 0)))
    assert told() == 1
    assert peer.sender.can_send("a", 10)
    peer.sender.link.charge(peer.sender.link.available)
    assert not peer.sender.can_send("a", 10)
    peer.write(credit((1, 101, 2 << 20, 0)))
    assert told() == 1
    peer.write(credit((0, 0, 2 << 30, 0)))
    assert told() == 2
    peer.start("a", size=2 * SLICE)
    assert not peer.sender.can_send("a", 10)
    peer.pull()
    assert told() == 2
    peer.pull()
    assert told() == 3
    peer.write(credit((1, 110, 2 << 20, 0)))
    assert told() == 3, "nobody had been declined"


def test_offers_wait_for_credit_of_the_link_too() -> None:
    peer = Receiving("a")
    peer.sender.link.charge(peer.sender.link.available)
    message = peer.end.send("a", model(1, 100_000))
    assert message.state is State.WAITING
    assert [one.kind for one in peer.pull()] == [FrameType.BLOCKED]
    peer.write(credit((0, 0, 2 << 30, 0)))
    assert [one.kind for one in peer.pull()] == [FrameType.OFFER]
    assert message.state is State.OFFERED


def test_small_pieces_are_joined_and_large_ones_left_in_their_memory() -> None:
    large = memoryview(bytes(20_000))
    assert join_small([b"one"]) == [b"one"]
    joined = join_small([b"a", memoryview(b"b"), large, b"c", large, large, b"d", b"e"])
    assert [bytes(piece) for piece in joined] == [b"ab", bytes(20_000), b"c", bytes(20_000), bytes(20_000), b"de"]
    assert joined[1] is large
    assert join_small([b"a", large])[-1] is large


def test_a_tensors_own_memory_is_handed_out() -> None:
    peer = Receiving("bulk")
    array = np.arange(300_000, dtype=np.float32)
    peer.sender.send("bulk", outgoing(memoryview(array).cast("B")))
    peer.write(frame(FrameType.ACCEPT, channel=1, sequence=0))
    pieces = [piece for _ in range(6) for piece in peer.session.pull() if len(piece) > 50_000]
    assert sum(map(len, pieces)) == array.nbytes
    assert all(np.shares_memory(np.frombuffer(piece, np.uint8), array) for piece in pieces)
    (sent,) = peer.session.take_sent()
    assert peer.session.take_sent() == []
    sent.release()
    assert not sent.segments, "the tensor is its owner's alone"


def test_many_channels_are_told_in_as_many_frames_as_it_takes() -> None:
    """A CREDIT frame has room for 145 channels."""
    channels = {f"c{number}": ChannelOptions(bytes=1 << 14) for number in range(200)}
    joined, left, right = join(channels)
    for name in channels:
        assert left.session.sender.send_small(name, b"", b"x")
    for name in channels:
        left.send(name, bytes(20_000), tracked=True)
    joined.run(1.0)
    assert len(right.arrived) == 400
    assert len(left.of(events.MessageDelivered)) == 200
