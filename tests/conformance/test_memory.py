from __future__ import annotations

import asyncio

import pytest

from p2pml.address import Address
from p2pml.errors import TransportError
from p2pml.transport import Transport, transport_for
from p2pml.transports.memory import SOCKET_BUFFER, MemoryTransport
from tests.conformance.ground import Ground, fill, stop_reading
from tests.conformance.recorder import Recorder
from tests.conformance.suite import TransportSuite

PLACE = Address.parse("memory://conformance")


class TestMemory(TransportSuite):
    def transport(self) -> Transport:
        return MemoryTransport()

    def address(self) -> Address:
        return PLACE

    async def test_a_small_write_is_taken_over_at_once(self, ground: Ground) -> None:
        near, far = await ground.pair()
        near.pipe.set_write_buffer_limits(high=0)
        await stop_reading(far)
        near.pipe.write(bytes(SOCKET_BUFFER))
        assert "pause_writing" not in near.calls
        near.pipe.write(b"1")
        assert near.writing_paused
        assert near.pipe.get_write_buffer_size() == 1

    async def test_an_empty_buffer_is_the_protocols_fault(self, ground: Ground) -> None:
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context["exception"]))
        near, far = await ground.pair(far=lambda: Recorder(sizes=iter([0])))
        near.pipe.write(b"x")
        await far.until(lambda far: far.lost)
        assert "empty buffer" in str(faults[0])

    async def test_aborting_when_asked_for_a_buffer(self, ground: Ground) -> None:
        near, far = await ground.pair(far=lambda: Recorder(hooks={"get_buffer": lambda end: end.pipe.abort()}))
        near.pipe.write(b"x")
        await far.until(lambda far: far.lost)
        assert far.calls == ["connection_made", "connection_lost"]

    async def test_closing_both_ends_that_no_longer_read(self, ground: Ground) -> None:
        ends = await ground.pair()
        for end in ends:
            await stop_reading(end)
        for end in ends:
            await fill(end, bytes(SOCKET_BUFFER))
        for end in ends:
            end.pipe.close()
        for end in ends:
            await end.until(lambda end: end.lost)
            assert isinstance(end.cause, ConnectionResetError)

    async def test_writing_to_an_end_that_is_gone(self, ground: Ground) -> None:
        near, far = await ground.pair(Recorder(keep_open=True))
        far.pipe.close()
        await near.until(lambda near: near.eof)
        await far.until(lambda far: far.lost)
        assert not near.lost
        near.pipe.write(b"x")
        await near.until(lambda near: near.lost)
        assert isinstance(near.cause, BrokenPipeError)


def test_a_name_belongs_to_its_event_loop() -> None:
    async def listen() -> None:
        await MemoryTransport().listen(PLACE, Recorder)

    async def dial_from_another_loop() -> None:
        with pytest.raises(TransportError, match="another event loop"):
            await MemoryTransport().dial(PLACE, Recorder)
        listener = await MemoryTransport().listen(PLACE, Recorder)  # the first one's loop is closed
        await listener.close()

    asyncio.run(listen())
    asyncio.run(dial_from_another_loop())


def test_it_is_found_by_scheme() -> None:
    assert isinstance(transport_for(PLACE), MemoryTransport)
