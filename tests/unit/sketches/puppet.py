"""A machine that does what a test commands, for the tests of `tests.driver`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from p2pml import statemachine as sm
from p2pml.errors import MessageError
from p2pml.statemachine import Effect, Received, Send, StateMachine, on, place
from p2pml.wire.codec import TensorLike, message
from p2pml.wire.options import ChannelOptions
from tests.driver import Cluster

SEEDS = st.integers(0, 1 << 32)


@message("driver/note")
class Note:
    number: int
    tensor: TensorLike | None = None


class Puppet(StateMachine):
    """Remembers its events; its effects are those that the test commands."""

    channels = {
        "one": ChannelOptions(messages=2, queue=4),
        "two": ChannelOptions(),
        "manual": ChannelOptions(manual=True),
    }

    def __init__(self) -> None:
        self.events: list[sm.Event] = []
        self.buffer = bytearray(8)

    @on(sm.Started, sm.PeerJoined, sm.PeerLeft, sm.CreditGranted, sm.Sent, sm.Delivered, sm.SendFailed)
    @on(sm.TimerFired, sm.Computed, sm.ComputeFailed, Received[Note], sm.Stopping)
    def remember(self, event: sm.Event) -> None:
        self.events.append(event)

    @on("do")
    def do(self, event: sm.Command) -> Iterable[Effect]:
        return event.value if isinstance(event.value, list) else [event.value]

    @on("fail")
    def fail(self, event: sm.Command) -> None:
        raise event.value

    @place(Note)
    def into(self, peer: str, head: Any) -> list[bytearray] | None:
        if head.fields["number"] < 0:
            raise MessageError("no negative notes")
        return [self.buffer] if [spec.nbytes for spec in head.specs] == [8] else None

    def numbers(self, channel: str) -> list[int]:
        return [
            event.message.number for event in self.events if isinstance(event, Received) and event.channel == channel
        ]

    def all(self, kind: type[sm.Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def pair(seed: int, **options: Any) -> tuple[Cluster, Puppet, Puppet]:
    a, b = Puppet(), Puppet()
    cluster = Cluster({"a": a, "b": b}, seed, **options)
    cluster.run()
    return cluster, a, b


def notes(count: int, channel: str, **options: Any) -> list[Effect]:
    return [Send("b", Note(number), channel, tag=(channel, number), **options) for number in range(count)]
