"""Floods, lies about sizes, slow readers and noise: memory stays within its bounds, and nothing is ever raised."""

from __future__ import annotations

import random
import tracemalloc

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pml.errors import CompressionError, LinkClosed, ProtocolError
from p2pml.wire import codec, events
from p2pml.wire.credits import MemoryBudget
from p2pml.wire.framing import FrameType, frame, preface
from p2pml.wire.incoming import unpack
from p2pml.wire.options import ChannelOptions
from tests.unit.wire.joined import Note, Stranger, credit, data, hello, model, offer, outgoing

OPTIONS = {"data": ChannelOptions(messages=4, bytes=1 << 14, eager=2000), "manual": ChannelOptions(manual=True)}
MODEL = outgoing(model(1, 1000))
HEAD = MODEL.head


def test_a_flood_of_control_frames_takes_no_memory() -> None:
    """As aioquic#501. The session is not asked for output meanwhile, as if the peer did not read."""
    peer = Stranger(OPTIONS, hello={"channels": [[1, "data", 10, 1 << 20, 1 << 16]]})
    again = frame(FrameType.CHANNELS, head=cbor2.dumps({"channels": [[1, "data", 10, 1 << 20, 9]], "meta": {"a": 1}}))
    flood = (
        frame(FrameType.PING, payload=bytes(4096)) + frame(FrameType.PONG, payload=bytes(8)) + again
        + credit((0, 0, 1, 1), (1, 1, 1, 0)) + frame(FrameType.BLOCKED, channel=1)
        + frame(FrameType.RESET, channel=1, sequence=77) + frame(FrameType.ACCEPT, channel=1, sequence=77)
    ) * 100  # fmt: skip

    def state() -> int:
        session = peer.session
        return len(session.shared.control) + len(session.shared.dirty) + len(session._ping_sent) + len(session.events)

    peer.write(flood)
    peer.end.events.clear()
    before = state()
    tracemalloc.start()
    start = tracemalloc.get_traced_memory()[0]
    for _ in range(20):
        peer.write(flood)
        peer.end.events.clear()
    end = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert state() <= before + 1
    assert end - start < 50_000
    assert [one.kind for one in peer.read()].count(FrameType.PONG) == 1


def test_a_flood_of_offers_is_bounded_by_the_credit_and_the_budget() -> None:
    peer = Stranger({"data": ChannelOptions(messages=50)}, budget=MemoryBudget((1 << 20) + 1_000_000))
    peer.write(*(offer(number, 300_000) for number in range(50)))
    assert peer.end.budget.used == (1 << 20) + 900_000
    assert [one.kind for one in peer.read()] == [FrameType.ACCEPT] * 3
    assert "messages: 1 beyond the credit of 50" in broken_after(peer, offer(50, 1))
    assert peer.end.budget.used == peer.end.budget.fixed == 0


def broken_after(peer: Stranger, content: bytes) -> str:
    peer.write(content)
    return peer.error


@pytest.mark.parametrize("reset", [True, False])
def test_a_peer_that_does_not_listen_cannot_pile_up_answers(reset: bool) -> None:
    """As aioquic#501: what is discarded at once is no reason for more credit before that is told."""
    peer = Stranger(OPTIONS)
    sequence = 0
    while not peer.session.is_closed:
        peer.write(offer(sequence, 5000 if reset else 1 << 50))
        if reset:
            peer.write(frame(FrameType.RESET, channel=1, sequence=sequence))
        assert len(peer.session.shared.control) <= 5
        sequence += 1
    assert peer.error == "channel 'data', messages: 1 beyond the credit of 4"


@pytest.mark.parametrize("size", [1 << 26, 1 << 40, (1 << 64) - 1])
def test_a_declared_size_takes_no_memory_by_itself(size: int) -> None:
    peer = Stranger(OPTIONS)
    tracemalloc.start()
    peer.write(offer(0, size), offer(1, size, codec.encode(Note(1)).head))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100_000
    assert [one.kind for one in peer.read()].count(FrameType.REFUSE) == 2
    assert peer.end.grown() == 0
    assert peer.session.is_open


def test_a_head_whose_sizes_do_not_match_the_payload_refuses_that_message() -> None:
    peer = Stranger(OPTIONS)
    peer.write(data(1, 0, bytes(999), HEAD), data(1, 1, bytes(1000), HEAD), offer(2, 999, HEAD))
    assert len(peer.end.messages("data")) == 1
    errors = [str(event.error) for event in peer.end.of(events.MessageDiscarded)]
    assert errors == ["test/wire/model: 999 payload bytes, but its tensors have 1000"] * 2
    refused = [one for one in peer.read() if one.kind == FrameType.REFUSE]
    assert [one.sequence for one in refused] == [0, 2]


def test_a_refused_message_may_come_in_several_reads() -> None:
    peer = Stranger(OPTIONS)
    content = data(1, 0, bytes(1500), b"\xff")
    peer.write(content[:200], content[200:], data(1, 1, b"next"))
    assert len(peer.end.of(events.MessageDiscarded)) == 1
    assert peer.end.messages("data") == [b"next"]
    window = peer.session.receiver.channel(1).bytes
    assert window.received == window.consumed == 1505


@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_a_compressed_message_that_lies_is_refused_when_it_is_unpacked(name: str) -> None:
    honest = outgoing(model(1, 100_000), name)
    content = b"".join(honest.segments)
    for wrong in (bytes(len(content)), content[::-1]):
        peer = Stranger(OPTIONS)
        peer.end.collect = lambda: None  # type: ignore[method-assign]
        peer.write(offer(0, len(content), honest.head), data(1, 0, wrong))
        (arrived,) = [event for event in peer.session.take_events() if isinstance(event, events.Arrived)]
        assert arrived.packed is not None
        assert arrived.reserved == len(content) + 100_000
        with pytest.raises(CompressionError):
            unpack(*arrived.packed)
        peer.session.receiver.consumed(arrived)
        assert peer.end.grown() == 0
    bomb = codec.encode(model(1, 1 << 20)).packed(name, [memoryview(b"x" * 10)])
    peer = Stranger(OPTIONS)
    peer.write(offer(0, 10, bomb.head))
    assert "10 bytes cannot hold 1048576" in str(peer.end.of(events.MessageDiscarded)[0].error)
    small = outgoing(model(1, 10_000), name)
    peer.write(data(1, 1, b"".join(small.segments), small.head))
    assert "came without an offer" in peer.error, "its real size counts"


def test_unread_messages_stay_within_the_window_whatever_the_sender_does() -> None:
    """As nats.go#1163: the memory of a slow reader."""
    peer = Stranger({"data": ChannelOptions(messages=1000, bytes=1 << 14, eager=1000)})
    peer.end.reading = False
    sequence = 0
    while not peer.session.is_closed:
        peer.write(data(1, sequence, bytes(1000)))
        sequence += 1
    assert sum(len(message) for message in peer.end.messages("data")) <= 1 << 14
    assert peer.end.budget.peak == 1 << 14


# -------------------------------------------------------------------------------------------------------------- fuzz


def allowed(peer: Stranger) -> None:
    """Whatever came, the session is open, or has ended with an error for its user, and holds no more than it may."""
    budget = peer.end.budget
    assert budget.used <= budget.peak <= budget.total
    assert peer.end.grown() <= budget.total - (1 << 14)
    if peer.session.is_closed:
        assert isinstance(peer.end.closed.error, (ProtocolError, LinkClosed))
        peer.end.read(len(peer.end.unread))
        assert budget.used == budget.fixed == 0


@given(st.binary(max_size=300), st.booleans(), st.integers(1, 60))
def test_random_bytes_never_raise(content: bytes, opened: bool, size: int) -> None:
    peer = Stranger(OPTIONS, open=opened)
    if not opened:
        peer.write(preface())
    peer.write(content, sizes=[size])
    peer.session.pull()
    allowed(peer)


def test_random_openings_never_raise() -> None:
    chance = random.Random(1)
    for _ in range(300):
        peer = Stranger(OPTIONS, open=False)
        peer.write(chance.randbytes(100))
        assert "not a p2pml peer" in peer.error


kinds = st.sampled_from([int(kind) for kind in FrameType])
small = st.integers(0, 4)
heads = st.sampled_from(
    [b"", HEAD, codec.encode(Note(1)).head, b"\xff", outgoing(model(1, 5000), "lz4").head, bytes(2000)]
)
sizes = st.sampled_from([0, 1, 999, 1000, 2000, 5000, 70_000, 1 << 20, 1 << 40])
hostile = st.one_of(
    st.builds(data, small, small, sizes.filter(lambda size: size <= 70_000).map(bytes), heads, small),
    st.builds(offer, small, sizes, heads, small),
    st.builds(frame, kinds, small, small, small, heads, st.binary(max_size=60)),
    st.builds(lambda *entry: credit(entry), small, small, sizes, small),
    st.sampled_from(
        [hello(), frame(FrameType.CHANNELS, head=cbor2.dumps({"channels": [[1, "data", 9, 9999, 99]], "meta": {}}))]
    ),
)


@given(st.lists(hostile, max_size=25), st.lists(st.integers(1, 5000), min_size=1, max_size=3), st.booleans())
def test_random_frames_never_raise(content: list[bytes], pieces: list[int], reading: bool) -> None:
    peer = Stranger(
        OPTIONS, budget=MemoryBudget((1 << 21) + 1_000_000), hello={"channels": [[1, "data", 3, 5000, 100]]}
    )
    peer.end.reading = reading
    for size in (10, 3000, 200_000):
        peer.end.send("data", np.zeros(size, np.uint8).tobytes(), tracked=True)
    for one in content:
        peer.write(one, sizes=pieces)
        peer.session.pull()
    peer.session.tick(5.0)
    peer.session.pull()
    allowed(peer)
