"""A protocol of one's own: gossip averaging between nodes on real TCP links. Run: python examples/gossip.py 4"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack

import numpy as np

from p2pml import ChannelOptions, Host, Node, StateMachine, TensorLike, message, on
from p2pml import statemachine as sm


@message("gossip/half")
class Half:
    values: TensorLike
    answer: bool


class Gossip(StateMachine):
    """Two peers swap halves, so each ends with their mean. One that waits for an answer itself gives a half back as it came."""

    channels = {"gossip": ChannelOptions()}

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.peers: list[str] = []
        self.asked: str | None = None

    @on(sm.PeerJoined, sm.PeerLeft)
    def neighbours_changed(self, event: sm.PeerJoined | sm.PeerLeft) -> None:
        (self.peers.append if isinstance(event, sm.PeerJoined) else self.peers.remove)(event.peer)
        self.asked = self.asked if self.asked in self.peers else None

    @on(sm.Started, sm.TimerFired)
    def push(self, event: sm.Event) -> Iterator[sm.Effect]:
        yield sm.SetTimer("push", self.random.uniform(0.005, 0.02))
        if self.peers and self.asked is None:
            self.asked = self.random.choice(self.peers)
            yield sm.Send(self.asked, Half(self.values / 2, answer=False), "gossip")

    @on(sm.Received[Half])
    def average(self, event: sm.Received[Half]) -> Iterator[sm.Effect]:
        theirs, is_answer = event.message.values.numpy(), event.message.answer
        if not is_answer:
            yield sm.Send(event.peer, Half(theirs if self.asked else self.values / 2, answer=True), "gossip")
        if is_answer or not self.asked:
            self.values = self.values / 2 + theirs
            yield sm.Report("exchange", {"mean": float(self.values.mean())})
        self.asked = None if is_answer else self.asked

    @on(sm.Stopping)
    def stop(self, event: sm.Stopping) -> Iterator[sm.Effect]:
        yield sm.Finish(self.values)


async def main(count: int, exchanges: int = 100) -> None:
    done = asyncio.Semaphore(0)
    hosts: list[Host] = []
    machines = [Gossip(np.full(1000, float(rank))) for rank in range(count)]
    async with AsyncExitStack() as stack:
        for rank, machine in enumerate(machines):
            node = await stack.enter_async_context(Node(f"peer-{rank}", listen=["tcp://127.0.0.1:0"]))
            for other in hosts:
                await node.dial(other.node.addresses[0])
            host = Host(machine, node, seed=rank, report=lambda name, fields: done.release())
            hosts.append(await stack.enter_async_context(host))
        for _ in range(count * exchanges):
            await done.acquire()
    print("the mean is", (count - 1) / 2, "and the peers have", [round(float(machine.values.mean()), 3) for machine in machines])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 4))
