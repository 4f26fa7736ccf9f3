"""What is under way between the machines of a `tests.driver.Cluster`: messages, credit, and the ends of links."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from p2pml import statemachine as sm
from p2pml.errors import MessageError
from p2pml.wire import codec
from p2pml.wire.options import ChannelOptions
from tests.driver_peers import Peer, show

if TYPE_CHECKING:
    from tests.driver import Cluster

GOODBYE = 1.0
"""Seconds in which the last messages of a finished machine may still wait for credit."""
SHUT = ChannelOptions(manual=True)
Memory = Literal["checked", "late", "early"]


class MemoryReused(AssertionError):
    """A tensor changed between its `Send` and the time when its bytes had left."""


class Parcel:
    """One message under way, and the memory that it leaves and arrives in."""

    def __init__(self, send: sm.Send, wire: bool, memory: Memory) -> None:
        self.message, self.tag, self.key = send.message, send.tag, send.supersedes
        self.buffers: list[memoryview] = []
        self.head: codec.Head | None = None
        self.sources: list[memoryview] = []
        self.original: list[bytes] | None = None
        if wire:
            encoded = codec.encode(send.message)
            self.head = codec.decode_head(encoded.head, max_message=1 << 40)
            copies = list(map(bytes, encoded.segments)) if memory != "late" else []
            self.sources = [memoryview(copy) for copy in copies] if memory == "early" else encoded.segments
            self.original = copies if memory == "checked" else None

    def take_memory(self, placed: Iterable[Any] | None, rng: random.Random) -> None:
        """Receive into `placed`, if given, or into fresh memory; a part comes at once."""
        sizes = list(map(len, self.sources))
        if placed is None:
            self.buffers = [memoryview(bytearray(size)) for size in sizes]
        else:
            self.buffers = [memoryview(buffer).cast("B") for buffer in placed]
            if list(map(len, self.buffers)) != sizes or any(buffer.readonly for buffer in self.buffers):
                raise ValueError(f"it is not writable memory of {sizes} bytes")
        self._receive([rng.randint(0, size) for size in sizes])

    def arrive(self) -> Any:
        """The whole message."""
        if self.head is None:
            return self.message
        if self.original is not None and any(map(memoryview.__ne__, self.sources, self.original)):
            raise MemoryReused(f"a tensor of {show(self.message)} changed after its Send, before it was sent")
        self._receive(list(map(len, self.sources)))
        return codec.build(self.head, self.buffers)

    def _receive(self, sizes: list[int]) -> None:
        for target, source, size in zip(self.buffers, self.sources, sizes, strict=True):
            target[:size] = source[:size]


class Flow:
    """The messages of one sender to one receiver on one channel, and the credit that comes back."""

    def __init__(self, way: Way, channel: str) -> None:
        self.way, self.channel = way, channel
        self.options = way.receiver.machine.channels.get(channel, SHUT)
        self.credit = 0 if self.options.manual else self.options.messages
        self.waiting: deque[Parcel] = deque()
        self.under_way: deque[Parcel] = deque()
        self.returning: deque[int | Parcel] = deque()

    def leave(self) -> bool:
        """The first waiting message, if it has credit, takes memory at the receiver and starts."""
        way, cluster = self.way, self.way.cluster
        if not self.waiting or self.credit <= 0 or way.receiver.members.get(way.sender.name) is not way:
            return False
        parcel = self.waiting.popleft()
        self.credit -= 1
        try:
            parcel.take_memory(self._place(parcel), cluster.rng)
        except MessageError as error:
            self.come_back(1)
            way.failed(parcel, f"refused: {error}")
        except Exception as error:
            cluster.fail(way.receiver, error, f"its place for {show(parcel.message)}")
        else:
            self.under_way.append(parcel)
            cluster.wake(self.arrive)
        return True

    def _place(self, parcel: Parcel) -> Any:
        """Large messages are always placed; small ones sometimes, as a machine must cope with both."""
        machine, head = self.way.receiver.machine, parcel.head
        method = machine._places.get(head.type) if head is not None and head.specs else None
        if method is None or head is None or machine.finished:
            return None
        if head.wire_size <= self.options.eager and self.way.cluster.rng.random() < 0.5:
            return None
        return getattr(machine, method)(self.way.sender.name, head)

    def arrive(self) -> bool:
        if not self.under_way:
            return False
        parcel, way = self.under_way.popleft(), self.way
        message = parcel.arrive()
        if parcel.tag is not None:
            way.sender.feed(sm.Sent(parcel.tag))
            if way.sender.machine.handles(sm.Delivered):
                self.come_back(parcel)
        event = sm.Received(way.sender.name, message, self.channel)
        if not self.options.manual:
            way.receiver.unread[id(event)] = partial(self.come_back, 1)
        way.cluster.handle(way.receiver, event)
        way.receiver.unread.pop(id(event), _nothing)()
        if way.closing is not None:
            way.cluster.wake(way.end)
        return True

    def come_back(self, what: int | Parcel) -> None:
        """Credit, or a message's acknowledgement, for the sender."""
        if self.way.closing is None or self.way.last_words:
            self.returning.append(what)
            self.way.cluster.wake(self.come)

    def come(self) -> bool:
        if not self.returning:
            return False
        what, sender, receiver = self.returning.popleft(), self.way.sender, self.way.receiver
        if isinstance(what, Parcel):
            sender.feed(sm.Delivered(receiver.name, what.tag))
        else:
            self.credit += what
            if self.credit == what:
                sender.feed(sm.CreditGranted(receiver.name, self.channel))
            self.way.cluster.wake(self.leave)
        return True


def _nothing() -> None:
    """What is called where no credit goes back, or a computation gives it back later."""


class Way:
    """One direction of a link. While it closes, what is under way arrives, and then `PeerLeft` does."""

    def __init__(self, cluster: Cluster, sender: Peer, receiver: Peer) -> None:
        self.cluster, self.sender, self.receiver = cluster, sender, receiver
        self.flows: dict[str, Flow] = {}
        self.closing: str | None = None
        self.last_words = False
        self.deadline = 0.0

    def flow(self, channel: str) -> Flow:
        if channel not in self.flows:
            self.flows[channel] = Flow(self, channel)
        return self.flows[channel]

    def failed(self, parcel: Parcel, reason: str) -> None:
        if parcel.tag is not None:
            self.sender.feed(sm.SendFailed(self.receiver.name, parcel.tag, reason))
            parcel.tag = None

    def close(self, reason: str, last_words: bool) -> None:
        """Close it: after `last_words`, all that waits; or cut it, so that of each channel a random part is lost."""
        if self.closing is not None and (last_words or not self.last_words):
            return
        self.closing, self.last_words = reason, last_words
        self.deadline = self.cluster.now + GOODBYE
        for flow in [] if last_words else self.flows.values():
            kept = self.cluster.rng.randint(0, len(flow.under_way))
            unsettled = [parcel for parcel in flow.returning if isinstance(parcel, Parcel)]
            for parcel in [*unsettled, *flow.under_way, *flow.waiting]:
                self.failed(parcel, reason)
            flow.under_way = deque(list(flow.under_way)[:kept])
            flow.waiting.clear()
            flow.returning.clear()
        self.cluster.wake(self.end)
        if any(flow.waiting for flow in self.flows.values()):
            self.cluster.at(self.deadline, partial(self.cluster.wake, self.end))

    def end(self) -> bool:
        late = self.cluster.now >= self.deadline
        if self.closing is None or any(flow.under_way or (flow.waiting and not late) for flow in self.flows.values()):
            return False
        return self.cluster.unlink(self)
