"""Messages between two sessions: of any size and sort, refused ones, and those with a place given for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from p2pml.errors import (
    MessageError,
    MessageRefused,
    MessageTooLarge,
)
from p2pml.wire import codec, events
from p2pml.wire.credits import MemoryBudget
from p2pml.wire.framing import MAX_PAYLOAD, FrameType
from p2pml.wire.options import ChannelOptions
from p2pml.wire.outgoing import State
from tests.unit.wire.joined import Model, Note, Stranger, Strict, join, model

SMALL = ChannelOptions(messages=4, bytes=1 << 14, eager=1000)


@pytest.mark.parametrize("size", [0, 1, 1000, 65_536, 65_537, MAX_PAYLOAD, MAX_PAYLOAD + 1, 1_000_000])
@pytest.mark.parametrize("make", [bytes, lambda size: model(1, size), lambda size: model(1, 0, size // 2, 0, 7)])
def test_a_message_of_any_size_arrives(size: int, make: Callable[[int], Any]) -> None:
    joined, left, right = join(sizes=[7, 60_000, 3000])
    sent = make(size)
    left.send("data", sent, tracked=True)
    joined.run(0.1).settle()
    (arrived,) = right.messages("data")
    if isinstance(sent, Model):
        for name, tensor in arrived.tensors.items():
            np.testing.assert_array_equal(tensor.numpy(), sent.tensors[name])
    else:
        assert arrived == sent
    assert len(left.of(events.MessageDelivered)) == 1
    assert len(left.sent) == 1
    assert left.sent[0].state is State.DELIVERED
    assert right.grown() == 0


@pytest.mark.parametrize("eager", [0, 1 << 16, 1 << 20])
@pytest.mark.parametrize("window", [1 << 14, 1 << 21])
def test_no_size_between_eager_and_window_is_stuck(eager: int, window: int) -> None:
    """What is larger than the window, or than a frame, is offered whatever `eager` says."""
    joined, left, right = join({"data": ChannelOptions(bytes=window, eager=eager)})
    sizes = [10, 16_000, 16_384, 16_385, 65_000, 262_144, 262_145, 500_000]
    for size in sizes:
        left.send("data", bytes(size))
        left.send("data", model(size, size))
    joined.run(0.2).settle()
    assert [len(message) for message in right.messages("data")[::2]] == sizes
    assert [message.number for message in right.messages("data")[1::2]] == sizes


@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_compressed_messages_arrive_and_their_memory_is_given_back(name: str) -> None:
    joined, left, right = join()
    right.reading = False
    message = model(5, 3000, 200_000, 0)
    sent = left.send("data", message, name)
    assert sent.packed
    assert sent.size < 3000
    joined.settle()
    arrived = right.arrived[0]
    for key, tensor in arrived.message.tensors.items():
        np.testing.assert_array_equal(tensor.numpy(), message.tensors[key])
    assert right.grown() == sent.size + 203_000, "both what came and what comes of it"
    right.read(1)
    assert right.grown() == 0


def test_a_small_message_is_copied_and_one_without_credit_is_declined() -> None:
    joined, left, right = join({"data": ChannelOptions(messages=2), "manual": ChannelOptions(manual=True)})
    right.reading = False
    sender, content = left.session.sender, bytearray(b"first")
    assert sender.send_small("data", b"", content)  # type: ignore[arg-type]
    content[:] = b"other"
    assert sender.send_small("data", codec.encode(Note(7)).head, b"")
    for name in ("data", "manual", "unknown"):
        assert not sender.send_small(name, b"", b"x")
        assert not sender.can_send(name, 1)
    joined.settle()
    assert right.messages("data") == [b"first", Note(7)]
    assert isinstance(right.messages("data")[0], bytes)
    right.read(2)
    joined.settle()
    assert sender.can_send("data", 1)
    assert sender.can_send("data", 1 << 30), "a large one needs credit for one message"
    left.send("data", bytes(100_000))
    assert not sender.send_small("data", b"", b"x"), "it would overtake"
    assert not sender.can_send("data", 1)


def test_the_offer_of_a_message_never_passes_small_ones_before_it() -> None:
    joined, left, right = join()
    sender = left.session.sender
    assert sender.send_small("data", b"", b"0")
    left.send("data", bytes(70_000))
    cancelled = left.send("data", bytes(70_001))
    cancelled.owner = cancelled
    joined.settle()
    assert [len(message) for message in right.messages("data")] == [1, 70_000, 70_001]
    lost = left.send("data", bytes(70_002), owner="lost")
    assert lost.state is State.OFFERED
    assert sender.cancel("lost")
    if not sender.send_small("data", b"", b"1"):
        left.send("data", b"1")
    joined.settle()
    assert right.messages("data")[3:] == [b"1"]
    assert right.grown() == 0


def test_messages_of_one_channel_keep_their_order_whatever_their_size() -> None:
    joined, left, right = join({"data": ChannelOptions(messages=3, eager=1000, bytes=1 << 14)})
    sizes = [10, 5000, 20, 30, 300_000, 40, 5000, 5000, 50, 15_000]
    for number, size in enumerate(sizes):
        left.send("data", number.to_bytes(2, "big") + bytes(size))
    joined.run(0.2).settle()
    assert [int.from_bytes(message[:2], "big") for message in right.messages("data")] == list(range(len(sizes)))


def test_message_numbers_and_acknowledgements_wrap_around() -> None:
    joined, left, right = join({"data": ChannelOptions(eager=1000)})
    outlet = left.session.sender.channel("data")
    assert outlet is not None
    inlet = right.session.receiver.channel(outlet.id)
    outlet.next = inlet.introduced = inlet.told = (1 << 32) - 3
    for number in range(8):
        left.send("data", bytes(100 if number % 2 else 5000), tracked=True)
    joined.run(0.1).settle()
    assert len(right.messages("data")) == 8
    assert len(left.of(events.MessageDelivered)) == 8
    assert inlet.complete == outlet.next == (1 << 32) + 5


def test_superseding_drops_only_what_waits_under_the_same_key() -> None:
    joined, left, right = join({"data": ChannelOptions(manual=True)})
    sender = left.session.sender
    sender.supersede("data", "a")
    sender.supersede("unknown", "a")
    first, other, second = (left.send("data", Note(n), key=key) for n, key in ((1, "a"), (2, "b"), (3, "a")))
    sender.supersede("data", "a")
    left.collect()
    assert [event.outgoing for event in left.of(events.MessageFailed)] == [first, second]
    assert "superseded" in str(left.of(events.MessageFailed)[0].error)
    left.send("data", Note(4), key="a")
    right.session.receiver.grant("data", 5)
    joined.settle()
    assert right.messages("data") == [Note(2), Note(4)]
    assert other.state is State.SENT


def test_figures_of_a_channel_can_be_asked_for() -> None:
    _, left, _ = join()
    outlet = left.session.sender.channel("data")
    assert outlet is not None
    assert outlet.messages.available == ChannelOptions().messages
    assert left.session.sender.channel("unknown") is None
    preferred = ChannelOptions(priority=0, weight=7)
    left.session.sender.prefer("data", preferred)
    assert (outlet.priority, outlet.weight) == (0, 7)


# -------------------------------------------------------------------------------------------------------- refusals


def test_a_message_larger_than_the_peer_takes_is_refused_before_anything_is_sent() -> None:
    joined, left, right = join(right={"max_message": 1000})
    before = left.session.bytes_out
    with pytest.raises(MessageTooLarge, match="a message of 1001 bytes: the peer takes at most 1000"):
        left.send("data", bytes(1001))
    with pytest.raises(MessageTooLarge, match="the peer takes at most 1000"):
        left.send("data", model(1, 100_000), "zstd")  # what counts is the uncompressed size
    assert not left.session.sender.send_small("data", b"", bytes(1001))
    assert not left.session.sender.busy
    assert left.session.bytes_out == before
    left.send("data", bytes(1000))
    joined.settle()
    assert right.messages("data") == [bytes(1000)]


def test_what_does_not_fit_the_receivers_memory_is_refused_and_the_link_goes_on() -> None:
    joined, left, right = join(right={"budget": MemoryBudget((1 << 20) + 200_000)})
    left.send("data", bytes(200_001), owner="large")
    left.send("data", bytes(200_000))
    joined.settle()
    (failed,) = left.of(events.MessageFailed)
    assert isinstance(failed.error, MessageRefused)
    assert "200001 bytes do not fit this peer's receive memory" in str(failed.error)
    assert isinstance(right.of(events.MessageDiscarded)[0].error, MessageTooLarge)
    assert right.messages("data") == [bytes(200_000)]


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("size", [10, 70_000])
def test_a_message_that_its_class_refuses_is_reported_on_both_sides(tracked: bool, size: int) -> None:
    joined, left, right = join()
    refused = Strict(1, np.zeros(size, np.uint8))
    refused.number = -1
    left.send("data", refused, tracked=tracked)
    left.send("data", Note(2))
    joined.settle()
    assert right.messages("data") == [Note(2)]
    assert "the number is negative" in str(right.of(events.MessageDiscarded)[0].error)
    told = left.of(events.MessageFailed) if tracked else left.of(events.MessageDiscarded)
    assert isinstance(told[0].error, MessageRefused)
    assert "the number is negative" in str(told[0].error)
    assert right.grown() == 0


def test_memory_that_the_system_does_not_have_refuses_that_message_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    joined, left, right = join()
    monkeypatch.setattr("p2pml.wire.incoming.allocate", lambda size: (_ for _ in ()).throw(MemoryError))
    left.send("data", bytes(100_000), tracked=True)
    left.send("data", b"small")
    joined.settle()
    assert "no memory for a message of 100000 bytes" in str(left.of(events.MessageFailed)[0].error)
    assert right.messages("data") == [b"small"]
    assert right.grown() == 0


# ---------------------------------------------------------------------------------------------------------- places


def placing(*places: Any) -> dict[str, Any]:
    return {"place": lambda channel, head: list(places) if channel == "data" and head.type is Model else None}


def test_an_offered_message_is_received_into_the_memory_that_its_receiver_gave() -> None:
    places = [np.zeros(300_000, np.uint8), np.zeros((0, 4), np.float32), np.zeros((10, 25), np.float32)]
    joined, left, right = join(right=placing(*places))
    sent = Model(1, {"a": np.arange(300_000).astype(np.uint8), "b": places[1], "c": np.ones((10, 25), np.float32)})
    left.send("data", sent)
    left.send("data", Strict(2, np.zeros(70_000)))
    joined.settle()
    message, other = right.messages("data")
    for place, tensor in zip(places, message.tensors.values(), strict=True):
        assert not place.size or np.shares_memory(place, tensor.numpy())
    for place, array in zip(places, sent.tensors.values(), strict=True):
        np.testing.assert_array_equal(place, array)
    assert other.values.nbytes == 560_000
    assert right.budget.peak - right.budget.fixed == 560_000, "given memory is not taken from the budget"


@pytest.mark.parametrize(
    "places",
    [
        [],
        [np.zeros(99_999, np.uint8)],
        [np.zeros(100_000, np.uint8), b""],
        [bytes(100_000)],
        [np.zeros((2, 100_000), np.uint8)[:, ::2]],
        [np.zeros(200_000, np.uint8)[::2]],
    ],
)
def test_memory_that_does_not_fit_the_message_refuses_it(places: list[Any]) -> None:
    joined, left, right = join(right=placing(*places))
    left.send("data", model(1, 100_000))
    joined.settle()
    (failed,) = left.of(events.MessageFailed)
    assert "the place for it is not writable, contiguous memory of [100000] bytes" in str(failed.error)
    assert right.messages("data") == []


def test_a_place_may_refuse_a_message_by_an_error_of_messages() -> None:
    def place(channel: str, head: codec.Head) -> Any:
        raise MessageError(f"{channel}: no {head.kind} now")

    joined, left, _ = join(right={"place": place})
    left.send("data", model(1, 100_000))
    joined.settle()
    assert "data: no test/wire/model now" in str(left.of(events.MessageFailed)[0].error)


def test_compressed_messages_are_not_placed() -> None:
    joined, left, right = join(right=placing(np.zeros(100_000, np.uint8)))
    left.send("data", model(1, 100_000), "lz4")
    joined.settle()
    assert right.arrived[0].packed is not None
    assert right.messages("data")[0].tensors["t0"].nbytes == 100_000


def test_what_fits_no_frame_is_offered_even_to_a_peer_that_would_take_it_at_once() -> None:
    peer = Stranger(hello={"channels": [[1, "data", 10, 1 << 23, 1 << 23]], "link": 1 << 23})
    whole, larger = peer.end.send("data", bytes(MAX_PAYLOAD)), peer.end.send("data", bytes(MAX_PAYLOAD + 1))
    kinds = [(one.kind, len(one.payload)) for one in peer.read()]
    assert kinds == [(FrameType.DATA, MAX_PAYLOAD), (FrameType.OFFER, 8)]
    assert (whole.state, larger.state) == (State.SENT, State.OFFERED)
