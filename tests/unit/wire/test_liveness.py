"""Heartbeats, half-open links, acknowledgements: with the clock in the test's hand."""

from __future__ import annotations

import pytest

from p2pml.errors import HandshakeRefused, LinkClosed
from p2pml.wire import codec, events
from p2pml.wire.framing import SIZE, FrameType, frame, preface
from p2pml.wire.options import ChannelOptions
from p2pml.wire.receiver import ACK_DELAY
from p2pml.wire.session import PINGS_REMEMBERED, REPORT_EVERY
from tests.unit.wire.joined import HELLO, Frame, Stranger, data, join


def pings(frames: list[Frame]) -> list[int]:
    return [SIZE.unpack(one.payload)[0] for one in frames if one.kind == FrameType.PING]


def tick(peer: Stranger, now: float) -> list[Frame]:
    peer.now = now
    peer.session.tick(now)
    peer.end.collect()
    return peer.read()


def test_the_round_trip_is_measured_by_pings_in_both_directions() -> None:
    joined, left, right = join(delay=0.05)
    joined.run(6.0, step=0.001)
    for one in (left, right):
        assert one.session.meter.round_trip == pytest.approx(0.1, abs=0.01)


def test_the_rate_is_measured_while_the_link_is_busy() -> None:
    joined, left, _ = join(delay=0.01)
    assert left.session.meter.bytes_per_second is None
    left.send("data", bytes(20 * REPORT_EVERY))
    joined.run(1.0, step=0.01)
    assert left.session.meter.bytes_per_second == pytest.approx(1 << 25, rel=1.0)


def test_a_ping_is_sent_each_heartbeat_and_answered_with_its_own_content() -> None:
    peer = Stranger(heartbeat=2.0)
    assert peer.session.deadline() == 0.0
    assert pings(tick(peer, 0.0)) == [1]
    assert peer.session.deadline() == 2.0
    assert pings(tick(peer, 1.9)) == []
    assert pings(tick(peer, 2.0)) == [2]
    peer.write(frame(FrameType.PING, payload=b"8 bytes."))
    assert peer.read() == [Frame(FrameType.PONG, 0, 0, 0, b"", b"8 bytes.")]


def test_only_an_answer_to_a_ping_that_was_sent_counts_and_once() -> None:
    peer = Stranger()
    for turn in range(PINGS_REMEMBERED + 2):
        tick(peer, 2.5 * turn)
        peer.write(frame(FrameType.PING))  # a sign of life
    session = peer.session
    for number in (0, 1, 2, 77):
        peer.write(frame(FrameType.PONG, payload=SIZE.pack(number)))
    assert session.meter.round_trip is None, "too old, or never sent"
    peer.now += 0.5
    for _ in range(2):
        peer.write(frame(FrameType.PONG, payload=SIZE.pack(PINGS_REMEMBERED + 2)))
    assert session.meter.round_trip == 0.5
    assert len(session._ping_sent) < PINGS_REMEMBERED


@pytest.mark.parametrize("direction", [0, 1, None])
def test_a_half_open_link_is_noticed_within_the_timeout(direction: int | None) -> None:
    joined, left, right = join()
    joined.run(1.0)
    for index in (0, 1) if direction is None else (direction,):
        joined.broken[index] = True
    joined.run(10.0)
    deaf = [right, left] if direction is None else [(right, left)[direction]]
    joined.run(2.6)
    for one in deaf:
        assert isinstance(one.closed.error, LinkClosed)
        assert not one.closed.orderly
        assert str(one.closed.error).startswith("nothing heard from ")
        assert str(one.closed.error).endswith(" for 10 s")
    assert not left.session.is_open


def test_any_byte_is_a_sign_of_life() -> None:
    """The rest of a large frame comes a byte at a time, and no pong."""
    peer = Stranger()
    message = data(1, 0, bytes(1000))
    for number in range(100):
        peer.write(message[number : number + 1])
        for _ in range(3):
            tick(peer, peer.now + 3.3)
            assert peer.session.is_open
    tick(peer, peer.now + 0.2)
    assert peer.error == "nothing heard from stranger for 10 s"


def test_time_in_which_this_side_did_not_run_is_not_the_peers_fault() -> None:
    """As dronekit#592: the machine was suspended, or a computation held the loop."""
    joined, left, right = join()
    joined.run(5.0)
    joined.now += 3600.0
    for end in (left, right):
        end.session.tick(joined.now)
    joined.run(30.0)
    assert left.session.is_open
    assert right.session.is_open
    joined.now += 3600.0
    left.session.tick(joined.now)
    joined.broken = [True, True]
    joined.run(12.0)
    assert "nothing heard from right" in str(left.closed.error), "it is given its time, and no more"


def test_a_peer_that_connects_and_says_nothing_is_dropped() -> None:
    peer = Stranger(open=False)
    assert peer.session.deadline() == 10.0
    tick_only(peer, 9.99)
    assert not peer.session.is_closed
    tick_only(peer, 10.0)
    assert peer.error == "no handshake within 10 s"
    assert isinstance(peer.end.closed.error, HandshakeRefused)
    assert peer.end.closed.error.retryable


def test_a_peer_that_stops_in_the_middle_of_the_handshake_is_dropped() -> None:
    peer = Stranger(open=False, handshake=3.0)
    peer.write(preface(), frame(FrameType.HELLO, head=codec.plain_dumps(HELLO)))
    for now in (1.0, 2.9):
        peer.now = now
        tick_only(peer, now)
        assert not peer.session.is_closed
    tick_only(peer, 3.0)
    assert peer.error == "no handshake within 3 s"
    assert peer.end.budget.used == 0


def tick_only(peer: Stranger, now: float) -> None:
    peer.session.tick(now)
    peer.end.collect()


def test_small_messages_are_acknowledged_together_after_a_moment() -> None:
    joined, left, right = join({"a": ChannelOptions(), "b": ChannelOptions(), "c": ChannelOptions()}, delay=0.0)
    joined.run(0.1, step=0.001)
    right.reading = False
    before = right.session.bytes_out
    for number in range(50):
        left.send("ab"[number % 2], b"x", tracked=True)
    joined.run(ACK_DELAY / 2, step=0.001)
    assert right.session.bytes_out == before
    assert right.session.deadline() <= joined.now + ACK_DELAY
    joined.run(ACK_DELAY, step=0.001)
    assert len(left.of(events.MessageDelivered)) == 50
    frames = right.session.bytes_out - before
    assert frames == 16 + 3 * 28, "one frame, of the link and the two channels"
    assert right.session.shared.ack_due is None


def test_a_large_message_is_acknowledged_at_once() -> None:
    joined, left, _ = join()
    left.send("data", bytes(100_000), tracked=True)
    joined.settle()
    assert len(left.of(events.MessageDelivered)) == 1
