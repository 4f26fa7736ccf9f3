"""How two sessions come to know each other, and how they part."""

from __future__ import annotations

from typing import Any

import pytest

from p2pml.errors import (
    DuplicateLink,
    HandshakeRefused,
    LinkClosed,
    MessageTooLarge,
    ProtocolError,
)
from p2pml.wire import codec, events
from p2pml.wire.framing import FrameType, frame, preface
from p2pml.wire.options import ChannelOptions
from p2pml.wire.outgoing import State
from tests.unit.wire.joined import HELLO, End, Joined, Note, Stranger, join, model

SMALL = ChannelOptions(messages=4, bytes=1 << 14, eager=1000)


def opened(left: End, right: End) -> Joined:
    return Joined(left, right).settle()


def end(name: str, *, dialer: bool, channels: dict[str, ChannelOptions] | None = None, **options: Any) -> End:
    return End(name, {"data": ChannelOptions()} if channels is None else channels, dialer=dialer, **options)


def test_each_side_learns_who_the_other_is_before_it_opens() -> None:
    left = end("left", dialer=True, meta={"job": "train"}, agent="one 1.0")
    right = end("right", dialer=False, codecs=("lz4",), max_message=1 << 20)
    opened(left, right)
    for one, other in ((left, right), (right, left)):
        kinds = [type(event) for event in one.events if not isinstance(event, events.CreditAvailable)]
        assert kinds == [events.ChannelsChanged, events.HelloReceived, events.Opened]
        assert one.session.is_open
        assert one.session.peer == other.name
        assert one.session.sender.names == ["data"]
    assert right.session.meta == {"job": "train"}
    hello = left.of(events.Opened)[0].hello
    assert hello == events.Hello("right", "right-1", "p2pml", 1 << 20, ("lz4",))
    assert left.session.bytes_out == right.session.bytes_in > 0


@pytest.mark.parametrize("refuser", [0, 1])
@pytest.mark.parametrize("retry", [False, True])
def test_a_refused_handshake_tells_both_sides_why_and_whether_to_come_back(refuser: int, retry: bool) -> None:
    ends = (end("left", dialer=True), end("right", dialer=False))
    ends[refuser].accepting = False
    joined = opened(*ends)
    assert ends[refuser].of(events.HelloReceived)
    assert not ends[0].session.is_open
    ends[refuser].session.refuse("peer id in use", retry=retry)
    joined.settle()
    for one in ends:
        one.collect()
        error = one.closed.error
        assert isinstance(error, HandshakeRefused)
        assert "peer id in use" in str(error)
        assert error.retryable == retry
        assert not one.of(events.Opened)
    ends[refuser].session.accept()  # too late: nothing happens
    assert not ends[refuser].session.is_open


def test_a_duplicate_is_named_by_the_peer_whose_link_stays() -> None:
    left, right = end("left", dialer=True), end("right", dialer=False)
    right.accepting = False
    joined = opened(left, right)
    right.session.refuse_duplicate()
    joined.settle()
    right.collect()
    for one, other in ((left, right), (right, left)):
        assert isinstance(one.closed.error, DuplicateLink)
        assert one.closed.error.peer == other.name


def test_a_version_mismatch_tells_both_sides_which_versions_there_are() -> None:
    left, right = end("left", dialer=True, versions=(1, 2)), end("right", dialer=False, versions=(3, 4))
    opened(left, right)
    assert "the peer speaks 3 to 4, this side 1 to 2" in str(left.closed.error)
    assert "the peer speaks 1 to 2, this side 3 to 4" in str(right.closed.error)
    for one in (left, right):
        assert isinstance(one.closed.error, HandshakeRefused)
        assert not one.closed.error.retryable


@pytest.mark.parametrize("opener", [0, 1])
def test_a_channel_opened_during_the_handshake_breaks_nothing(opener: int) -> None:
    """Its CHANNELS frame comes after a HELLO that lacks it, and before the link is open."""
    for turns in range(1, 8):
        ends = (end("left", dialer=True), end("right", dialer=False))
        joined = Joined(*ends)
        for turn in range(turns):
            joined.pull(turn % 2)
            joined.now += 1
            joined.deliver(turn % 2, joined.now)
        ends[opener].session.add_channel("more", SMALL)
        ends[opener].session.receiver.grant("more", 0)
        joined.settle()
        other = ends[1 - opener]
        assert other.session.sender.names == ["data", "more"]
        other.send("more", Note(1))
        joined.settle()
        assert ends[opener].messages("more") == [Note(1)]


def test_what_is_sent_as_soon_as_the_link_is_open_waits_for_the_other_side_to_be_open() -> None:
    left, right = end("left", dialer=True), end("right", dialer=False)
    left.accepting = False
    joined = opened(left, right)
    left.session.accept()
    left.send("data", bytes(100_000))  # an offer: a control frame
    left.session.tick(joined.now)  # a ping
    left.session.receiver.grant("data", 0)
    assert not left.session.sender.send_small("data", b"", b"small")
    joined.settle()
    assert right.session.is_open
    assert right.messages("data") == [bytes(100_000)]


def test_messages_queued_before_the_handshake_follow_it() -> None:
    left, right = end("left", dialer=True), end("right", dialer=False)
    for one in (left, right):
        one.send("data", model(1, 100_000))
        one.send("data", Note(2))
        assert not one.session.sender.can_send("data", 10)
    opened(left, right)
    for one in (left, right):
        first, second = one.messages("data")
        assert first.tensors["t0"].nbytes == 100_000
        assert second == Note(2)


@pytest.mark.parametrize("dialer", [True, False])
def test_channels_and_meta_too_large_for_a_hello_are_a_refusal_that_says_so(dialer: bool) -> None:
    odd = end("odd", dialer=dialer, meta={"blob": bytes(17_000)})
    other = end("other", dialer=not dialer)
    opened(*((odd, other) if dialer else (other, odd)))
    odd.collect()
    for one in (odd, other):
        assert isinstance(one.closed.error, HandshakeRefused)
        assert "channels and meta take 17" in str(one.closed.error)


def test_announcing_too_much_raises_where_it_is_done() -> None:
    joined, left, right = join()
    left.session.options.meta["blob"] = bytes(17_000)
    with pytest.raises(MessageTooLarge, match="channels and meta take 17"):
        left.session.announce()
    left.session.options.meta["blob"] = b"small"
    left.session.announce()
    joined.settle()
    assert right.session.meta == {"blob": b"small"}


# --------------------------------------------------------------------------------------------------------- the end


def test_an_orderly_end_fails_what_has_not_arrived_and_frees_all_memory() -> None:
    joined, left, right = join({"data": ChannelOptions(messages=3)})
    right.reading = False
    acked = left.send("data", b"acknowledged", tracked=True)
    joined.run(0.1)
    sent = left.send("data", b"sent", tracked=True)
    untracked = left.send("data", b"untracked")
    waiting = left.send("data", bytes(1_000_000))
    joined.pull(0)
    left.session.close("enough")
    left.collect()
    assert left.closed.orderly
    assert str(left.closed.error) == "enough"
    assert [event.outgoing for event in left.of(events.MessageFailed)] == [waiting, sent]
    assert acked.state is State.DELIVERED
    assert untracked.state is State.SENT
    joined.settle()
    assert right.closed.orderly
    assert str(right.closed.error) == "left closed the link: enough"
    for session in (left.session, right.session):
        session.close("again")
        session.lost(LinkClosed("again"))
        session.tick(joined.now + 100)
        session.eof_received(joined.now)
        session.announce()
        assert session.events == []
        assert session.pull() == []
    assert not left.session.sender.cancel(None)


@pytest.mark.parametrize(
    ("cut", "where"),
    [
        (0, " before the handshake was complete"),
        (5, " in the middle of a frame before the handshake was complete"),
        (16, " before the handshake was complete"),
        (40, " in the middle of a frame before the handshake was complete"),
    ],
)
def test_a_stream_that_ends_early_says_where(cut: int, where: str) -> None:
    peer = Stranger(open=False)
    peer.write((preface() + frame(FrameType.HELLO, head=codec.plain_dumps(HELLO)))[:cut])
    peer.session.eof_received(1.0)
    peer.end.collect()
    assert peer.error == f"the peer closed the connection{where}"
    assert not peer.end.closed.orderly


def test_a_stream_that_ends_between_frames_or_within_one_says_which() -> None:
    for content, where in ((b"", ""), (frame(FrameType.PING)[:9], " in the middle of a frame")):
        peer = Stranger()
        peer.write(content)
        peer.session.eof_received(1.0)
        peer.end.collect()
        assert peer.error == f"stranger closed the connection{where}"


def test_whose_fault_the_end_was_is_told_to_both() -> None:
    joined, left, right = join()
    left.session._fail(ProtocolError("that was wrong \udcff"))
    joined.settle()
    left.collect()
    assert str(right.closed.error) == "left closed the link because this side broke the protocol: that was wrong ?"
    assert isinstance(right.closed.error, ProtocolError)
    assert not right.closed.orderly
