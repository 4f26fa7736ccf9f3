"""A protocol of one's own: gossip averaging. Every peer holds a vector; again and again it averages with a random neighbour.

    python examples/gossip.py 4        # four nodes in this process, over real TCP links
"""

import asyncio
import sys
from contextlib import AsyncExitStack

import numpy as np

from p2pml import ChannelOptions, Host, Node, StateMachine, TensorLike, message, on
from p2pml.statemachine import Finish, PeerJoined, PeerLeft, Received, Report, Send, SetTimer, Started, Stopping, TimerFired


@message("gossip/half")
class Half:
    values: TensorLike
    answer: bool


class Gossip(StateMachine):
    """Two peers swap halves, so each ends with their mean. One that waits for an answer itself gives a half back as it came."""

    channels = {"gossip": ChannelOptions()}

    def __init__(self, values):
        self.values, self.peers, self.asked = values, [], None

    @on(PeerJoined, PeerLeft)
    def neighbours_changed(self, event):
        (self.peers.append if isinstance(event, PeerJoined) else self.peers.remove)(event.peer)
        self.asked = None if self.asked not in self.peers else self.asked

    @on(Started, TimerFired)
    def push(self, event):
        yield SetTimer("push", self.random.uniform(0.005, 0.02))
        if self.peers and self.asked is None:
            self.asked = self.random.choice(self.peers)
            yield Send(self.asked, Half(self.values / 2, answer=False), "gossip")

    @on(Received[Half])
    def average(self, event):
        theirs = event.message.values.numpy()
        if not event.message.answer:
            yield Send(event.peer, Half(theirs if self.asked else self.values / 2, answer=True), "gossip")
        if event.message.answer or not self.asked:
            self.values = self.values / 2 + theirs
            yield Report("exchange", {"spread": float(np.ptp(self.values))})
        self.asked = None if event.message.answer else self.asked

    @on(Stopping)
    def stop(self, event):
        yield Finish(self.values)


async def main(count, exchanges=100):
    async with AsyncExitStack() as stack:
        done, hosts, nodes = asyncio.Semaphore(0), [], []
        for rank in range(count):
            node = await stack.enter_async_context(Node(f"peer-{rank}", listen=["tcp://127.0.0.1:0"]))
            machine = Gossip(np.full(1000, float(rank)))
            hosts.append(await stack.enter_async_context(Host(machine, node, seed=rank, report=lambda *_: done.release())))
            for other in nodes:
                await node.dial(other.addresses[0])
            nodes.append(node)
        for _ in range(count * exchanges):
            await done.acquire()
        for host in hosts:
            await host.stop()
        print("the mean is", (count - 1) / 2, "and the peers have", [round(float(host.machine.values.mean()), 3) for host in hosts])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 4))
