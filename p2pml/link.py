"""One connection to one peer: a `Session` on an asyncio transport.

The session decides everything; this file only moves its bytes, keeps its clock, wakes those that wait, and runs compression
in worker threads. The transport's write buffer is kept at zero: what is written is handed to the operating system before the
next piece is pulled from the session, so that a control message never waits behind queued bulk data, and a tensor is free as
soon as its last piece is written.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, cast

from p2pml.errors import LinkClosed, MessageError, P2PMLError
from p2pml.transport import Transport
from p2pml.wire import codec, compression, events
from p2pml.wire.incoming import unpack
from p2pml.wire.options import ChannelOptions
from p2pml.wire.outgoing import Outgoing, State
from p2pml.wire.sender import BATCH
from p2pml.wire.session import Session

SMALL = 1 << 13
"""Tensors of a message up to this size in bytes are joined into one write, by copy."""

logger = logging.getLogger("p2pml")

PACE = 1.5
"""A link's measured speed has changed if it did so by this factor."""
LINGER = 2.0
"""Seconds that a closed link waits for the other side to read the goodbye."""


class Owner(Protocol):
    """Who is told about a link: the node.

    sinks: for each channel what takes its messages, as ``sink(peer, arrived)``; it must see to `Link.consumed`.
    """

    sinks: dict[str, Callable[[Any, events.Arrived], None]]

    def said_hello(self, link: Link, hello: events.Hello) -> None:
        """Call `Session.accept` or `refuse`."""

    def opened(self, link: Link) -> None:
        """Messages may flow."""

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


@dataclass(slots=True)
class _Parcel:
    """A message that is to be compressed, or waits behind such a one."""

    encoded: codec.Encoded
    wanted: str
    ticket: Ticket | None
    key: str | None
    tracked: bool

    def fail(self, error: P2PMLError) -> None:
        if self.ticket is not None:
            self.ticket.failed(error)


def as_encoded(message: Any) -> codec.Encoded:
    """A message ready for the wire: an object of a `codec.message` class, or bytes, which have no head. Raises `MessageError`."""
    if isinstance(message, codec.Encoded):
        return message
    if not isinstance(message, (bytes, bytearray, memoryview)):
        return codec.encode(message)
    view = memoryview(message)
    try:
        return codec.Encoded(b"", [view.cast("B")] if view.nbytes else [], [])
    except (TypeError, ValueError) as error:
        raise MessageError(f"a message given as memory must be contiguous and of plain numbers ({error})") from None


class Link(asyncio.BufferedProtocol):
    """The asyncio side of one session."""

    def __init__(
        self,
        owner: Owner,
        make_session: Callable[[float], Session],
        loop: asyncio.AbstractEventLoop,
        carrier: Transport,
    ) -> None:
        self._owner = owner
        self._loop = loop
        self._carrier = carrier
        self._paced = 0.0
        self.session = make_session(loop.time())
        self.session.shared.on_output = self.kick
        self.transport: asyncio.Transport | None = None
        self.options: dict[str, ChannelOptions] = {}
        self.peer: Any = None
        self.finished: asyncio.Future[None] = loop.create_future()
        self.error: P2PMLError | None = None
        # asyncio before 3.12 joins what it is given into a copy; a second call into the system is cheaper than that.
        self._gathers = sys.version_info >= (3, 12) or type(loop).__module__.startswith("uvloop")
        self._paused = False
        self._corked = False
        self._dispatching = False
        self._written: list[Outgoing] = []
        self._drains: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._linger: asyncio.TimerHandle | None = None
        self._packing: dict[str, deque[_Parcel]] = {}
        self._unpacking: dict[str, deque[events.Arrived]] = {}
        self._chooser = compression.Chooser()

    # ---------------------------------------------------------------------------------------- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=0)
        if self.error is not None:  # closed before there was a pipe to say anything on
            self._loop.call_soon(self._drop)
        else:
            self._tick()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.session.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        session = self.session
        session.buffer_updated(nbytes, self._loop.time())
        rate = session.meter.capacity
        if rate is not None and not PACE * rate > self._paced > rate / PACE:
            self._pace(rate)
        if session.events:
            self._dispatch()
        if session.wants_pull:
            self.kick()
        if session.shared.ack_due is not None:
            self._hurry(session.shared.ack_due)

    def _pace(self, rate: float) -> None:
        self._paced = rate
        if self.transport is not None and not self.transport.is_closing():
            self._carrier.pace(self.transport, rate)

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
        self.transport = None
        for handle in (self._timer, self._linger):
            if handle is not None:
                handle.cancel()
        self.session.lost(LinkClosed(reason))
        self._dispatch()
        for outgoing in self._written:
            if outgoing.state is State.SENT:  # its last bytes got as far as the transport's buffer
                outgoing.state = State.FAILED
        self._settle_written()
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
        while not self._paused and self._write(transport):
            if self._written and not self._paused:
                self._settle_written()
        if session.events:
            self._dispatch()
        if self._drains:
            self._wake_drains()

    def _write(self, transport: asyncio.Transport) -> bool:
        """Hand the transport what the session gives at once; false if that was nothing."""
        session = self.session
        if transport.is_closing():  # silent on asyncio, an error on uvloop; `connection_lost` is to follow
            return False
        pieces = session.pull()
        if self._gathers and len(pieces) > 1:
            transport.writelines(pieces)
        else:
            for piece in pieces:
                transport.write(piece)
        if session.sender.sent:
            self._written += session.take_sent()
        return bool(pieces)

    def _wake_drains(self) -> None:
        drains, self._drains = self._drains, []
        for future in drains:
            if not future.done():
                future.set_result(None)

    def _settle_written(self) -> None:
        written, self._written = self._written, []
        for outgoing in written:
            outgoing.release()
            if outgoing.owner is None:
                continue
            if outgoing.state is State.FAILED:
                outgoing.owner.failed(self._why_closed())
            else:
                outgoing.owner.sent()

    # ------------------------------------------------------------------------------------------------------ events

    def _dispatch(self) -> None:
        """Tell the events, in order. What comes up meanwhile, as when a handler closes the link, is told after the others."""
        if self._dispatching:
            return
        session, sinks, self._dispatching = self.session, self._owner.sinks, True
        try:
            while session.events:
                for event in session.take_events():
                    try:
                        if type(event) is events.Arrived and event.packed is None and not self._unpacking:
                            sinks[event.channel](self.peer, event)
                        else:
                            self._handle(event)
                    except Exception as error:
                        self._fail(error)
        finally:
            self._dispatching = False

    def _fail(self, error: Exception) -> None:
        """A handler raised. Its message's credit may be lost, and what it was to do is not done: the link can't go on."""
        peer = self.session.peer
        logger.error("the link to %s is closed, as a handler of what it brought failed", peer, exc_info=error)
        self.session.close(f"it failed here: {type(error).__name__}")

    def _handle(self, event: Any) -> None:
        kind = type(event)
        if kind is events.Arrived:
            if event.packed is not None or event.channel in self._unpacking:
                self._unpack_later(event)
            else:
                self._owner.sinks[event.channel](self.peer, event)
        elif kind is events.MessageDelivered:
            if event.outgoing.owner is not None:
                event.outgoing.owner.delivered()
        elif kind is events.MessageFailed:
            if event.outgoing in self._written and self.session.is_closed:
                return  # told when the transport has let go of its memory
            event.outgoing.release()
            if event.outgoing.owner is not None:
                refused = isinstance(event.error, MessageError)
                event.outgoing.owner.failed(event.error if refused else LinkClosed(str(event.error)))
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
            self._hurry(self.session.deadline())
            self.kick()
        elif kind is events.Closed:
            self._say_goodbye(event)

    def _say_goodbye(self, event: events.Closed) -> None:
        self.error = event.error
        transport = self.transport
        for waiting in self._packing.values():
            for parcel in waiting:
                parcel.fail(self._why_closed())
            waiting.clear()
        self._packing.clear()
        self._wake_drains()
        if transport is not None:
            self._corked = True
            self._linger = self._loop.call_later(LINGER, self._drop)
            try:
                self._write(transport)
                if transport.can_write_eof():
                    transport.write_eof()
                else:
                    self._loop.call_soon(self._close_pipe)
            except RuntimeError as error:
                # uvloop closes a pipe whose making is cancelled, as at the end of `asyncio.run`, and tells nobody.
                logger.info("no goodbye to %s: %s", self.session.peer, error)
                self._loop.call_soon(self._drop)
        self._owner.closed(self, event.error, event.orderly)

    def close(self, reason: str = "closed") -> None:
        """End the session in order. `finished` is done when the transport is gone, `LINGER` seconds later at the most.

        Small messages that `send_now` took go out first; what waits in a queue is dropped.
        """
        if self.transport is not None and self.session.sender.batch:
            self._write(self.transport)
        self.session.close(reason)
        self._dispatch()

    def _why_closed(self) -> LinkClosed:
        """What to raise where a closed link is used: one error, whatever ended it, and each time a new object."""
        return LinkClosed(str(self.error or "the link is closed"))

    async def drained(self) -> None:
        """Wait until nothing is queued or half written; at once on a closed link."""
        while not self.session.is_closed and (self._packing or self.session.wants_pull or self._written):
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
            self._loop.call_soon(self._lose)

    def _lose(self) -> None:
        if self.transport is not None:  # the transport has not told; see `_say_goodbye`
            self.connection_lost(None)

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
        if channel in self._packing:
            return False
        sender = self.session.sender
        if sender.batched >= BATCH:
            self._flush()
        if type(message) is bytes:
            done = sender.send_small(channel, b"", message)
        else:
            encoded = as_encoded(message)
            head, segments = encoded.head, encoded.segments
            if not head and segments:
                done = sender.send_small(channel, b"", segments[0])
            elif segments and (len(segments) > 64 or encoded.size > SMALL or self._wanted(channel) != "none"):
                return False
            else:
                done = sender.send_small(channel, head, b"".join(segments) if segments else b"")
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
        encoded = as_encoded(message)
        if self.session.is_closed:
            raise self._why_closed()
        parcel = _Parcel(encoded, self._wanted(channel), ticket, key, tracked)
        waiting = self._packing.get(channel)
        if waiting is not None:
            for old in [old for old in waiting if key is not None and old.key == key]:
                waiting.remove(old)
                old.fail(MessageError("superseded by a newer message"))
            waiting.append(parcel)
        elif self._codec_for(parcel) is not None:
            self._pack_later(channel, parcel)
        else:
            self._queue(channel, parcel, encoded)

    def can_send(self, channel: str, size: int) -> bool:
        """Whether a message of this size would start at once; if not, `Owner.credit_available` follows when it is worth asking."""
        outlet = self.session.sender.channel(channel)
        if channel in self._packing and outlet is not None:
            outlet.starved = True
            return False
        return self.session.sender.can_send(channel, size)

    def waiting(self, channel: str) -> int:
        """How many messages wait on a channel, compressed or not."""
        outlet = self.session.sender.channel(channel)
        return len(self._packing.get(channel, ())) + (len(outlet.queue) if outlet is not None else 0)

    def take_back(self, ticket: Ticket) -> bool:
        """Cancel the message of this ticket; false if all of it has gone out (or it has failed)."""
        for waiting in self._packing.values():
            for parcel in waiting:
                if parcel.ticket is ticket:
                    waiting.remove(parcel)
                    return True
        if not self.session.sender.cancel(ticket):
            return False
        self.kick()
        return True

    def _queue(self, channel: str, parcel: _Parcel, encoded: codec.Encoded) -> None:
        """Queue a message, `encoded` as it is to go out: packed or not."""
        raw = parcel.encoded.size if encoded is not parcel.encoded else None
        outgoing = Outgoing(
            encoded.head, encoded.segments, owner=parcel.ticket, key=parcel.key, tracked=parcel.tracked, raw=raw
        )
        if parcel.key is not None:
            self.session.sender.supersede(channel, parcel.key)
        self.session.sender.send(channel, outgoing)
        if self.session.events:
            self._dispatch()
        self.kick()

    def _codec_for(self, parcel: _Parcel) -> str | None:
        """What to compress a message with, as the channel wants it and as far as the peer can read it."""
        encoded, wanted = parcel.encoded, parcel.wanted
        if not encoded.head or not encoded.segments:
            return None
        if wanted == "auto":
            sample = compression.sample_of(encoded.segments)
            wanted = self._chooser.choose(encoded.size, sample, self.session.meter.bytes_per_second) or "none"
        hello = self.session.hello
        return wanted if hello is not None and wanted in hello.codecs else None

    def _pack_later(self, channel: str, parcel: _Parcel) -> None:
        waiting = self._packing[channel] = deque([parcel])
        try:
            self._owner.spawn(self._pack(channel, waiting))
        except LinkClosed:
            del self._packing[channel]
            raise

    async def _pack(self, channel: str, waiting: deque[_Parcel]) -> None:
        """Compress the waiting messages of a channel in a worker thread, one after the other, so that they keep their order.

        A message stays in the queue meanwhile, so that it can be taken back, and fails with the link.
        """
        try:
            while waiting:
                parcel = waiting[0]
                encoded = await self._packed(parcel)
                if not waiting or waiting[0] is not parcel:
                    continue
                waiting.popleft()
                try:
                    self._queue(channel, parcel, encoded)
                except P2PMLError as error:
                    parcel.fail(error)
        finally:
            if self._packing.get(channel) is waiting:
                del self._packing[channel]
            for parcel in waiting:
                parcel.fail(MessageError("it could not be compressed"))
            self._wake_drains()

    async def _packed(self, parcel: _Parcel) -> codec.Encoded:
        choice = self._codec_for(parcel)
        if choice is None:
            return parcel.encoded
        start = self._loop.time()
        packed = await asyncio.to_thread(compression.wire_message, parcel.encoded, choice)
        self._chooser.observe(choice, parcel.encoded.size, self._loop.time() - start)
        return packed

    def _unpack_later(self, arrived: events.Arrived) -> None:
        waiting = self._unpacking.get(arrived.channel)
        if waiting is not None:
            waiting.append(arrived)
            return
        waiting = self._unpacking[arrived.channel] = deque([arrived])
        try:
            self._owner.spawn(self._unpack(arrived.channel, waiting))
        except LinkClosed:  # the node shuts down, and nobody will read this
            del self._unpacking[arrived.channel]
            self.consumed(arrived)

    async def _unpack(self, channel: str, waiting: deque[events.Arrived]) -> None:
        """Decompress a channel's messages in a worker thread, in order; those that came before the link closed still arrive."""
        try:
            while waiting:
                arrived = waiting[0]
                if arrived.packed is not None:
                    try:
                        arrived.message = await asyncio.to_thread(unpack, *arrived.packed)
                    except (MessageError, MemoryError) as error:
                        self.refuse(waiting.popleft(), error)
                        continue
                    arrived.packed = None
                waiting.popleft()
                try:
                    self._owner.sinks[channel](self.peer, arrived)
                except Exception as error:
                    self._fail(error)
                    self._dispatch()
        finally:
            del self._unpacking[channel]
            for arrived in waiting:
                self.consumed(arrived)

    def consumed(self, arrived: events.Arrived) -> None:
        """Give the credit of a message back."""
        session = self.session
        session.receiver.consumed(arrived)
        if session.shared.dirty and not self._corked and session.is_open:
            self.kick()

    def refuse(self, arrived: events.Arrived, error: MessageError | MemoryError) -> None:
        """A message that has arrived turns out to be unacceptable: give its credit back, and log why."""
        logger.warning("%s, channel '%s': %s", self.session.peer, arrived.channel, error)
        self.consumed(arrived)
