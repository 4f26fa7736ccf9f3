"""``memory://name``: pipes inside one process, on one event loop.

For tests, for peers that share a process, and as the plainest example of a transport. A pipe behaves as a socket does:
a bounded part of what is written is taken over at once (copied), the rest stays in the writer's memory until the
reader's buffer has it, so that back-pressure is real and large writes are copied once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import count
from typing import Any

from p2pml.address import Address
from p2pml.errors import AddressInUse, TransportError
from p2pml.transport import Listener, ProtocolFactory

SOCKET_BUFFER = 256 * 1024
"""Bytes of one direction that a pipe takes over from its writer, like a socket's buffer in the kernel."""

DELIVERY_SLICE = 256 * 1024
"""Bytes delivered in one turn of the event loop, so that a busy pipe leaves it to others."""

DEFAULT_HIGH_WATER = 64 * 1024

_listeners: dict[str, _MemoryListener] = {}
_dials = count(1)


class MemoryTransport:
    """Dials and listens on names that are known in this process."""

    async def dial(self, address: Address, factory: ProtocolFactory) -> asyncio.BufferedProtocol:
        """Connect to the listener of that name. Raises `TransportError`."""
        loop = asyncio.get_running_loop()
        listener = _listeners.get(_name(address))
        if listener is None:
            raise TransportError(f"{address}: nobody listens on that name in this process")
        if listener.loop is not loop:
            raise TransportError(f"{address}: its listener runs on another event loop")
        protocol, accepted = factory(), listener.factory()
        end = f"{address}/dial-{next(_dials)}"
        near = MemoryPipe(loop, protocol, sockname=end, peername=str(address))
        far = MemoryPipe(loop, accepted, sockname=str(address), peername=end)
        near.join(far)
        loop.call_soon(far.begin)
        near.begin()
        return protocol

    def pace(self, pipe: asyncio.Transport, bytes_per_second: float) -> None:
        """There is nothing below a pipe."""

    async def listen(self, address: Address, factory: ProtocolFactory) -> Listener:
        """Take the name. Raises `AddressInUse`."""
        loop, name = asyncio.get_running_loop(), _name(address)
        holder = _listeners.get(name)
        if holder is not None and not holder.loop.is_closed():
            raise AddressInUse(f"{address}: the name is taken in this process")
        listener = _listeners[name] = _MemoryListener(address, factory, loop)
        return listener


def _name(address: Address) -> str:
    return f"{address.host}{address.path}"


class _MemoryListener:
    def __init__(self, address: Address, factory: ProtocolFactory, loop: asyncio.AbstractEventLoop) -> None:
        self.addresses = [address]
        self.factory = factory
        self.loop = loop

    async def close(self) -> None:
        name = _name(self.addresses[0])
        if _listeners.get(name) is self:
            del _listeners[name]


class MemoryPipe(asyncio.Transport):
    """One end of a pipe; `_peer` is the other. Each end keeps what it wrote until the other end takes it."""

    _peer: MemoryPipe

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.BaseProtocol, **names: str) -> None:
        super().__init__(extra=names)
        self._loop = loop
        self._protocol: Any = protocol
        # Written and not yet taken by the peer: first what was copied, then what is still the writer's memory.
        self._queue: deque[memoryview] = deque()
        self._copied = 0  # bytes
        self._borrowed = 0  # bytes
        self._high, self._low = DEFAULT_HIGH_WATER, DEFAULT_HIGH_WATER // 4
        self._begun = self._scheduled = False
        self._writing_paused = self._reading_paused = False
        self._eof_written = self._eof_seen = False
        self._closing = self._lost = False

    def join(self, other: MemoryPipe) -> None:
        """Make the two the ends of one pipe."""
        self._peer, other._peer = other, self

    def begin(self) -> None:
        """Tell the protocol that it is connected, then deliver."""
        self._begun = True
        self._call(self._protocol.connection_made, self)
        self._wake()

    # ------------------------------------------------------------------------------------------------ writing

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Send `data` after what was sent before; its memory may be kept until `resume_writing`."""
        view = memoryview(data)
        if self._eof_written:
            raise RuntimeError("write() after write_eof()")
        if not view.nbytes or self._closing:
            return
        if self._peer._lost:
            self._force_close(BrokenPipeError("the other end of the pipe is closed"))
            return
        if not self._borrowed and self._copied + view.nbytes <= SOCKET_BUFFER:
            self._queue.append(memoryview(bytes(view)))
            self._copied += view.nbytes
        else:
            self._queue.append(view.cast("B"))
            self._borrowed += view.nbytes
        self._peer._wake()
        self._pause_if_above()

    def writelines(self, list_of_data: Any) -> None:
        """Write each in turn, without joining them."""
        for data in list_of_data:
            self.write(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Say that nothing follows what was written; reading goes on."""
        self._eof_written = True
        self._peer._wake()

    def get_write_buffer_size(self) -> int:
        return self._borrowed

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """As asyncio has it: `low` is a quarter of `high` unless given."""
        if high is None:
            high = DEFAULT_HIGH_WATER if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high}) must be at least low ({low}), and low at least 0")
        self._high, self._low = high, low
        self._pause_if_above()

    def _pause_if_above(self) -> None:
        if self._borrowed > self._high and not self._writing_paused:
            self._writing_paused = True
            self._call(self._protocol.pause_writing)

    def _take(self, target: memoryview) -> int:
        """Move what was written into `target`; returns the number of bytes."""
        room = len(target)
        while self._queue and room:
            head = self._queue.popleft()
            if len(head) > room:
                self._queue.appendleft(head[room:])
                head = head[:room]
            target[len(target) - room :][: len(head)] = head
            room -= len(head)
        taken = len(target) - room
        copied = min(taken, self._copied)
        self._copied -= copied
        self._borrowed -= taken - copied
        return taken

    def _after_taking(self) -> None:
        if self._writing_paused and self._borrowed <= self._low and not self._lost:
            self._writing_paused = False
            self._call(self._protocol.resume_writing)
        if self._closing and not self._queue:
            self._lose(None)

    # ------------------------------------------------------------------------------------------------ reading

    def is_reading(self) -> bool:
        return not (self._reading_paused or self._closing)

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._wake()

    def _wake(self) -> None:
        if self._begun and not self._scheduled and self.is_reading():
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        source, budget = self._peer, DELIVERY_SLICE
        while budget and source._queue and self.is_reading():
            budget -= self._receive(budget)  # of nothing, the pipe is lost and no longer reading
        source._after_taking()
        if not self.is_reading():
            return
        if source._queue:
            self._wake()
        elif (source._eof_written or source._closing) and not self._eof_seen:
            self._eof_seen = True
            if not self._call(self._protocol.eof_received):
                self.close()

    def _receive(self, most: int) -> int:
        try:
            target = memoryview(self._protocol.get_buffer(-1)).cast("B")[:most]
            if not target.nbytes:
                raise RuntimeError("get_buffer() returned an empty buffer")
            taken = self._peer._take(target)
            del target  # the protocol may resize or hand over its memory now
            if taken:  # nothing, if the protocol aborted the pipe when asked for the buffer
                self._protocol.buffer_updated(taken)
        except Exception as fault:
            self._report(fault)
            self._force_close(fault)
            return 0
        return taken

    # ------------------------------------------------------------------------------------------------ ending

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Read nothing more, deliver what was written, then end."""
        if self._closing:
            return
        self._closing = True
        if not self._queue:
            self._lose(None)
        elif self._peer._closing:
            self._force_close(ConnectionResetError("the other end closed without reading everything"))
        self._peer._wake()

    def abort(self) -> None:
        """End at once; what was written and not yet taken is dropped."""
        self._force_close(None)

    def _force_close(self, cause: BaseException | None) -> None:
        if self._lost:
            return
        self._closing = True
        self._lose(cause)
        if not self._peer._lost:
            self._peer._force_close(ConnectionResetError("the other end of the pipe was aborted"))

    def _lose(self, cause: BaseException | None) -> None:
        if not self._lost:
            self._lost = True
            self._queue.clear()
            self._copied = self._borrowed = 0
            self._loop.call_soon(self._end, cause)

    def _end(self, cause: BaseException | None) -> None:
        self._call(self._protocol.connection_lost, cause)
        self._protocol = None
        if self._peer._queue:  # nobody will take it any more
            self._peer._force_close(ConnectionResetError("the other end closed without reading everything"))

    # ------------------------------------------------------------------------------------------------ protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def _call(self, callback: Any, *arguments: Any) -> Any:
        """Call the protocol; what it raises goes to the event loop's handler, as with asyncio's own transports."""
        try:
            return callback(*arguments)
        except Exception as fault:
            self._report(fault)
            return None

    def _report(self, fault: BaseException) -> None:
        self._loop.call_exception_handler(
            {"message": "a protocol on a memory pipe failed", "exception": fault, "transport": self}
        )
