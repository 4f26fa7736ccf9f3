"""Faults that others met in their networking code, of the layers below a socket: one test each, named after what went wrong."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from p2pml.errors import LinkClosed, MessageTooLarge, ProtocolError
from p2pml.wire import codec, events
from p2pml.wire.framing import MAX_PAYLOAD, SIZE, FrameType, frame, preface
from p2pml.wire.options import ChannelOptions
from p2pml.wire.outgoing import State
from tests.unit.wire.joined import HELLO, Joined, Model, Note, Stranger, data, join, model, read_frames

SMALL = ChannelOptions(messages=4, bytes=1 << 14, eager=2000)
CHUNKS = 5 * MAX_PAYLOAD


def one_way(joined: Joined, index: int, *, once: bool = False) -> None:
    """What one end has to say now arrives, and the other end says nothing."""
    joined.pull(index, once=once)
    joined.now += 1e-3
    joined.deliver(index, joined.now + 1)


# ---------------------------------------------------------------------------------------------------------- credits


def test_a_message_that_nobody_takes_gives_its_credit_back_when_it_is_discarded() -> None:
    """grpclib#67: a handler that never reads leaks its credit."""
    joined, left, right = join({"data": SMALL})
    unknown = codec.encode(Note(1)).head.replace(b"test/wire/note", b"test/wire/none")
    for _ in range(50):
        left.session.sender.send_small("data", unknown, bytes(1900))
        joined.settle()
    assert len(right.of(events.MessageDiscarded)) == 50
    inlet = right.session.receiver.channel(1)
    assert inlet.messages.consumed == inlet.messages.received == 50
    assert inlet.bytes.consumed == inlet.bytes.received
    assert left.session.sender.can_send("data", 1900)


def test_an_offer_its_reset_and_more_in_one_read() -> None:
    """grpclib#217: open, data and reset arrive in one read."""
    peer = Stranger({"data": SMALL})
    content = (
        data(1, 0, b"before")
        + frame(FrameType.OFFER, 0, 1, 1, b"", SIZE.pack(5000))
        + frame(FrameType.RESET, 0, 1, 1)
        + data(1, 2, b"after")
        + frame(FrameType.PING, payload=bytes(8))
    )
    peer.write(content)
    assert peer.end.messages("data") == [b"before", b"after"]
    assert peer.end.grown() == 0
    inlet = peer.session.receiver.channel(1)
    assert inlet.messages.received == inlet.messages.consumed == 3


@pytest.mark.parametrize("arrives", [0, 1, 2, 3])
def test_what_was_under_way_when_a_send_was_cancelled_is_credited(arrives: int) -> None:
    """quiche#1320: data in flight after a cancel goes uncredited."""
    joined, left, right = join({"data": SMALL})
    message = left.send("data", bytes(CHUNKS), owner="it")
    one_way(joined, 0)
    one_way(joined, 1)
    for _ in range(arrives):
        joined.pull(0, once=True)
    assert message.state is (State.SENDING if arrives else State.ACCEPTED)
    assert left.session.sender.cancel("it")
    assert not left.session.sender.cancel("it")
    left.send("data", b"next")
    joined.settle()
    assert right.messages("data") == [b"next"]
    assert right.grown() == 0
    inlet = right.session.receiver.channel(1)
    for window in (inlet.messages, inlet.bytes, right.session.receiver.link):
        assert window.received == window.consumed


def test_both_sides_send_more_than_their_window_at_once_from_the_task_that_reads() -> None:
    """fedimint#9091: both send more than the window, and sending and receiving share a task."""
    joined, left, right = join({"data": SMALL})
    for end in (left, right):
        end.reading = False
        for number in range(40):
            end.send("data", Note(number, "x" * 1500))
        end.send("data", bytes(1_000_000))
    joined.settle()
    while left.unread or right.unread:  # each reads one, and only when it has nothing more to write
        left.read(1)
        right.read(1)
        joined.settle()
    for end in (left, right):
        assert [note.number for note in end.messages("data")[:-1]] == list(range(40))
        assert len(end.messages("data")[-1]) == 1_000_000


def test_bytes_are_taken_in_while_an_answer_of_this_side_is_unsent() -> None:
    """rust-yamux#227: reads pause while a control reply is unsent."""
    peer = Stranger({"data": SMALL})
    for number in range(4):
        peer.write(frame(FrameType.PING, payload=SIZE.pack(number)), data(1, number, b"x"))
    assert len(peer.end.messages("data")) == 4
    pongs = [one for one in peer.read() if one.kind == FrameType.PONG]
    assert [one.payload for one in pongs] == [SIZE.pack(3)], "only the last is worth an answer"


def test_less_than_half_a_window_is_given_back_to_who_waits_for_it() -> None:
    """linkerd#1013: credit is returned only after half a window while the sender needs less to finish."""
    joined, left, right = join({"data": ChannelOptions(messages=8, bytes=1 << 14, eager=8000)})
    right.reading = False
    for _ in range(8):
        left.send("data", bytes(1900))
    last = left.send("data", bytes(2000))
    joined.settle()
    assert last.state is State.WAITING
    right.read(1)  # an eighth of the window of messages, and less of that of bytes
    joined.settle()
    assert last.state is State.SENT


def test_credit_that_was_read_before_the_sender_waited_is_given_back_when_it_says_so() -> None:
    """linkerd#1013, in the other order."""
    joined, left, right = join({"data": ChannelOptions(messages=8)})
    right.reading = False
    for _ in range(8):
        left.send("data", b"x")
    joined.settle()
    right.read(1)
    joined.settle()
    outlet = left.session.sender.channel("data")
    assert outlet is not None
    assert outlet.messages.available == 0
    left.send("data", b"x")
    joined.settle()
    assert len(right.arrived) == 9


def test_credit_of_the_link_alone_wakes_a_sender() -> None:
    """grpclib#43: wake-up on channel credit but not on connection credit."""
    joined, left, right = join({"data": SMALL})
    left.session.sender.link.charge(left.session.sender.link.available)
    small, large = left.send("data", b"small"), left.send("data", model(1, 5000))
    joined.settle()
    assert small.state is large.state is State.WAITING
    right.session.receiver.link.limit += 1 << 20
    right.session.receiver.link.size += 1 << 20
    right.session.shared.dirty[0] = None
    joined.settle()
    assert len(right.messages("data")) == 2


def test_a_channel_that_nobody_reads_takes_nothing_from_the_others() -> None:
    """curl#16955: one slow channel eats the shared window."""
    joined, left, right = join({"slow": SMALL, "quick": SMALL})
    right.reading = False
    for _ in range(100):
        left.send("slow", bytes(2000))
    joined.settle()
    for number in range(50):
        left.send("quick", number.to_bytes(2, "big") + bytes(1900))
        joined.settle()
        for arrived in [event for event in right.unread if event.channel == "quick"]:
            right.unread.remove(arrived)
            right.session.receiver.consumed(arrived)
    assert len(right.messages("quick")) == 50
    assert len(right.messages("slow")) == 4


def test_limits_grow_by_what_was_consumed_and_not_by_what_came() -> None:
    """aioquic#589: limits grow from the highest offset seen."""
    joined, left, right = join({"data": SMALL})
    right.reading = False
    inlet = right.session.receiver.channel(1)
    limits = (inlet.messages.limit, inlet.bytes.limit, right.session.receiver.link.limit)
    for _ in range(20):
        left.send("data", bytes(2000))
    joined.run(1.0)
    assert (inlet.messages.limit, inlet.bytes.limit, right.session.receiver.link.limit) == limits


def test_what_is_received_and_what_is_given_back_are_counted_by_one_formula() -> None:
    """nats.py#372: counters that add and subtract by different formulas."""
    joined, left, right = join({"data": SMALL})
    contents = [b"", b"raw", bytes(3000), Note(1, "x"), model(1), model(2, 0), model(3, 500, 0, 20), model(4, 9000)]
    for content in contents:
        left.send("data", content)
        left.send("data", content, "zstd" if not isinstance(content, bytes) else None)
    joined.run(0.2).settle()
    assert len(right.messages("data")) == 2 * len(contents)
    outlet, inlet = left.session.sender.channel("data"), right.session.receiver.channel(1)
    assert outlet is not None
    for sent, window in (
        (outlet.messages, inlet.messages), (outlet.bytes, inlet.bytes), (left.session.sender.link, right.session.receiver.link),
    ):  # fmt: skip
        assert sent.sent == window.received == window.consumed
    assert right.grown() == 0


# ------------------------------------------------------------------------------------------------------ cancellation


def test_a_fragment_in_the_same_read_as_the_reset_of_its_message() -> None:
    """A fragment in the same tick as a cancelled receive."""
    peer = Stranger({"data": SMALL})
    peer.write(frame(FrameType.OFFER, 0, 1, 0, b"", SIZE.pack(5000)))
    part = data(1, 0, bytes(2500), flags=1)
    peer.write(part[:1000])
    peer.write(part[1000:] + frame(FrameType.RESET, 0, 1, 0) + data(1, 1, b"next"))
    assert peer.end.messages("data") == [b"next"]
    assert peer.end.grown() == 0
    peer.write(data(1, 0, bytes(2500), flags=2))
    assert "message 0 came where 2 was due" in peer.error or "in pieces" in peer.error


@pytest.mark.parametrize("chunks", range(6))
def test_a_cancelled_send_never_tears_a_frame(chunks: int) -> None:
    """aiohttp#11725: a cancelled send tears a frame."""
    peer = Stranger({"data": SMALL}, hello={"channels": [[1, "data", 10, 1 << 20, 100]]})
    peer.end.send("data", bytes(CHUNKS), owner="it")
    peer.write(frame(FrameType.ACCEPT, channel=1))
    stream = b"".join(b"".join(peer.session.pull()) for _ in range(chunks))
    cancelled = peer.session.sender.cancel("it")
    peer.end.send("data", b"next")
    frames = [*read_frames(stream), *peer.read()]
    assert frames[-1].payload == b"next"
    assert (frames[-2].kind == FrameType.RESET) == cancelled == (chunks < 6 and frames[-2].flags & 2 == 0)
    assert peer.session.sender.busy == []


def test_the_answer_to_a_cancelled_offer_that_crosses_the_cancel() -> None:
    """ACCEPT and REFUSE that were under way when the sender took the message back."""
    joined, left, right = join({"data": SMALL})
    left.send("data", bytes(5000), owner="accepted")
    one_way(joined, 0)
    left.session.sender.cancel("accepted")
    joined.settle()
    left.send("data", codec_of_unknown(), owner="refused")
    one_way(joined, 0)
    left.session.sender.cancel("refused")
    left.send("data", b"next")
    joined.settle()
    assert right.messages("data") == [b"next"]
    assert not left.of(events.MessageFailed)
    assert right.grown() == 0


def codec_of_unknown() -> bytes:
    return bytes(1 << 27)  # more than its memory: it will be refused


def test_the_place_of_a_cancelled_message_is_let_go() -> None:
    """A message that was cancelled halfway must not keep, or write into, its receiver's memory."""
    places = [np.zeros(CHUNKS, np.uint8)]
    gone = weakref.ref(places[0])
    joined, left, right = join({"data": SMALL}, right={"place": lambda channel, head: [places.pop()]})
    left.send("data", model(1, CHUNKS), owner="it")
    one_way(joined, 0)
    one_way(joined, 1)
    one_way(joined, 0, once=True)
    left.session.sender.cancel("it")
    joined.settle()
    gc.collect()
    assert gone() is None
    assert not right.arrived


# -------------------------------------------------------------------------------------------------------------- frames


def test_control_and_other_channels_between_the_fragments_of_a_message() -> None:
    """websockets#542: other sends, and a ping, between fragments."""
    peer = Stranger({"data": SMALL, "other": SMALL})
    content = np.random.default_rng(0).bytes(5000)
    peer.write(frame(FrameType.OFFER, 0, 1, 0, b"", SIZE.pack(5000)))
    for start in range(0, 5000, 1000):
        flags = (1 if not start else 0) | (2 if start == 4000 else 0)
        peer.write(data(1, 0, content[start : start + 1000], flags=flags))
        if start < 4000:
            peer.write(frame(FrameType.PING, payload=bytes(8)), data(2, start // 1000, b"between"))
    assert peer.end.messages("data") == [content]
    assert peer.end.messages("other") == [b"between"] * 4


def test_an_oversize_message_is_refused_locally_and_the_link_stays() -> None:
    """rocicorp/mono PR#5982: an oversize message closes the link, and is sent again after every reconnect."""
    joined, left, right = join({"data": SMALL}, right={"max_message": 10_000})
    with pytest.raises(MessageTooLarge):
        left.send("data", model(1, 10_000))
    left.send("data", b"next")
    joined.settle()
    assert right.messages("data") == [b"next"]


def test_empty_tensors_and_tensors_without_dimensions() -> None:
    """hivemind#478."""
    joined, left, right = join({"data": SMALL})
    empty = {"empty": np.empty((0, 3)), "scalar": np.float32(3.5).reshape(()), "none": np.empty(0)}
    for tensors in (empty, {**empty, "full": np.ones(2000)}):
        left.send("data", Model(1, tensors))
    joined.settle()
    for message in right.messages("data"):
        assert message.tensors["empty"].shape == (0, 3)
        assert message.tensors["scalar"].numpy() == np.float32(3.5)
        assert message.tensors["scalar"].shape == ()


def test_received_tensors_do_not_keep_each_others_memory() -> None:
    """distributed PR#8308: tensors that share one receive buffer pin each other."""
    joined, left, right = join({"data": ChannelOptions()})
    left.send("data", model(1, 100_000, 100_000))
    left.send("data", model(2, 100, 100))
    joined.settle()
    for message in right.messages("data"):
        memory = [np.asarray(tensor.numpy()).base for tensor in message.tensors.values()]
        first, second = (np.frombuffer(tensor.data, np.uint8) for tensor in message.tensors.values())
        assert not np.shares_memory(first, second)
        assert all(len(tensor.data.obj) == tensor.nbytes for tensor in message.tensors.values())
        assert len(memory) == 2


def test_no_view_of_the_reading_memory_is_kept() -> None:
    """cpython#146379: reuse of a buffer that is still viewed gives BufferError, or another message's bytes."""
    joined, left, right = join({"data": SMALL})
    for number in range(4):
        left.send("data", bytes([number]) * 500)
        left.send("data", model(number, 500))
        joined.settle()
    for number in range(4):
        raw, typed = right.messages("data")[2 * number : 2 * number + 2]
        assert raw == bytes([number]) * 500
        assert bytes(typed.tensors["t0"].data) == bytes([number]) * 500


# ------------------------------------------------------------------------------------------------------------ liveness


def test_whoever_waits_hears_of_a_vanished_peer_within_the_timeout() -> None:
    """websockets#112: the peer vanishes, and recv, send and close wait minutes."""
    joined, left, _ = join({"data": SMALL})
    sent = left.send("data", b"sent", tracked=True)
    waiting = left.send("data", bytes(100_000))
    joined.broken = [True, True]
    joined.run(13.0)
    assert {event.outgoing for event in left.of(events.MessageFailed)} == {sent, waiting}
    assert all(type(event.error) is LinkClosed for event in left.of(events.MessageFailed))


def test_a_big_transfer_does_not_starve_pings() -> None:
    """websockets#1005. The pong waits behind a transfer that takes longer than the timeout; its bytes are life."""
    peer = Stranger({"data": ChannelOptions()}, timeout=5.0)
    peer.write(frame(FrameType.OFFER, 0, 1, 0, b"", SIZE.pack(100 * 1000)))
    for number in range(100):
        peer.write(data(1, 0, bytes(1000), flags=(not number) | 2 * (number == 99)))
        peer.now += 1.0
        peer.session.tick(peer.now)
        assert peer.session.is_open
    assert len(peer.end.messages("data")) == 1
    pings = [one for one in peer.read() if one.kind == FrameType.PING]
    assert len(pings) == 34, "every 2.5 s, as often as there was a tick"


def test_a_new_link_begins_with_a_preface_and_not_with_half_a_frame() -> None:
    """nats.go#86: half a frame is replayed on the new link."""
    content = preface() + frame(FrameType.HELLO, head=codec.plain_dumps(HELLO)) + frame(FrameType.CREDIT)
    for start in range(1, len(content)):
        peer = Stranger({"data": SMALL}, open=False)
        peer.write(content[start:])
        peer.session.eof_received(1.0)
        peer.end.collect()
        assert isinstance(peer.end.closed.error, (ProtocolError, LinkClosed))
        assert not peer.session.is_open
