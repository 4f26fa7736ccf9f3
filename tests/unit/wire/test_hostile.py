"""Peers that break the rules, by hand-made bytes: the session ends with an error that says what, and never raises."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import cbor2
import pytest

from p2pml.errors import HandshakeRefused, LinkClosed, ProtocolError
from p2pml.wire import codec, events
from p2pml.wire.credits import MemoryBudget
from p2pml.wire.framing import HEADER, MAX_HEAD, MAX_PAYLOAD, FrameType, frame, preface
from p2pml.wire.options import ChannelOptions
from p2pml.wire.outgoing import State
from p2pml.wire.session import RETRY
from tests.unit.wire.joined import HELLO, Note, Stranger, credit, data, hello, model, offer, outgoing

OPTIONS = {"data": ChannelOptions(messages=4, bytes=1 << 14, eager=2000), "manual": ChannelOptions(manual=True)}


def broken(peer: Stranger, *content: bytes) -> str:
    """Write this to the session, and get the error with which it closes; the other side is told the same."""
    peer.end.reading = False
    peer.write(*content)
    error = peer.end.closed.error
    assert isinstance(error, ProtocolError)
    assert not peer.end.closed.orderly
    goodbye = peer.read()[-1]
    assert goodbye.kind == FrameType.GOAWAY
    assert goodbye.payload.decode() == str(error)
    peer.write(*content)  # the rest is ignored
    assert peer.session.pull() == []
    assert peer.end.budget.used <= 1 << 14
    return str(error)


# ---------------------------------------------------------------------------------------------------------- credits

MODEL = outgoing(model(1, 1000))
HEAD = MODEL.head

BROKEN: dict[str, tuple[list[bytes], str]] = {
    "more messages than granted": (
        [data(1, number) for number in range(5)],
        "channel 'data', messages: 1 beyond the credit of 4",
    ),
    "more offers than granted": (
        [offer(number, 0) for number in range(5)],
        "channel 'data', messages: 1 beyond the credit of 4",
    ),
    "a message on a manual channel": ([data(2, 0)], "channel 'manual', messages: 1 beyond the credit of 0"),
    "more bytes than granted": (
        [offer(number, 0, head=codec.encode(Note(1, "x" * 8000)).head) for number in range(3)],
        "channel 'data', bytes: 7682 beyond the credit of 16384",
    ),
    "more than eager without an offer": ([data(1, 0, bytes(2001))], "a message of 2001 bytes came without an offer"),
    "more than eager, of which a part comes later": (
        [data(1, 0, bytes(16_000))[:100]],
        "a message of 16000 bytes came without an offer",
    ),
    "a message in pieces without an offer": (
        [data(1, 0, bytes(10), flags=1)],
        "message 0 came in pieces and without an offer",
    ),
    "a message without its beginning": (
        [data(1, 0, bytes(10), flags=2)],
        "message 0 came in pieces and without an offer",
    ),
    "data before its offer was accepted": (
        [offer(0, 1 << 25), offer(1, 1 << 25), data(1, 1, bytes(10), flags=1)],
        "data of message 1 came out of turn",
    ),
    "an eager message that overtakes an offer": (
        [offer(0, 5000), data(1, 1)],
        "data of message 1 came out of turn",
    ),
    "a wrong sequence": ([data(1, 0), data(1, 2)], "message 2 came where 1 was due"),
    "a sequence twice": ([data(1, 0), data(1, 0)], "message 0 came where 1 was due"),
    "an offer twice": ([offer(0, 5000), offer(0, 5000)], "message 0 came where 1 was due"),
    "a fragment beyond the message": (
        [offer(0, 5000), data(1, 0, bytes(5001), flags=3)],
        "message 0 ends at another size than declared",
    ),
    "a second fragment beyond the message": (
        [offer(0, 5000), data(1, 0, bytes(4000), flags=1), data(1, 0, bytes(4000), flags=2)],
        "message 0 ends at another size than declared",
    ),
    "the last fragment too early": (
        [offer(0, 5000), data(1, 0, bytes(4000), flags=3)],
        "message 0 ends at another size than declared",
    ),
    "all of it, but not as the last": (
        [offer(0, 5000), data(1, 0, bytes(5000), flags=1)],
        "message 0 ends at another size than declared",
    ),
    "data on no channel": ([data(7, 0)], "there is no channel 7 here (there are: data, manual)"),
    "an offer on no channel": ([offer(0, 10, channel=3)], "there is no channel 3 here"),
    "a reset on no channel": ([frame(FrameType.RESET, channel=3)], "there is no channel 3 here"),
    "blocked on no channel": ([frame(FrameType.BLOCKED, channel=3)], "there is no channel 3 here"),
    "an accept on no channel": ([frame(FrameType.ACCEPT, channel=3)], "speaks of a channel 3 that it never opened"),
    "a refusal on no channel": ([frame(FrameType.REFUSE, channel=3)], "speaks of a channel 3 that it never opened"),
    "credit for no channel": ([credit((3, 1, 1, 0))], "speaks of a channel 3 that it never opened"),
    "a malformed offer": ([frame(FrameType.OFFER, channel=1, payload=b"1234")], "a malformed OFFER"),
    "a malformed credit": ([frame(FrameType.CREDIT, payload=b"1234")], "a malformed CREDIT"),
    "a malformed pong": ([frame(FrameType.PONG, payload=b"1234")], "a malformed PONG"),
    "more bytes acknowledged than sent": ([credit((0, 0, 1, 1 << 40))], "1099511627776 bytes acknowledged"),
    "a second hello": ([hello()], "a second HELLO"),
    "an unknown frame": ([frame(99)], "unknown frame type 99"),
    "a huge frame": ([HEADER.pack(1, 3, 0, 1, MAX_PAYLOAD + 1, 0)], "a DATA frame declares 0 + 1048577 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("size", [1 << 16, 1])
def test_a_broken_rule_ends_the_session_with_an_error_that_names_it(case: str, size: int) -> None:
    content, error = BROKEN[case]
    peer = Stranger(OPTIONS, budget=MemoryBudget((1 << 25) + (1 << 21)))
    peer.end.reading = False
    if size == 1:
        peer.write(*content, sizes=[1])
        assert error in peer.error
    else:
        assert error in broken(peer, *content)


def test_credit_of_the_link_is_checked_by_itself() -> None:
    peer = Stranger(OPTIONS)
    peer.session.receiver.link.limit = 4
    assert "link, bytes: 6 beyond the credit of 4" in broken(peer, data(1, 0, bytes(10)))


def test_the_same_windows_hold_for_whole_small_messages_of_every_sort() -> None:
    for head, payload in ((b"", bytes(2000)), (codec.encode(Note(1, "x" * 1900)).head, b"")):
        peer = Stranger({"data": ChannelOptions(messages=100, bytes=1 << 14, eager=2000)})
        content = [data(1, number, payload, head) for number in range(9)]
        assert "channel 'data', bytes: " in broken(peer, *content)


SENDING: dict[str, tuple[Callable[[int], list[bytes]], str]] = {
    "accepted twice": (
        lambda number: [frame(FrameType.ACCEPT, channel=1, sequence=number)] * 2,
        "message 0 was accepted twice",
    ),
    "refused while it is being sent": (
        lambda number: [frame(FrameType.ACCEPT, channel=1, sequence=number), b"", frame(FrameType.REFUSE, channel=1)],
        "channel 'data': message 0 refused halfway",
    ),
    "acknowledged before it was sent": (
        lambda number: [credit((1, 10, 1 << 20, 1))],
        "channel 'data': message 0 acknowledged before it was sent",
    ),
    "more acknowledged than sent": (
        lambda number: [credit((1, 10, 1 << 20, 2))],
        "channel 'data': 2 messages acknowledged, 1 sent",
    ),
}


@pytest.mark.parametrize("case", SENDING)
def test_a_wrong_answer_to_a_message_ends_the_session(case: str) -> None:
    content, error = SENDING[case]
    peer = Stranger(OPTIONS, hello={"channels": [[1, "data", 10, 1 << 20, 1 << 16]]})
    message = peer.end.send("data", bytes(1_000_000), tracked=True)
    peer.read()
    for piece in content(0):
        if not piece:
            peer.session.pull()
            assert message.state is State.SENDING
        peer.write(piece)
    assert error in peer.error
    assert [event.outgoing for event in peer.end.of(events.MessageFailed)] == [message]
    assert message.state is State.FAILED


def test_answers_to_messages_that_nobody_waits_for_are_ignored() -> None:
    peer = Stranger(OPTIONS, hello={"channels": [[1, "data", 10, 1 << 20, 1 << 16]]})
    peer.write(frame(FrameType.ACCEPT, channel=1, sequence=5), frame(FrameType.RESET, channel=1, sequence=5))
    peer.write(frame(FrameType.REFUSE, channel=1, sequence=5, payload=b"\xff no"), credit((0, 0, 0, 0), (1, 0, 0, 0)))
    assert peer.session.is_open
    (discarded,) = peer.end.of(events.MessageDiscarded)
    assert str(discarded.error) == "the peer refused a message on 'data': � no"
    assert peer.session.sender.can_send("data", 10), "lower limits are old news"


# -------------------------------------------------------------------------------------------------------- handshake

EARLY = [data(1, 0), offer(0, 10), frame(FrameType.PING), credit(), frame(FrameType.CHANNELS, head=b"\xa0")]


@pytest.mark.parametrize("early", EARLY, ids=["data", "offer", "ping", "credit", "channels"])
def test_nothing_is_taken_before_the_hello(early: bytes) -> None:
    peer = Stranger(OPTIONS, open=False)
    assert "came before the handshake was complete" in broken(peer, preface(), early)


@pytest.mark.parametrize("early", [*EARLY[:3], hello()], ids=["data", "offer", "ping", "second hello"])
@pytest.mark.parametrize("accepting", [True, False])
def test_little_is_taken_between_the_hello_and_the_opening(early: bytes, accepting: bool) -> None:
    peer = Stranger(OPTIONS, open=False)
    peer.end.accepting = accepting
    assert "came before the handshake was complete" in broken(peer, preface(), hello(), early)


def test_the_dialer_does_not_open_by_credit() -> None:
    peer = Stranger(OPTIONS, open=False)
    peer.end.accepting = False
    peer.write(preface(), hello(), credit())
    assert "a CREDIT frame came before the handshake was complete" in peer.error


WRONG_HELLOS: dict[str, dict[str, Any]] = {
    **{f"no {name}": {name: ...} for name in HELLO},
    "peer": {"peer": 5},
    "empty peer": {"peer": ""},
    "long peer": {"peer": "x" * 129},
    "unprintable peer": {"peer": "a\x1b[2J"},
    "unprintable agent": {"agent": "a\n"},
    "long instance": {"instance": "x" * 129},
    "max_message": {"max_message": "many"},
    "negative max_message": {"max_message": -1},
    "boolean link": {"link": True},
    "negative link": {"link": -5},
    "codecs": {"codecs": "lz4"},
    "meta": {"meta": [1]},
    "channels": {"channels": {}},
    "channel": {"channels": [1]},
    "short channel": {"channels": [[1, "data", 1, 1]]},
    "channel type": {"channels": [[1, "data", 1, 1, 1.5]]},
    "channel 0": {"channels": [[0, "data", 1, 1, 1]]},
    "channel number": {"channels": [[1 << 32, "data", 1, 1, 1]]},
    "negative channel limit": {"channels": [[1, "data", -1, 1, 1]]},
    "channel twice": {"channels": [[1, "data", 1, 1, 1], [2, "data", 1, 1, 1]]},
    "number twice": {"channels": [[1, "data", 1, 1, 1], [1, "other", 1, 1, 1]]},
    "channel name": {"channels": [[1, "", 1, 1, 1]]},
    "long channel name": {"channels": [[1, "x" * 129, 1, 1, 1]]},
    "unprintable channel name": {"channels": [[1, "\x00", 1, 1, 1]]},
    "deep meta": {"meta": {"a": [[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]}},
    "huge number": {"meta": {"a": 1 << 200}},
    "a date": {"meta": {"a": cbor2.CBORTag(0, "2020-01-01T00:00:00Z")}},
}


@pytest.mark.parametrize("case", WRONG_HELLOS)
def test_a_malformed_hello_is_a_broken_protocol(case: str) -> None:
    peer = Stranger(OPTIONS, open=False)
    broken(peer, preface(), hello(**WRONG_HELLOS[case]))
    assert not peer.end.of(events.HelloReceived)


@pytest.mark.parametrize(
    "head",
    [
        b"", b"\xff", b"\x80", b"\xa1\x01\x02", b"\xa0\xa0", b"\x9b" + b"\xff" * 8, b"\xbb" + b"\xff" * 8,
        b"\x81" * MAX_HEAD, b"\x9f" * 5000, b"\xd8\x1c\x81\xd8\x1d\x00", b"\xc2\x5a\x7f\xff\xff\xff", b"\x5b" + b"\x7f" * 8,
    ],
)  # fmt: skip
def test_a_bomb_in_a_handshake_or_a_message_is_only_an_error(head: bytes) -> None:
    broken(Stranger(OPTIONS, open=False), preface(), frame(FrameType.HELLO, head=head))
    broken(Stranger(OPTIONS), frame(FrameType.CHANNELS, head=head))
    peer = Stranger(OPTIONS)
    peer.end.reading = True
    tracemalloc.start()
    peer.write(offer(0, 100, head))
    if head and len(head) <= 2000:
        peer.write(data(1, 1, b"", head))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2_000_000
    assert peer.session.is_open
    assert bool(peer.end.of(events.MessageDiscarded)) == bool(head)


def test_more_channels_than_anybody_has_are_refused() -> None:
    peer = Stranger(OPTIONS)
    for start in range(1, 1024, 128):
        channels = [[number, f"c{number}", 1, 1, 1] for number in range(start, start + 128)]
        peer.write(frame(FrameType.CHANNELS, head=cbor2.dumps({"channels": channels, "meta": {}})))
    assert len(peer.session.sender.names) == 1024
    again = [[1, "c1", 2, 2, 2]]
    peer.write(frame(FrameType.CHANNELS, head=cbor2.dumps({"channels": again, "meta": {}})))
    more = [[5000, "c5000", 1, 1, 1]]
    assert "more than 1024 channels" in broken(
        peer, frame(FrameType.CHANNELS, head=cbor2.dumps({"channels": more, "meta": {}}))
    )


@pytest.mark.parametrize(
    ("content", "guess"),
    [(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "an HTTP request"), (b"\x16\x03\x01\x02\x00" + bytes(50), "TLS")],
)
def test_another_protocol_is_told_apart(content: bytes, guess: str) -> None:
    peer = Stranger(OPTIONS, open=False)
    peer.write(content)
    assert "not a p2pml peer" in peer.error
    assert guess in peer.error


@pytest.mark.parametrize(
    ("code", "kind"), [(0, LinkClosed), (1, ProtocolError), (2, HandshakeRefused), (3, HandshakeRefused)]
)
def test_a_goodbye_is_taken_at_any_time(code: int, kind: type) -> None:
    for peer in (Stranger(OPTIONS), Stranger(OPTIONS, open=False)):
        if not peer.session.is_open:
            peer.write(preface())
        peer.write(frame(FrameType.GOAWAY, flags=code, payload=b"because \xff") + frame(FrameType.PING) + data(9, 9))
        error = peer.end.closed.error
        assert type(error) is kind
        assert "because �" in str(error)
        assert getattr(error, "retryable", False) == (code == RETRY)
