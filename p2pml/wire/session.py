"""A link's protocol without I/O: handshake, channels, credits, acknowledgements, heartbeats.

The owner gives it bytes (`get_buffer`, `buffer_updated`, `eof_received`), time (`tick`, at `deadline`) and messages
(`sender.send`), and takes from it bytes (`pull`, when the transport can write) and events (`events`, a list to empty after
every call). It never raises for what the other side does: it says goodbye, tells `Closed`, and ignores the rest.

The dialer opens with its preface, the listener answers with its own; then each says HELLO, the dialer first. The listener's
HELLO says that it takes the dialer, and the dialer's first CREDIT that it takes the listener: then the session is open.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from p2pml.errors import DuplicateLink, HandshakeRefused, LinkClosed, P2PMLError, ProtocolError
from p2pml.wire import events
from p2pml.wire.credits import MemoryBudget
from p2pml.wire.framing import (
    MAX_CONTROL,
    SIZE,
    FrameReader,
    FrameType,
    frame,
    preface,
    read_preface,
    slice_for,
)
from p2pml.wire.hello import SessionOptions, channels_head, hello_head, read_channels, read_hello, read_map, read_meta
from p2pml.wire.incoming import Place
from p2pml.wire.measure import LinkMeter
from p2pml.wire.options import ChannelOptions
from p2pml.wire.outgoing import Outgoing, join_small
from p2pml.wire.receiver import Receiver
from p2pml.wire.sender import Sender
from p2pml.wire.shared import Shared

LIMITS = struct.Struct("<IQQQ")
"""An entry of a CREDIT frame: channel, message limit, byte limit, messages complete. For channel 0, the link: 0, byte limit,
bytes received."""
REPORT_EVERY = 1 << 20
"""Bytes received after which the sender is told how many, so that it can measure the link."""
PINGS_REMEMBERED = 8

CLOSE, BROKEN, REFUSED, RETRY, DUPLICATE = range(5)
"""What a GOAWAY says: an orderly end; the other side broke the protocol; don't come back; come back later; use the other link."""


class Session:
    """One end of a link. `dialer` is the side that connected; `place` says where large messages go (see `incoming`)."""

    def __init__(
        self,
        options: SessionOptions,
        channels: Mapping[str, ChannelOptions],
        budget: MemoryBudget,
        *,
        dialer: bool,
        now: float,
        place: Place | None = None,
    ) -> None:
        self.options = options
        self.dialer = dialer
        self.hello: events.Hello | None = None
        self.meta: dict[str, Any] = {}
        self.meter = LinkMeter()
        self.bytes_in = self.bytes_out = 0
        self.is_closed = False
        self.shared = Shared(now)
        self.receiver = Receiver(self.shared, budget, options.max_message, place)
        self.sender = Sender(self.shared)
        self._reader = FrameReader(self, self.receiver)
        self._started = self._last_in = self._last_tick = self._next_ping = now
        self._ping_sent: dict[int, float] = {}
        self._pings = 0
        self._pong: bytes | None = None
        self._reported = 0
        self._said_hello = False
        self._budget_total = budget.total
        for name, wanted in channels.items():
            self.receiver.add_channel(name, wanted)
            self.sender.prefer(name, wanted)
        self._prefaced = False
        if dialer:
            self._open_with_preface()

    @property
    def events(self) -> list[Any]:
        """What happened since this was last emptied (`take_events`)."""
        return self.shared.events

    def take_events(self) -> list[Any]:
        """The events, which are then forgotten."""
        taken, self.shared.events = self.shared.events, []
        return taken

    @property
    def is_open(self) -> bool:
        """Messages may be sent."""
        return self.shared.open

    @property
    def peer(self) -> str:
        """The other side's id, or a stand-in until it said hello."""
        return self.hello.peer if self.hello is not None else "the peer"

    # ---------------------------------------------------------------------------------------------------- receiving

    def get_buffer(self) -> memoryview:
        """Memory for the next incoming bytes."""
        return self._reader.get_buffer()

    def buffer_updated(self, count: int, now: float) -> None:
        """`count` bytes came into that memory."""
        self.shared.now = self._last_in = now
        self.bytes_in += count
        try:
            self._reader.buffer_updated(count)
        except (ProtocolError, HandshakeRefused) as error:
            self._fail(error)
        if self.bytes_in - self._reported >= REPORT_EVERY and self.shared.open:
            self.shared.dirty[0] = None

    def eof_received(self, now: float) -> None:
        """The other side sends nothing more."""
        self.shared.now = now
        where = " in the middle of a frame" if self._reader.midway else ""
        when = "" if self.shared.open else " before the handshake was complete"
        self.lost(LinkClosed(f"{self.peer} closed the connection{where}{when}"))

    def preface_received(self, data: bytes) -> None:
        if not self.dialer:  # before the other side's is judged, so that it can tell what is wrong
            self._open_with_preface()
        read_preface(data, self.options.versions)
        if self.dialer:
            self._say_hello()

    def control_received(self, kind: int, flags: int, channel: int, sequence: int, head: bytes, payload: bytes) -> None:
        if kind == FrameType.GOAWAY:
            self._goaway(flags, payload.decode(errors="replace"))
        elif not self.shared.open and not self._confirmed(kind):
            if kind == FrameType.HELLO and self.hello is None:
                self._hello_received(head)
            elif kind == FrameType.CHANNELS and self.hello is not None:
                self._learn(read_map(head, "CHANNELS"))  # there are others since the HELLO
            else:
                raise ProtocolError(f"a {FrameType(kind).name} frame came before the handshake was complete")
        elif kind == FrameType.CREDIT:
            self._credit_received(payload)
        elif kind == FrameType.OFFER:
            self.receiver.offer_received(channel, sequence, head, payload)
        elif kind == FrameType.ACCEPT:
            self.sender.accepted(channel, sequence)
        elif kind == FrameType.REFUSE:
            self.sender.refused(channel, sequence, payload.decode(errors="replace"))
        elif kind == FrameType.RESET:
            self.receiver.reset_received(channel, sequence)
        elif kind == FrameType.BLOCKED:
            self.receiver.blocked_received(channel)
        elif kind == FrameType.PING:
            self._pong = frame(FrameType.PONG, payload=payload[: SIZE.size])
        elif kind == FrameType.PONG:
            self._pong_received(payload)
        elif kind == FrameType.CHANNELS:
            self._learn(read_map(head, "CHANNELS"))
        else:
            raise ProtocolError("a second HELLO")

    def _credit_received(self, payload: bytes) -> None:
        if len(payload) % LIMITS.size:
            raise ProtocolError("a malformed CREDIT")
        for number, messages, size, received in LIMITS.iter_unpack(payload):
            if number:
                self.sender.limits_received(number, messages, size, received)
            else:
                if received > self.bytes_out:
                    raise ProtocolError(f"{received} bytes acknowledged, {self.bytes_out} sent")
                self.sender.link_limit_received(size)
                self.meter.acknowledged(self.shared.now, received, self.bytes_out)
                if self.meter.capacity is not None:
                    self.sender.slice_size = slice_for(self.meter.capacity)

    # ---------------------------------------------------------------------------------------------------- handshake

    def _open_with_preface(self) -> None:
        if not self._prefaced:
            self._prefaced = True
            self.shared.control.append(preface(self.options.versions))

    def _say_hello(self) -> None:
        head = hello_head(self.options, self.receiver.link.limit, self.receiver.describe())
        self.shared.control.append(frame(FrameType.HELLO, head=head))
        self._said_hello = True

    def _hello_received(self, head: bytes) -> None:
        about = read_map(head, "HELLO")
        self.hello, limit = read_hello(about)
        self.sender.max_message = self.hello.max_message
        self.sender.link_limit_received(limit)
        self._learn(about)
        self.shared.events.append(events.HelloReceived(self.hello))

    def accept(self) -> None:
        """Take the peer that said hello. Answer to `HelloReceived`."""
        if self.is_closed:
            return
        if not self.receiver.reserve():
            self.refuse(f"no receive memory left for another link ({self._budget_total} bytes in all)", retry=True)
        elif self.dialer:
            # Now, so that it comes before all that is allowed from here on.
            self.shared.control.append(frame(FrameType.CREDIT, payload=self._limits()))
            self._opened()
        else:
            try:
                self._say_hello()
            except HandshakeRefused as error:
                self._fail(error)

    def refuse(self, reason: str, *, retry: bool = False) -> None:
        """Close the session with a peer that said hello. The other answer to `HelloReceived`."""
        self._fail(HandshakeRefused(reason, retryable=retry))

    def refuse_duplicate(self) -> None:
        """Close the session because another link to the same peer stays."""
        self._goodbye(DUPLICATE, self.options.peer)
        self.lost(DuplicateLink(self.peer))

    def _confirmed(self, kind: int) -> bool:
        if self.dialer or not self._said_hello or kind != FrameType.CREDIT:
            return False
        self._opened()
        return True

    def _opened(self) -> None:
        assert self.hello is not None
        self.shared.open = True
        self._next_ping = self.shared.now
        self.shared.events.append(events.Opened(self.hello))
        self.sender.opened()

    def _learn(self, about: Mapping[str, Any]) -> None:
        """Take in the other side's channels and meta, from its HELLO or CHANNELS."""
        for channel in read_channels(about):
            self.sender.announced(*channel)
        self.meta = read_meta(about)
        self.shared.events.append(events.ChannelsChanged())

    def add_channel(self, name: str, options: ChannelOptions) -> None:
        """Open a channel for receiving on a session that may be open already. One without the memory for it is closed."""
        self.sender.prefer(name, options)
        if self.receiver.add_channel(name, options):
            self.announce()
        else:
            self._fail(HandshakeRefused(f"no receive memory left for channel '{name}'", retryable=True))

    def announce(self) -> None:
        """Tell the peer of the channels and the meta as they are now, if it has been told of others."""
        if self._said_hello and not self.is_closed:
            head = channels_head(self.options, self.receiver.describe())
            self.shared.control.append(frame(FrameType.CHANNELS, head=head))
            self.shared.dirty[0] = None

    # ----------------------------------------------------------------------------------------------------- the end

    def close(self, reason: str = "closed") -> None:
        """Say goodbye in order; what was not handed out is dropped."""
        self._goodbye(CLOSE, reason)
        self.lost(LinkClosed(reason), orderly=True)

    def lost(self, error: P2PMLError, *, orderly: bool = False) -> None:
        """The link is gone, for this reason: end the session without a goodbye."""
        if self.is_closed:
            return
        self.is_closed, self.shared.open = True, False
        self._reader.discard()
        self.sender.close(error)
        self.receiver.close()
        self.shared.events.append(events.Closed(error, orderly))

    def _fail(self, error: P2PMLError) -> None:
        code = CLOSE if isinstance(error, LinkClosed) else BROKEN
        if isinstance(error, HandshakeRefused):
            code = RETRY if error.retryable else REFUSED
        self._goodbye(code, str(error))
        self.lost(error)

    def _goodbye(self, code: int, reason: str) -> None:
        if not self.is_closed:
            self._open_with_preface()  # without it the other side would not read the reason
            self.shared.control.append(
                frame(FrameType.GOAWAY, flags=code, payload=reason.encode(errors="replace")[:MAX_CONTROL])
            )

    def _goaway(self, code: int, reason: str) -> None:
        if code in (REFUSED, RETRY):
            self.lost(HandshakeRefused(f"{self.peer} refused: {reason}", retryable=code == RETRY))
        elif code == DUPLICATE:
            self.lost(DuplicateLink(reason))
        elif code == BROKEN:
            self.lost(ProtocolError(f"{self.peer} closed the link because this side broke the protocol: {reason}"))
        else:
            self.lost(LinkClosed(f"{self.peer} closed the link: {reason}"), orderly=True)

    # ------------------------------------------------------------------------------------------------------- output

    @property
    def wants_pull(self) -> bool:
        """Whether `pull` may have something (it may still wait for credit)."""
        shared, sender = self.shared, self.sender
        return bool(shared.control or shared.dirty or sender.busy or sender.batch or self._pong)

    def pull(self) -> list[bytes | memoryview]:
        """The next bytes to write, in pieces that are each worth a write; empty if there is nothing to send now.

        At most one large frame, or a batch of small ones, so that control frames never wait for more than a chunk.
        """
        out: list[bytes | memoryview] = []
        shared = self.shared
        if self.sender.batch:
            # Before the control frames: an offer among them introduces a message that comes after these.
            self.sender.pull_batch(out)
        if shared.control or shared.dirty or self._pong is not None:
            self._pull_control(out)
        if shared.open:
            self.sender.pull(out)
        if not out:
            return out
        joined = join_small(out)
        self.bytes_out += sum(map(len, joined))
        return joined

    def take_sent(self) -> list[Outgoing]:
        """The messages whose last bytes `pull` has handed out since the last call; their tensors are free once written."""
        taken, self.sender.sent = self.sender.sent, []
        return taken

    def _pull_control(self, out: list[bytes | memoryview]) -> None:
        shared = self.shared
        out += shared.control
        shared.control.clear()
        if self._pong is not None:
            out.append(self._pong)
            self._pong = None
        if shared.dirty and shared.open:
            out.append(frame(FrameType.CREDIT, payload=self._limits()))

    def _limits(self) -> bytes:
        entries = [LIMITS.pack(0, 0, self.receiver.link.renew(), self.bytes_in)]
        for number in list(self.shared.dirty)[: MAX_CONTROL // LIMITS.size - 1]:
            del self.shared.dirty[number]
            if number:
                entries.append(LIMITS.pack(number, *self.receiver.limits(number)))
        self._reported = self.bytes_in
        return b"".join(entries)

    # --------------------------------------------------------------------------------------------------------- time

    def deadline(self) -> float:
        """When `tick` is due next, on the clock of `now`."""
        if not self.shared.open:
            return self._started + self.options.handshake
        due = min(self._next_ping, self._last_in + self.options.timeout)
        return due if self.shared.ack_due is None else min(due, self.shared.ack_due)

    def tick(self, now: float) -> None:
        """Time has passed: send what is due, or give the peer up.

        A long gap since the last call means that this process did not run (a busy loop, a suspended machine); the peer
        is not blamed for it, and gets the time to be heard.
        """
        shared, options = self.shared, self.options
        gap = now - max(self._last_tick, self._last_in)
        shared.now = self._last_tick = now
        if self.is_closed:
            return
        if not shared.open:
            if now >= self._started + options.handshake:
                self._fail(HandshakeRefused(f"no handshake within {options.handshake:g} s", retryable=True))
            return
        if gap > 2 * options.heartbeat:
            self._last_in = max(self._last_in, now - options.heartbeat)
        if now - self._last_in >= options.timeout:
            self._fail(LinkClosed(f"nothing heard from {self.peer} for {options.timeout:g} s"))
            return
        if now >= self._next_ping:
            self._ping(now)
        if shared.ack_due is not None and now >= shared.ack_due:
            shared.ack_due = None
            self.receiver.acknowledge()

    def _ping(self, now: float) -> None:
        self._next_ping = now + self.options.heartbeat
        self._pings += 1
        self._ping_sent[self._pings] = now
        self._ping_sent.pop(self._pings - PINGS_REMEMBERED, None)
        self.shared.control.append(frame(FrameType.PING, payload=SIZE.pack(self._pings)))

    def _pong_received(self, payload: bytes) -> None:
        if len(payload) != SIZE.size:
            raise ProtocolError("a malformed PONG")
        then = self._ping_sent.pop(SIZE.unpack(payload)[0], None)
        if then is not None:
            self.meter.answered(self.shared.now - then)
