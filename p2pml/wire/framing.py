"""Frames: how a stream of bytes is cut. No I/O: bytes in, frames out, and the other way round.

Each side opens with a preface of 16 bytes, fixed for all versions::

    magic (8)  lowest version (u16)  highest version (u16)  reserved (u32)

Then come frames, each a header of 16 bytes, a CBOR head of up to 16 KiB and a payload of up to 1 MiB (little endian)::

    type u8 | flags u8 | head length u16 | channel u32 | payload length u32 | sequence u32 | head | payload

Only DATA frames may have a large payload. Their payload goes from the socket straight into the memory that the session
names for it; everything else passes through one small staging buffer.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Protocol

from p2pml.errors import HandshakeRefused, ProtocolError

MAGIC = b"p2pml\r\n\x00"
VERSIONS = (1, 1)
PREFACE = struct.Struct("<8sHHI")
HEADER = struct.Struct("<BBHIII")
HEADER_SIZE = HEADER.size
SIZE = struct.Struct("<Q")
MAX_PAYLOAD = 1 << 20
SLICE = 1 << 18
"""Bytes of a large message in one frame, as long as the link's speed is not known; see `slice_for`."""
MIN_SLICE = 1 << 16
SLICE_SECONDS = 0.001
MAX_HEAD = 1 << 14
MAX_CONTROL = 1 << 12
STAGING = 1 << 16
DIRECT = 1 << 13
"""From this many bytes on, a payload is received straight into its final memory: below, one copy is cheaper than one
more call into the kernel."""
BETWEEN_FRAMES = 1 << 11
"""How much is asked for when the next thing to come is the header of another large frame: little, as what comes with it
must be copied."""

FIRST = 1
LAST = 2


class FrameType(IntEnum):
    """The frames there are. All but DATA are control frames: small, and never held back by credits."""

    DATA = 1
    OFFER = 2
    ACCEPT = 3
    REFUSE = 4
    RESET = 5
    CREDIT = 6
    BLOCKED = 7
    PING = 8
    PONG = 9
    HELLO = 10
    CHANNELS = 11
    GOAWAY = 12


_DATA = int(FrameType.DATA)
_NOTHING = memoryview(b"")
_KNOWN = frozenset(int(kind) for kind in FrameType)


def preface(versions: tuple[int, int] = VERSIONS) -> bytes:
    """The first 16 bytes that a side sends, with the lowest and highest version it speaks."""
    return PREFACE.pack(MAGIC, *versions, 0)


def read_preface(data: bytes, versions: tuple[int, int] = VERSIONS) -> int:
    """The version to speak, from the other side's preface. Raises `ProtocolError` or `HandshakeRefused`."""
    magic: bytes
    low: int
    high: int
    magic, low, high, _ = PREFACE.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"not a p2pml peer: it opened with {data!r}{_guess(data)}")
    version = min(high, versions[1])
    if version < max(low, versions[0]):
        raise HandshakeRefused(
            f"no common wire version: the peer speaks {low} to {high}, this side {versions[0]} to {versions[1]}"
        )
    return version


def slice_for(bytes_per_second: float) -> int:
    """How much of a large message to put in one frame: what the link carries in a millisecond, from 64 KiB to 1 MiB.

    Control frames and other channels wait for one frame at most, so a slow link gets small ones; a fast link loses a
    quarter of its speed to the handling of frames of 256 KiB.
    """
    wanted = int(bytes_per_second * SLICE_SECONDS) // MIN_SLICE * MIN_SLICE
    return min(max(wanted, MIN_SLICE), MAX_PAYLOAD)


def _guess(data: bytes) -> str:
    if data.split(b" ", 1)[0] in (b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"DELETE"):
        return " (an HTTP request)"
    return " (a TLS handshake)" if data[:2] == b"\x16\x03" else ""


def frame(
    kind: int, flags: int = 0, channel: int = 0, sequence: int = 0, head: bytes = b"", payload: bytes | memoryview = b""
) -> bytes:
    """A whole frame as bytes; for control frames and small messages."""
    header = HEADER.pack(kind, flags, len(head), channel, len(payload), sequence)
    return b"".join((header, head, payload)) if head or payload else header


class Target(Protocol):
    """Where a DATA frame's payload goes."""

    def direct(self, limit: int, more: int) -> memoryview | None:
        """Memory for the next bytes, at most `limit` of them, to be filled in place; None to have them through `feed`.

        If all `limit` bytes and at least `more` others have room in it, it is that much longer: what is put there is read
        and then overwritten.
        """

    def advance(self, count: int) -> None:
        """`count` bytes were put into what `direct` returned."""

    def feed(self, data: memoryview) -> None:
        """Take a copy of the next bytes."""


class ControlHandler(Protocol):
    """What a `FrameReader` calls for all but data, in order of arrival."""

    def preface_received(self, data: bytes) -> None:
        """The other side's 16 opening bytes."""

    def control_received(self, kind: int, flags: int, channel: int, sequence: int, head: bytes, payload: bytes) -> None:
        """A whole control frame."""


class DataHandler(Protocol):
    """What a `FrameReader` calls for data. Views are valid during the call only."""

    def data_received(self, flags: int, channel: int, sequence: int, head: memoryview, payload: memoryview) -> None:
        """A whole DATA frame that was found in the staging buffer."""

    def data_started(self, flags: int, channel: int, sequence: int, head: memoryview, length: int) -> Target:
        """A DATA frame whose payload of `length` bytes is still coming."""

    def data_finished(self) -> bool:
        """The payload that was started is complete; true if the next frame continues the same message."""


class FrameReader:
    """Cuts incoming bytes into frames, handing out the memory to receive them into.

    Use it as `asyncio.BufferedProtocol` is used: `get_buffer`, fill it, `buffer_updated`. Raises `ProtocolError` (or what
    the handler raises), after which it must not be used again but through `discard`.
    """

    def __init__(self, control: ControlHandler, data: DataHandler) -> None:
        self._control = control
        self._data = data
        self._staging = memoryview(bytearray(STAGING))
        self._start = 0
        self._end = 0
        self._in_preface = True
        self._target: Target | None = None
        self._remaining = 0
        self._view: memoryview | None = None
        self._ask = STAGING
        self._discarding = False

    def discard(self) -> None:
        """From now on, take bytes and drop them."""
        self._discarding = True
        self._target = self._view = None

    @property
    def midway(self) -> bool:
        """Whether the stream stands inside a frame: an end here is a truncation."""
        return self._target is not None or self._end > self._start

    def get_buffer(self) -> memoryview:
        """Memory for the next bytes from the wire; never empty."""
        if self._target is not None:
            view = self._target.direct(self._remaining, HEADER_SIZE)
            if view is not None:
                self._view = view
                return view
            return self._staging[: min(self._remaining, STAGING)]
        if self._discarding:
            return self._staging
        if self._end >= STAGING - BETWEEN_FRAMES:
            self._compact()
        return self._staging[self._end : self._end + self._ask]

    def _compact(self) -> None:
        rest = bytes(self._staging[self._start : self._end])
        self._staging[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def buffer_updated(self, count: int) -> None:
        """`count` bytes were put into the memory that `get_buffer` returned."""
        if self._discarding:
            return
        if self._target is not None:
            self._payload_updated(self._target, count)
            return
        self._end += count
        if self._in_preface:
            if self._end < PREFACE.size:
                return
            self._in_preface = False
            self._start = PREFACE.size
            self._control.preface_received(bytes(self._staging[: PREFACE.size]))
        self._parse()

    def _payload_updated(self, target: Target, count: int) -> None:
        view, self._view = self._view, None
        own = min(count, self._remaining)
        if view is None:
            target.feed(self._staging[:own])
        else:
            if count > own:
                # The header of the next frame came along, in the place of bytes that are still to come.
                self._staging[: count - own] = view[own:count]
                self._end = count - own
            target.advance(own)
        self._remaining -= own
        if not self._remaining:
            self._finish()
            if self._end and not self._discarding:
                self._parse()

    def _finish(self) -> None:
        self._target = None
        self._ask = BETWEEN_FRAMES if self._data.data_finished() else STAGING

    def _parse(self) -> None:
        staging, control, data, start, end = self._staging, self._control, self._data, self._start, self._end
        unpack, received = HEADER.unpack_from, data.data_received
        while end - start >= HEADER_SIZE:
            kind, flags, head_length, channel, length, sequence = unpack(staging, start)
            body = start + HEADER_SIZE
            payload = body + head_length
            if kind == _DATA:
                if length > MAX_PAYLOAD or head_length > MAX_HEAD:
                    raise ProtocolError(
                        f"a DATA frame declares {head_length} + {length} bytes (at most {MAX_HEAD} + {MAX_PAYLOAD})"
                    )
                if payload > end:
                    break
                head, stop = staging[body:payload] if head_length else _NOTHING, payload + length
                if stop <= end:
                    start = stop
                    received(flags, channel, sequence, head, staging[payload:stop])
                    if self._discarding:
                        return
                    continue
                target = data.data_started(flags, channel, sequence, head, length)
                target.feed(staging[payload:end])
                self._target, self._remaining = target, stop - end
                self._start = self._end = 0
                return
            if kind not in _KNOWN:
                raise ProtocolError(f"unknown frame type {kind}")
            if length > MAX_CONTROL or head_length > MAX_HEAD:
                raise ProtocolError(f"a {FrameType(kind).name} frame declares {head_length} + {length} bytes")
            stop = payload + length
            if stop > end:
                break
            start = stop
            control.control_received(
                kind, flags, channel, sequence, bytes(staging[body:payload]), bytes(staging[payload:stop])
            )
            if self._discarding:
                return
        if start == end:
            start = end = 0
        self._start, self._end = start, end
        self._ask = STAGING
