"""What any transport must do. For one of your own, derive a test class and say how to make it and where it listens::

class TestCarrierPigeon(TransportSuite):
    def transport(self):
        return PigeonTransport()

    def address(self):
        return Address.parse("pigeon://loft")
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import count, pairwise
from typing import Any

import pytest

from p2pml.address import Address, end_address
from p2pml.errors import AddressInUse, TransportError
from p2pml.transport import Transport
from tests.conformance.ground import MIB, TICKS, Ground, fill, stop_reading
from tests.conformance.recorder import Recorder

KIB = 1024
SIZES = [1, 2, 1000, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 256 * KIB + 1, MIB, 8 * MIB]
CALLBACKS = ["connection_made", "get_buffer", "buffer_updated", "pause_writing", "resume_writing", "eof_received"]
# uvloop crashes when a pipe is ended inside get_buffer, and asyncio would call connection_lost twice when it is inside
# resume_writing: there a protocol puts it off by one turn of the loop.
DEFERRED = {"get_buffer", "resume_writing"}


class TransportSuite:
    def transport(self) -> Transport:
        raise NotImplementedError

    def address(self) -> Address:
        """Where to listen: a name or any free port."""
        raise NotImplementedError

    @pytest.fixture
    async def ground(self) -> AsyncIterator[Ground]:
        ground = Ground(self.transport(), self.address())
        yield ground
        await ground.end()

    # -------------------------------------------------------------------------------------------- bytes

    @pytest.mark.parametrize("size", SIZES)
    async def test_echo_of_any_size_cut_anywhere(self, ground: Ground, size: int) -> None:
        draw = random.Random(size)
        most = max(1, size // 3)
        near, _ = await ground.pair(
            Recorder(sizes=(draw.randint(1 + most // 50, most) for _ in count())), lambda: Recorder(echo=True)
        )
        data = draw.randbytes(size)
        cuts = [0, *sorted(draw.choices(range(size + 1), k=20)), size]
        for start, stop in pairwise(cuts):
            await near.send(memoryview(data)[start:stop])  # some are empty
        await near.has(size)
        assert near.received == data

    async def test_both_directions_at_once(self, ground: Ground) -> None:
        near, far = await ground.pair()
        there, back = random.Random(1).randbytes(4 * MIB), random.Random(2).randbytes(4 * MIB)

        async def send(end: Recorder, data: bytes) -> None:
            for start in range(0, len(data), 100_000):
                await end.send(memoryview(data)[start : start + 100_000])

        async with asyncio.TaskGroup() as group:
            group.create_task(send(near, there))
            group.create_task(send(far, back))
            group.create_task(far.has(len(there)))
            group.create_task(near.has(len(back)))
        assert far.received == there
        assert near.received == back

    async def test_many_small_writes_in_order(self, ground: Ground) -> None:
        near, far = await ground.pair()
        for number in range(5000):
            await near.send(number.to_bytes(4, "big"))
        near.pipe.writelines([b"the", b"", bytearray(b" end")])
        await far.has(20_007)
        assert far.received == b"".join(number.to_bytes(4, "big") for number in range(5000)) + b"the end"

    async def test_bytes_written_in_connection_made_arrive(self, ground: Ground) -> None:
        greet = {"connection_made": lambda end: end.pipe.write(b"hello")}
        near, far = await ground.pair(Recorder(hooks=greet), lambda: Recorder(hooks=greet))
        await near.has(5)
        await far.has(5)
        assert near.received == far.received == b"hello"

    async def test_ends_have_addresses(self, ground: Ground) -> None:
        address = await ground.listen()
        near, far = await ground.dial(address), await ground.next_accepted()
        assert end_address(address.scheme, near.peername) == end_address(address.scheme, far.sockname) == address
        assert end_address(address.scheme, near.sockname) == end_address(address.scheme, far.peername) != address

    # -------------------------------------------------------------------------------------------- flow

    async def test_a_reader_that_pauses_stops_the_writer(self, ground: Ground) -> None:
        near, far = await ground.pair()
        await stop_reading(far)
        piece = random.Random(0).randbytes(64 * KIB)
        written = await fill(near, piece)
        assert near.pipe.get_write_buffer_size() > 0
        held = len(far.received)
        far.pipe.resume_reading()
        await near.until(lambda near: not near.writing_paused)
        await far.has(written)
        assert held < written
        assert far.received == piece * (written // len(piece))

    async def test_paused_reading_delivers_nothing(self, ground: Ground) -> None:
        near, far = await ground.pair()
        other_near, other_far = await ground.dial(ground.listeners[0].addresses[0]), await ground.next_accepted()
        far.pipe.pause_reading()
        far.pipe.pause_reading()
        assert not far.pipe.is_reading()
        await near.send(b"later")
        await other_near.send(b"now")
        await other_far.has(3)
        assert not far.received
        far.pipe.resume_reading()
        far.pipe.resume_reading()
        assert far.pipe.is_reading()
        await far.has(5)
        assert far.received == b"later"

    @pytest.mark.parametrize("size", [100, 64 * KIB, 256 * KIB, 5 * MIB])
    async def test_with_a_mark_of_0_memory_is_free_after_resume_writing(self, ground: Ground, size: int) -> None:
        near, far = await ground.pair()
        near.pipe.set_write_buffer_limits(high=0)
        assert near.pipe.get_write_buffer_limits() == (0, 0)
        await stop_reading(far)
        memory = bytearray(size)
        rounds = 0
        while not near.writing_paused:
            memory[:] = bytes([rounds % 251]) * size
            near.pipe.write(memory)
            rounds += 1
            assert near.writing_paused == (near.pipe.get_write_buffer_size() > 0)
        far.pipe.resume_reading()
        for _ in range(8):
            await near.until(lambda near: not near.writing_paused)
            assert near.pipe.get_write_buffer_size() == 0
            memory[:] = bytes([rounds % 251]) * size
            near.pipe.write(memory)
            rounds += 1
        await near.until(lambda near: not near.writing_paused)
        memory[:] = b"\xff" * size
        await far.has(rounds * size)
        for number in range(rounds):
            assert far.received.count(number % 251, number * size, (number + 1) * size) == size, number

    async def test_limits_that_make_no_sense(self, ground: Ground) -> None:
        near, _ = await ground.pair()
        with pytest.raises(ValueError, match="high"):
            near.pipe.set_write_buffer_limits(high=1, low=2)
        near.pipe.set_write_buffer_limits(low=1000)
        assert near.pipe.get_write_buffer_limits()[0] == 1000

    # -------------------------------------------------------------------------------------------- endings

    async def test_half_close(self, ground: Ground) -> None:
        near, far = await ground.pair(far=lambda: Recorder(keep_open=True))
        if not near.pipe.can_write_eof():
            pytest.skip("it has no half-close")
        request, reply = random.Random(1).randbytes(3 * MIB), random.Random(2).randbytes(3 * MIB)
        near.pipe.write(request)
        near.pipe.write_eof()
        near.pipe.write_eof()
        with pytest.raises(RuntimeError):
            near.pipe.write(b"more")
        await far.until(lambda far: far.eof)
        assert far.received == request
        far.pipe.write(reply)
        far.pipe.close()
        await near.until(lambda near: near.lost)
        await far.until(lambda far: far.lost)
        assert near.received == reply
        assert near.calls[-2:] == ["eof_received", "connection_lost"]
        assert near.cause is far.cause is None

    async def test_close_after_half_close_is_no_second_end(self, ground: Ground) -> None:
        near, far = await ground.pair(far=lambda: Recorder(keep_open=True))
        if not near.pipe.can_write_eof():
            pytest.skip("it has no half-close")
        near.pipe.write_eof()
        await far.until(lambda far: far.eof)
        near.pipe.close()
        await near.until(lambda near: near.lost)
        far.pipe.close()
        await far.until(lambda far: far.lost)

    async def test_close_delivers_what_was_written(self, ground: Ground) -> None:
        near, far = await ground.pair()
        await stop_reading(far)
        data = random.Random(0).randbytes(8 * MIB)
        near.pipe.write(data)
        near.pipe.close()
        near.pipe.close()
        assert near.pipe.is_closing()
        far.pipe.resume_reading()
        await far.until(lambda far: far.lost)
        await near.until(lambda near: near.lost)
        assert far.received == data
        assert far.calls[-2:] == ["eof_received", "connection_lost"]
        assert near.cause is far.cause is None

    async def test_abort_drops_what_was_written(self, ground: Ground) -> None:
        near, far = await ground.pair()
        await stop_reading(far)
        written = await fill(near, bytes(64 * KIB)) + 32 * MIB
        near.pipe.write(bytes(32 * MIB))
        near.pipe.abort()
        near.pipe.abort()
        assert near.pipe.is_closing()
        await near.until(lambda near: near.lost)
        far.pipe.resume_reading()
        await far.until(lambda far: far.lost)
        assert len(far.received) < written

    async def test_abort_after_close_gives_up_the_flush(self, ground: Ground) -> None:
        near, far = await ground.pair()
        await stop_reading(far)
        await fill(near, bytes(64 * KIB))
        near.pipe.close()
        near.pipe.abort()
        await near.until(lambda near: near.lost)

    @pytest.mark.parametrize("ending", ["abort", "close"])
    @pytest.mark.parametrize("callback", CALLBACKS)
    async def test_ending_inside_a_callback(self, ground: Ground, callback: str, ending: str) -> None:
        def stop(end: Recorder) -> None:
            if callback in DEFERRED:
                asyncio.get_running_loop().call_soon(lambda: end.lost or getattr(end.pipe, ending)())
            else:
                getattr(end.pipe, ending)()

        near, far = await ground.pair(Recorder(hooks={callback: stop}))
        if callback.endswith("_writing"):
            await stop_reading(far)
            await fill(near, bytes(64 * KIB))
            far.pipe.resume_reading()
        elif not far.lost:
            far.pipe.write(b"x" * 100)
            if callback == "eof_received":
                far.pipe.close()
        await near.until(lambda near: near.lost)
        await far.until(lambda far: far.lost)

    @pytest.mark.parametrize("reading", [True, False])
    @pytest.mark.parametrize("ending", ["abort", "close"])
    async def test_the_writer_learns_that_the_reader_has_gone(self, ground: Ground, ending: str, reading: bool) -> None:
        near, far = await ground.pair()
        await stop_reading(far)
        if not reading:
            await stop_reading(near)
        await fill(near, bytes(64 * KIB))
        getattr(far.pipe, ending)()
        await near.until(lambda near: near.lost)

    async def test_the_reader_leaves_in_the_middle(self, ground: Ground) -> None:
        leave = {"buffer_updated": lambda end: end.pipe.close() if len(end.received) > MIB else None}
        near, far = await ground.pair(far=lambda: Recorder(hooks=leave))
        data = bytes(256 * KIB)
        while not near.lost and not near.pipe.is_closing():
            await near.send(data)
            await asyncio.sleep(0)
        await near.until(lambda near: near.lost)
        await far.until(lambda far: far.lost)

    # -------------------------------------------------------------------------------------------- dialing, listening

    async def test_a_refused_dial(self, ground: Ground) -> None:
        address = await ground.listen()
        await ground.listeners[0].close()
        never = Recorder()
        with pytest.raises(TransportError) as refused:
            await ground.transport.dial(address, lambda: never)
        assert str(address) in str(refused.value)
        assert not never.connected

    @pytest.mark.parametrize("ticks", TICKS)
    async def test_a_cancelled_dial_leaves_nothing_open(self, ground: Ground, ticks: int) -> None:
        address = await ground.listen()
        recorder = Recorder()
        dialing = asyncio.ensure_future(ground.dial(address, recorder))
        for _ in range(ticks):
            await asyncio.sleep(0)
        dialing.cancel()
        await asyncio.wait([dialing])
        if not dialing.cancelled():
            recorder.pipe.close()
        if recorder.connected:
            await recorder.until(lambda recorder: recorder.lost)
        after = await ground.dial(address)  # what the listener knows of the first, it has accepted before this one
        while (far := await ground.next_accepted()).pipe.get_extra_info("peername") != after.pipe.get_extra_info(
            "sockname"
        ):
            await far.until(lambda far: far.lost)

    @pytest.mark.parametrize("ticks", TICKS)
    async def test_a_listener_closed_while_somebody_dials(self, ground: Ground, ticks: int) -> None:
        address = await ground.listen()
        dialing = asyncio.ensure_future(ground.dial(address))
        for _ in range(ticks):
            await asyncio.sleep(0)
        await ground.listeners[0].close()
        made = ground.accepted.qsize()
        await asyncio.wait([dialing])
        assert dialing.exception() is None or isinstance(dialing.exception(), TransportError)
        if made:
            far = await ground.next_accepted()
            await (await dialing).send(b"served")
            await far.has(6)
        elif dialing.exception() is None:
            await (await dialing).until(lambda near: near.lost)
        assert ground.accepted.empty(), "accepted after close returned"

    async def test_an_address_in_use(self, ground: Ground) -> None:
        address = await ground.listen()
        with pytest.raises(AddressInUse) as taken:
            await ground.listen(place=address)
        assert str(address) in str(taken.value)
        assert await ground.dial(address)  # the first is unharmed

    async def test_listening_again_at_once(self, ground: Ground) -> None:
        address = await ground.listen()
        first, accepted = await ground.dial(address), await ground.next_accepted()
        second, other = await ground.dial(address), await ground.next_accepted()
        other.pipe.close()  # the listening side ends first, which keeps its port for a while
        await second.until(lambda end: end.lost)
        await ground.listeners[0].close()
        await ground.listen(place=address)
        third, last = await ground.dial(address), await ground.next_accepted()
        await first.send(b"old")
        await accepted.has(3)
        await third.send(b"new")
        await last.has(3)
        assert accepted.received == b"old"
        assert last.received == b"new"

    async def test_pipes_outlive_their_listener(self, ground: Ground) -> None:
        near, far = await ground.pair(far=lambda: Recorder(echo=True))
        await ground.listeners[0].close()
        await ground.listeners[0].close()
        await near.send(b"still here")
        await near.has(10)
        assert not near.lost
        assert not far.lost

    async def test_a_hundred_dials_at_once(self, ground: Ground) -> None:
        address = await ground.listen(lambda: Recorder(echo=True))

        async def call(number: int) -> bytes:
            near = await ground.dial(address)
            await near.send(b"%03d" % number)
            await near.has(3)
            near.pipe.close()
            return bytes(near.received)

        assert await asyncio.gather(*map(call, range(100))) == [b"%03d" % number for number in range(100)]

    async def test_addresses_can_be_dialed(self, ground: Ground) -> None:
        await ground.listen()
        for address in ground.listeners[0].addresses:
            assert Address.parse(str(address)) == address
            assert address.port != 0
            assert address.host not in ("", "0.0.0.0", "::")
            near, far = await ground.dial(address), await ground.next_accepted()
            await near.send(b"hello")
            await far.has(5)

    async def test_a_failing_protocol_ends_its_pipe_only(self, ground: Ground) -> None:
        def fail(end: Recorder) -> None:
            raise ZeroDivisionError("on purpose")

        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        near, far = await ground.pair(far=lambda: Recorder(hooks={"buffer_updated": fail}))
        near.pipe.write(b"x")
        await far.until(lambda far: far.lost)
        await near.until(lambda near: near.lost)
        assert isinstance(far.cause, ZeroDivisionError)
        assert [type(context["exception"]) for context in faults] == [ZeroDivisionError]
