"""One end of a link in a process of its own, and how a link is measured: the same for every contestant of `bench link`.

Rank 0 listens, sends and holds the stopwatch; rank 1 dials, receives and answers. (For WebSockets that is the quicker
direction: only what clients send is masked.)
"""

from __future__ import annotations

import statistics
import struct
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar

from p2pml.cli.bench.harness import ContestantFailed, Member

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float32]]

LENGTH = struct.Struct("!I")
"""The length prefix of contestants that have no messages of their own."""
ACK = b"\x06"


class End(Member):
    """What a contestant implements: a message and a tensor, there and back; and what is measured with it.

    Contestants with more than one way to send add its name to `bulk` or `small`, and methods `send_NAME`, `receive_NAME`.
    """

    bulk: ClassVar[tuple[str, ...]] = ("tensor",)
    small: ClassVar[tuple[str, ...]] = ("message",)
    target: Array
    """Where this end may receive tensors: memory of the right size that was used before."""

    @abstractmethod
    async def send_message(self, data: bytes) -> None:
        """Send a small message."""

    @abstractmethod
    async def receive_message(self) -> bytes:
        """The next small message."""

    @abstractmethod
    async def send_tensor(self, tensor: Array) -> None:
        """Send float32 numbers, which don't change until the receiver has them all."""

    @abstractmethod
    async def receive_tensor(self) -> Array:
        """The next tensor, in `target` if the contestant can receive into given memory."""

    def _way(self, name: str) -> tuple[Callable[[Any], Awaitable[None]], Callable[[], Awaitable[Any]]]:
        return getattr(self, f"send_{name}"), getattr(self, f"receive_{name}")

    async def throughput(self, way: str, size: int, messages: int) -> float:
        """Bytes per second one way, until the last of `messages` tensors of `size` bytes is acknowledged."""
        import numpy as np

        tensor = np.arange(size // 4, dtype=np.float32)
        if self.rank:
            self.target = np.zeros_like(tensor)
            self.target.fill(-1.0)  # touched: the kernel gives memory at its first use
            await self.send_message(ACK)
        else:
            await self._confirmed()  # the receiver is ready
        seconds = 0.0
        for count in (1, messages):  # the first to warm up
            began = time.perf_counter()
            await (self._receive_tensors(way, tensor, count) if self.rank else self._send_tensors(way, tensor, count))
            seconds = time.perf_counter() - began
        if self.rank:
            del self.target
        return messages * tensor.nbytes / seconds

    async def _send_tensors(self, way: str, tensor: Array, count: int) -> None:
        send, _ = self._way(way)
        for _ in range(count):
            await send(tensor)
        await self._confirmed()

    async def _receive_tensors(self, way: str, expected: Array, count: int) -> None:
        import numpy as np

        _, receive = self._way(way)
        got = self.target
        for _ in range(count):
            if got.flags.writeable:
                got[-1] = -1.0  # so that the next one is not taken for granted
            got = await receive()
            if got.shape != expected.shape or got[0] != expected[0] or got[-1] != expected[-1]:
                raise ContestantFailed(f"a tensor arrived damaged: {got.shape}, expected {expected.shape}")
        await self.send_message(ACK)
        if not np.array_equal(got, expected):
            raise ContestantFailed("the last tensor arrived damaged")

    async def _confirmed(self) -> None:
        if await self.receive_message() != ACK:
            raise ContestantFailed("something else than the acknowledgement arrived")

    async def rate(self, way: str, size: int, messages: int) -> float:
        """Messages of `size` bytes per second one way, until the receiver has counted them all."""
        send, receive = self._way(way)
        message = b"x" * size
        seconds = 0.0
        for count in (messages // 10 + 1, messages):
            began = time.perf_counter()
            if self.rank:
                for _ in range(count):
                    if await receive() != message:
                        raise ContestantFailed("a message arrived damaged")
                await self.send_message(ACK)
            else:
                for _ in range(count):
                    await send(message)
                await self._confirmed()
            seconds = time.perf_counter() - began
        return messages / seconds

    async def round_trip(self, way: str, size: int, messages: int) -> float:
        """Median seconds of a message of `size` bytes to the other end and of its answer of the same size."""
        send, receive = self._way(way)
        message = b"x" * size
        trips = []
        for _ in range(messages // 10 + messages):
            began = time.perf_counter()
            if self.rank:
                await receive()
                await send(message)
            else:
                await send(message)
                if await receive() != message:
                    raise ContestantFailed("an answer arrived damaged")
            trips.append(time.perf_counter() - began)
        return statistics.median(trips[-messages:])
