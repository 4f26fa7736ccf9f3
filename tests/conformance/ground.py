"""Where a transport is tried: it keeps hold of all pipes of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pml.address import Address
from p2pml.transport import Listener, Transport
from tests.conformance.recorder import Recorder

MIB = 1024 * 1024
TICKS = range(16)  # turns of the event loop after which something is cut short; a dial takes fewer

Make = Callable[[], Recorder]


class Ground:
    """Listens and dials for a test, and in the end sees that everything is over and was done by the rules."""

    def __init__(self, transport: Transport, place: Address) -> None:
        self.transport = transport
        self.place = place
        self.recorders: list[Recorder] = []
        self.accepted: asyncio.Queue[Recorder] = asyncio.Queue()
        self.listeners: list[Listener] = []

    async def listen(self, make: Make = Recorder, place: Address | None = None) -> Address:
        """Listen, and give the first address to dial."""
        listener = await self.transport.listen(place or self.place, lambda: self._accept(make()))
        self.listeners.append(listener)
        return listener.addresses[0]

    def _accept(self, recorder: Recorder) -> Recorder:
        self.recorders.append(recorder)
        self.accepted.put_nowait(recorder)
        return recorder

    async def dial(self, address: Address, recorder: Recorder | None = None) -> Recorder:
        recorder = recorder or Recorder()
        self.recorders.append(recorder)
        assert await self.transport.dial(address, lambda: recorder) is recorder
        assert recorder.connected, "connection_made comes before dial returns"
        return recorder

    async def next_accepted(self) -> Recorder:
        recorder = await self.accepted.get()
        await recorder.until(lambda recorder: recorder.connected)
        return recorder

    async def pair(self, near: Recorder | None = None, far: Make = Recorder) -> tuple[Recorder, Recorder]:
        """Both ends of a fresh pipe."""
        address = await self.listen(far)
        return await self.dial(address, near), await self.next_accepted()

    async def end(self) -> None:
        for listener in self.listeners:
            await listener.close()
        met = [recorder for recorder in self.recorders if recorder.connected]
        for recorder in met:
            if not recorder.lost:  # asyncio fails at an abort after some connection_lost
                recorder.pipe.abort()
        for recorder in met:
            await recorder.until(lambda recorder: recorder.lost)
        for _ in TICKS:  # a second connection_lost would come now
            await asyncio.sleep(0)
        assert [recorder.faults for recorder in self.recorders if recorder.faults] == []
        assert all(recorder.calls.count("connection_lost") == 1 for recorder in met)


async def stop_reading(end: Recorder) -> None:
    """Pause, and let a delivery that was under way already come first."""
    end.pipe.pause_reading()
    await asyncio.sleep(0)


async def fill(near: Recorder, piece: bytes) -> int:
    """Write until the pipe holds no more; returns the number of bytes."""
    written = 0
    while not near.writing_paused:
        near.pipe.write(piece)
        written += len(piece)
        assert written < 256 * MIB, "there is no back-pressure"
        await asyncio.sleep(0)
    return written
