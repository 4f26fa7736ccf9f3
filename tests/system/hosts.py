"""What the tests of hosts share: a machine that does as a test says, and two nodes with a machine each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from p2pml import statemachine as sm
from p2pml.host import Host
from p2pml.node import Node
from p2pml.wire.codec import TensorLike, message
from p2pml.wire.options import ChannelOptions

_names = itertools.count()


@message("system/word")
class Word:
    text: str


@message("system/heap")
class Heap:
    number: int
    values: TensorLike


@message("system/foreign")
class Foreign:
    text: str = ""


Script = Callable[[Any], Iterable[sm.Effect]]


class Puppet(sm.StateMachine):
    """Writes down every event, and answers one of a class in `script` with what that yields."""

    name = "puppet"
    channels = {
        "data": ChannelOptions(),
        "one": ChannelOptions(messages=1),
        "hand": ChannelOptions(manual=True),
        "short": ChannelOptions(messages=1, queue=2),
    }

    def __init__(self, script: dict[type, Script] | None = None) -> None:
        self.script = script or {}
        self.seen: list[sm.Event] = []
        self._more = asyncio.Event()

    @sm.on(sm.Started, sm.PeerJoined, sm.PeerLeft, sm.Received[Word], sm.Received[Heap], sm.CreditGranted, sm.Sent)
    @sm.on(sm.Delivered, sm.SendFailed, sm.TimerFired, sm.Computed, sm.ComputeFailed, sm.Stopping)
    @sm.on("do", "ask", "late")
    def note(self, event: sm.Event) -> Iterable[sm.Effect]:
        self.seen.append(event)
        self._more.set()
        if isinstance(event, sm.Command) and event.name == "do":
            yield from event.value
            yield sm.Reply("do")
        elif type(event) in self.script:
            yield from self.script[type(event)](event)
        elif isinstance(event, sm.Stopping):
            yield sm.Finish("stopped")

    def of(self, kind: type[sm.Event]) -> list[Any]:
        """The events of one class, in order."""
        return [event for event in self.seen if isinstance(event, kind)]

    async def until(self, kind: type[sm.Event], count: int = 1) -> Any:
        """Wait for the `count`th event of a class."""
        async with asyncio.timeout(15):
            while len(self.of(kind)) < count:
                self._more.clear()
                await self._more.wait()
        return self.of(kind)[count - 1]


async def do(host: Host, *effects: sm.Effect) -> None:
    """Have a `Puppet` yield these effects now."""
    async with asyncio.timeout(15):
        await host.command("do", effects)


def address(kind: str) -> str:
    """Where to listen, for a kind of transport."""
    return "tcp://127.0.0.1:0" if kind == "tcp" else f"{kind}://host-{next(_names)}"


@asynccontextmanager
async def two(
    kind: str = "memory", a: Puppet | None = None, b: Puppet | None = None
) -> AsyncIterator[tuple[Host, Host]]:
    """Machines on linked nodes 'a' and 'b', which have joined each other."""
    first, second = a or Puppet(), b or Puppet()
    async with (
        Node("a", listen=[address(kind)]) as node_a,
        Node("b") as node_b,
        Host(first, node_a) as host_a,
        Host(second, node_b) as host_b,
    ):
        await node_b.dial(node_a.addresses[0])
        await first.until(sm.PeerJoined)
        await second.until(sm.PeerJoined)
        yield host_a, host_b
