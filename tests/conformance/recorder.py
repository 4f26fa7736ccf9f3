"""A protocol that records what a transport does to it, and notes every breach of the rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import cast

UNTOUCHED = 0xA5


class Recorder(asyncio.BufferedProtocol):
    """Keeps all bytes in `received`, the callbacks in `calls`, and what the transport did wrong in `faults`.

    `sizes` are those of the buffers handed out. `echo` sends everything back, with back-pressure. `hooks` are run
    inside the callback of their name. `sockname` and `peername` are the pipe's, asked for when it was made.
    """

    pipe: asyncio.Transport

    def __init__(
        self,
        *,
        sizes: Iterator[int] | None = None,
        echo: bool = False,
        keep_open: bool = False,
        hooks: dict[str, Callable[[Recorder], object]] | None = None,
    ) -> None:
        self.received = bytearray()
        self.calls: list[str] = []
        self.faults: list[str] = []
        self.writing_paused = False
        self.cause: BaseException | None = None
        self._sizes = sizes or repeat(64 * 1024)
        self._echo = echo
        self._keep_open = keep_open
        self._hooks = hooks or {}
        self._buffer: bytearray | None = None
        self._changed = asyncio.Event()

    @property
    def connected(self) -> bool:
        return "connection_made" in self.calls

    @property
    def eof(self) -> bool:
        return "eof_received" in self.calls

    @property
    def lost(self) -> bool:
        return "connection_lost" in self.calls

    async def until(self, condition: Callable[[Recorder], bool]) -> None:
        """Wait until something that happened made `condition` true."""
        while not condition(self):
            self._changed.clear()
            await self._changed.wait()

    async def has(self, count: int) -> None:
        """Wait for that many bytes."""
        await self.until(lambda self: len(self.received) >= count)

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Write, then wait while writing is paused, or until the pipe is lost."""
        self.pipe.write(data)
        await self.until(lambda self: not self.writing_paused or self.lost)

    def _note(self, call: str) -> None:
        if call == "connection_made":
            self._check(not self.calls, "connection_made comes first and once")
        else:
            self._check(self.connected, f"{call} before connection_made")
        self._check(not self.lost, f"{call} after connection_lost")
        if not self.calls or self.calls[-1] != call or call != "buffer_updated":
            self.calls.append(call)
        if hook := self._hooks.get(call):
            hook(self)
        self._changed.set()

    def _check(self, right: bool, rule: str) -> None:
        if not right:
            self.faults.append(f"{rule} (calls: {self.calls[-8:]})")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.pipe = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self.sockname, self.peername = (transport.get_extra_info(end) for end in ("sockname", "peername"))
        self._note("connection_made")

    def get_buffer(self, sizehint: int) -> memoryview:
        self._check(not self.eof, "get_buffer after eof_received")
        if hook := self._hooks.get("get_buffer"):
            hook(self)
        # It may be asked for again without having been used, when there was nothing to read after all.
        self._buffer = self._buffer or bytearray([UNTOUCHED]) * next(self._sizes)
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            self._check(False, "buffer_updated without get_buffer")
            return
        self._check(0 < nbytes <= len(buffer), f"buffer_updated({nbytes}) of {len(buffer)} bytes")
        self._check(buffer.count(UNTOUCHED, nbytes) == len(buffer) - nbytes, "written beyond what was announced")
        self.received += memoryview(buffer)[:nbytes]
        if self._echo:
            self.pipe.write(memoryview(buffer)[:nbytes])
        self._note("buffer_updated")

    def eof_received(self) -> bool:
        self._buffer = None  # a loop may learn of the end only by reading
        self._check(not self.eof, "eof_received twice")
        self._note("eof_received")
        return self._keep_open

    def connection_lost(self, exc: BaseException | None) -> None:
        self.cause = exc
        self._note("connection_lost")

    def pause_writing(self) -> None:
        self._check(not self.writing_paused, "pause_writing twice")
        self.writing_paused = True
        if self._echo:
            self.pipe.pause_reading()
        self._note("pause_writing")

    def resume_writing(self) -> None:
        self._check(self.writing_paused, "resume_writing without pause_writing")
        self.writing_paused = False
        if self._echo:
            self.pipe.resume_reading()
        self._note("resume_writing")
