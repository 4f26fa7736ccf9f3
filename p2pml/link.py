"""One connection to one peer: a `Session` on an asyncio transport.

The session decides everything; this file only moves its bytes, keeps its clock, wakes those that wait, and runs compression
in worker threads. The transport's write buffer is kept at zero: what is written is handed to the operating system before the
next piece is pulled from the session, so that a control message never waits behind queued bulk data, and a tensor is free as
soon as its last piece is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

from p2pml.errors import LinkClosed, MessageError, P2PMLError
from p2pml.wire import codec, compression, events
from p2pml.wire.incoming import unpack
from p2pml.wire.options import ChannelOptions
from p2pml.wire.outgoing import Outgoing
from p2pml.wire.session import Session

SMALL = 1 << 13
"""Tensors of a message up to this size in bytes are joined into one write, by copy."""

logger = logging.getLogger("p2pml")

LINGER = 2.0
"""Seconds that a closed link waits for the other side to read the goodbye."""


class Owner(Protocol):
    """Who is told about a link: the node."""

    def said_hello(self, link: Link, hello: events.Hello) -> None:
        """Call `Session.accept` or `refuse`."""

    def opened(self, link: Link) -> None:
        """Messages may flow."""

    def arrived(self, link: Link, arrived: events.Arrived) -> None:
        """A message; give its credit back by `Link.consumed`."""

    def channels_changed(self, link: Link) -> None:
        """The peer opened channels or changed its meta."""

    def credit_available(self, link: Link, channel: str) -> None:
        """A channel that had no credit has some."""

    def closed(self, link: Link, error: P2PMLError, orderly: bool) -> None:
        """The session ended."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> object:
        """Run a task as the node's child."""


class Ticket:
    """Follows one message. Override what is of interest; each is called at most once."""

    __slots__ = ()

    def sent(self) -> None:
        """Every byte was handed to the operating system: the tensors are free."""

    def delivered(self) -> None:
        """The peer has the whole message."""

    def failed(self, error: P2PMLError) -> None:
        """The message will not arrive."""


class Link(asyncio.BufferedProtocol):
    """The asyncio side of one session."""

    def __init__(self, owner: Owner, make_session: Callable[[float], Session], loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self.session = make_session(loop.time())
        self.session.shared.on_output = self.kick
        self.transport: asyncio.Transport | None = None
        self.options: dict[str, ChannelOptions] = {}
        self.peer: Any = None
        self.finished: asyncio.Future[None] = loop.create_future()
        self.error: P2PMLError | None = None
        self._paused = False
        self._corked = False
        self._written: list[Outgoing] = []
        self._drains: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._linger: asyncio.TimerHandle | None = None
        self.packing: dict[str, deque[tuple[Any, str, Any, str | None, bool]]] = {}
        self._unpacking: dict[str, deque[events.Arrived]] = {}
        self._chooser = compression.Chooser()

    # ---------------------------------------------------------------------------------------- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=0)
        self._tick()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.session.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        session = self.session
        session.buffer_updated(nbytes, self._loop.time())
        if session.events:
            self._dispatch()
        if session.wants_pull:
            self.kick()
        if session.shared.ack_due is not None:
            self._hurry(session.shared.ack_due)

    def eof_received(self) -> bool:
        self.session.eof_received(self._loop.time())
        self._dispatch()
        return False

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._settle_written()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f"the connection broke: {exc}" if exc else "the connection was closed"
        self.session.lost(LinkClosed(reason))
        self.transport = None
        for handle in (self._timer, self._linger):
            if handle is not None:
                handle.cancel()
        for outgoing in self._written:
            _tell_sent(outgoing)
        self._written.clear()
        self._dispatch()
        if not self.finished.done():
            self.finished.set_result(None)

    # ------------------------------------------------------------------------------------------------------ output

    def kick(self) -> None:
        """Something may be ready to go out: write it now, and what follows in this turn of the loop in one batch."""
        if not self._corked:
            self._corked = True
            self._loop.call_soon(self._uncork)
            self._flush()

    def _uncork(self) -> None:
        self._corked = False
        self._flush()

    def _flush(self) -> None:
        transport, session = self.transport, self.session
        if transport is None:
            return
        while not self._paused:
            pieces = session.pull()
            if not pieces:
                break
            for piece in pieces:
                transport.write(piece)
            if session.sender.sent:
                self._written += session.take_sent()
                if not self._paused:
                    self._settle_written()
        if session.events:
            self._dispatch()
        if self._drains:
            self._wake_drains()

    def _wake_drains(self) -> None:
        drains, self._drains = self._drains, []
        for future in drains:
            if not future.done():
                future.set_result(None)

    def _settle_written(self) -> None:
        written, self._written = self._written, []
        for outgoing in written:
            _tell_sent(outgoing)

    # ------------------------------------------------------------------------------------------------------ events

    def _dispatch(self) -> None:
        session = self.session
        while session.events:
            for event in session.take_events():
                self._handle(event)

    def _handle(self, event: Any) -> None:
        kind = type(event)
        if kind is events.Arrived:
            if event.packed is not None or event.channel in self._unpacking:
                self._unpack_later(event)
            else:
                self._owner.arrived(self, event)
        elif kind is events.MessageDelivered:
            if event.outgoing.owner is not None:
                event.outgoing.owner.delivered()
        elif kind is events.MessageFailed:
            event.outgoing.release()
            if event.outgoing.owner is not None:
                event.outgoing.owner.failed(event.error)
        elif kind is events.CreditAvailable:
            self._owner.credit_available(self, event.channel)
        elif kind is events.MessageDiscarded:
            logger.warning("%s, channel '%s': %s", self.session.peer, event.channel, event.error)
        elif kind is events.ChannelsChanged:
            self._owner.channels_changed(self)
        elif kind is events.HelloReceived:
            self._owner.said_hello(self, event.hello)
            self.kick()
        elif kind is events.Opened:
            self._owner.opened(self)
            self.kick()
        elif kind is events.Closed:
            self._say_goodbye(event)

    def _say_goodbye(self, event: events.Closed) -> None:
        self.error = event.error
        transport = self.transport
        for waiting in self.packing.values():
            for _, _, owner, _, _ in waiting:
                owner.failed(event.error)
        self.packing.clear()
        self._wake_drains()
        if transport is not None:
            self._corked = True
            for piece in self.session.pull():
                transport.write(piece)
            if transport.can_write_eof():
                transport.write_eof()
            else:
                self._loop.call_soon(self._close_pipe)
            self._linger = self._loop.call_later(LINGER, self._drop)
        self._owner.closed(self, event.error, event.orderly)

    def close(self, reason: str = "closed") -> None:
        """End the session in order. `finished` is done when the transport is gone, `LINGER` seconds later at the most."""
        self.session.close(reason)
        self._dispatch()

    async def drained(self) -> None:
        """Wait until nothing is queued or half written; at once on a closed link."""
        while not self.session.is_closed and (self.packing or self.session.wants_pull or self._written):
            future = self._loop.create_future()
            self._drains.append(future)
            await future

    def drop_duplicate(self) -> None:
        """Close this link because another one to the same peer stays."""
        self.session.refuse_duplicate()
        self._dispatch()

    def abort(self, reason: str) -> None:
        """Drop the connection at once."""
        self.session.lost(LinkClosed(reason))
        self._dispatch()
        # Not at once: this may be inside a callback in which the loop does not bear it.
        self._loop.call_soon(self._drop)

    def _close_pipe(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def _drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # -------------------------------------------------------------------------------------------------------- time

    def _tick(self) -> None:
        now = self._loop.time()
        self.session.tick(now)
        if self.session.events:
            self._dispatch()
        self._flush()
        if not self.session.is_closed:
            self._set_timer(self.session.deadline())

    def _set_timer(self, due: float) -> None:
        self._due = due
        self._timer = self._loop.call_at(due, self._tick)

    def _hurry(self, due: float) -> None:
        if due < self._due and self._timer is not None and not self.session.is_closed:
            self._timer.cancel()
            self._set_timer(due)

    # ----------------------------------------------------------------------------------------------------- sending

    def send_now(self, channel: str, message: Any) -> bool:
        """Send a small message at once, by copy, if it has credit and nothing waits before it; false if not.

        Raises `MessageError` for a message that cannot be encoded.
        """
        if channel in self.packing:
            return False
        if isinstance(message, (bytes, bytearray, memoryview)):
            done = self.session.sender.send_small(channel, b"", memoryview(message).cast("B"))
        else:
            encoded = message if isinstance(message, codec.Encoded) else codec.encode(message)
            segments = encoded.segments
            if segments and (len(encoded.segments) > 64 or encoded.size > SMALL or self._wanted(channel) != "none"):
                return False
            done = self.session.sender.send_small(channel, encoded.head, b"".join(segments) if segments else b"")
        if done:
            self.kick()
        return done

    def _wanted(self, channel: str) -> str:
        options = self.options.get(channel)
        return options.compress if options is not None else "none"

    def submit(
        self, channel: str, message: Any, ticket: Ticket | None = None, *, key: str | None = None, tracked: bool = False
    ) -> None:
        """Queue a message: an object of a `codec.message` class, already encoded or not, or bytes.

        Without a ticket the caller can't know when the tensors are free. `key` drops waiting messages of the same key.
        Raises `MessageError`, `LinkClosed`.
        """
        if key is not None:
            self.session.sender.supersede(channel, key)
        wanted = self._wanted(channel)
        if channel in self.packing:
            self.packing[channel].append((message, wanted, ticket, key, tracked))
            return
        if isinstance(message, (bytes, bytearray, memoryview)):
            self._queue(channel, b"", [memoryview(message).cast("B")] if len(message) else [], ticket, key, tracked)
            return
        encoded = message if isinstance(message, codec.Encoded) else codec.encode(message)
        if encoded.segments and wanted != "none" and self._codec_for(encoded, wanted) is not None:
            self.packing[channel] = deque([(encoded, wanted, ticket, key, tracked)])
            self._owner.spawn(self._pack(channel))
            return
        self._queue(channel, encoded.head, encoded.segments, ticket, key, tracked)

    def take_back(self, ticket: Ticket) -> None:
        """Cancel the message of this ticket, as far as it has not gone out."""
        for waiting in self.packing.values():
            for item in [item for item in waiting if item[2] is ticket]:
                waiting.remove(item)
        if self.session.sender.cancel(ticket):
            self.kick()

    def _queue(
        self,
        channel: str,
        head: bytes,
        segments: list[memoryview],
        ticket: Ticket | None,
        key: str | None,
        tracked: bool,
        raw: int | None = None,
    ) -> None:
        outgoing = Outgoing(head, segments, owner=ticket, key=key, tracked=tracked, raw=raw)
        if self.session.is_closed:
            raise self.error or LinkClosed("the link is closed")
        self.session.sender.send(channel, outgoing)
        if self.session.events:
            self._dispatch()
        self.kick()

    def _codec_for(self, encoded: codec.Encoded, wanted: str) -> str | None:
        """What to compress a message with, as the channel wants it and as far as the peer can read it."""
        if wanted == "auto":
            sample = compression.sample_of(encoded.segments)
            wanted = self._chooser.choose(encoded.size, sample, self.session.meter.bytes_per_second) or "none"
        hello = self.session.hello
        return wanted if hello is not None and wanted in hello.codecs else None

    async def _pack(self, channel: str) -> None:
        """Compress the waiting messages of a channel in a worker thread, one after the other, so that they keep their order."""
        waiting = self.packing[channel]
        while waiting and not self.session.is_closed:
            message, wanted, ticket, key, tracked = waiting.popleft()
            try:
                encoded = message if isinstance(message, codec.Encoded) else codec.encode(message)
                choice = self._codec_for(encoded, wanted)
                raw = None
                if choice is not None:
                    start = self._loop.time()
                    packed = await asyncio.to_thread(compression.wire_message, encoded, choice)
                    self._chooser.observe(choice, encoded.size, self._loop.time() - start)
                    raw = encoded.size if packed is not encoded else None
                    encoded = packed
                self._queue(channel, encoded.head, encoded.segments, ticket, key, tracked, raw)
            except P2PMLError as error:
                if ticket is not None:
                    ticket.failed(error)
        if self.packing.get(channel) is waiting:
            del self.packing[channel]

    def _unpack_later(self, arrived: events.Arrived) -> None:
        waiting = self._unpacking.get(arrived.channel)
        if waiting is not None:
            waiting.append(arrived)
            return
        self._unpacking[arrived.channel] = deque([arrived])
        self._owner.spawn(self._unpack(arrived.channel))

    async def _unpack(self, channel: str) -> None:
        """Decompress a channel's messages in a worker thread, in order."""
        waiting = self._unpacking[channel]
        while waiting:
            arrived = waiting.popleft()
            if arrived.packed is not None:
                head, payload = arrived.packed
                try:
                    arrived.message = await asyncio.to_thread(unpack, head, payload)
                except MessageError as error:
                    self.refuse(arrived, error)
                    continue
                arrived.packed = None
            if self.session.is_closed:
                self.consumed(arrived)
            else:
                self._owner.arrived(self, arrived)
        del self._unpacking[channel]

    def consumed(self, arrived: events.Arrived) -> None:
        """Give the credit of a message back."""
        session = self.session
        session.receiver.consumed(arrived)
        if session.shared.dirty and session.is_open:
            self.kick()

    def refuse(self, arrived: events.Arrived, error: MessageError) -> None:
        """A message that has arrived turns out to be unacceptable: give its credit back, and log why."""
        logger.warning("%s, channel '%s': %s", self.session.peer, arrived.channel, error)
        self.consumed(arrived)


def _tell_sent(outgoing: Outgoing) -> None:
    outgoing.release()
    if outgoing.owner is not None:
        outgoing.owner.sent()
