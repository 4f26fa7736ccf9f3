"""A `Compute` that takes a message over holds its credit, so that what waits for a lane is bounded."""

from __future__ import annotations

from collections.abc import Iterator

from p2pml import statemachine as sm
from p2pml.wire.codec import message
from p2pml.wire.options import ChannelOptions
from tests.driver import Cluster


@message("test/work")
class Work:
    number: int


class Worker(sm.StateMachine):
    name = "test-consumes"
    channels = {"work": ChannelOptions(messages=2)}

    def __init__(self, send: int = 0) -> None:
        self.left = send
        self.waiting = self.most = 0
        self.done: list[int] = []

    @sm.on(sm.PeerJoined)
    def serve(self, event: sm.PeerJoined) -> Iterator[sm.Effect]:
        for number in range(self.left):
            yield sm.Send(event.peer, Work(number), "work")

    @sm.on(sm.Received[Work])
    def take(self, event: sm.Received[Work]) -> Iterator[sm.Effect]:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        yield sm.Compute("work", self.work, (event.message.number,), consumes=event)

    def work(self, number: int) -> int:
        self.waiting -= 1
        return number

    @sm.on(sm.Computed)
    def finished_one(self, event: sm.Computed) -> None:
        self.done.append(event.result)


def test_no_more_waits_than_there_is_credit_for() -> None:
    for seed in range(20):
        worker = Worker()
        cluster = Cluster({"a": Worker(send=20), "b": worker}, seed)
        cluster.run()
        assert worker.done == list(range(20))
        assert worker.most <= 2
