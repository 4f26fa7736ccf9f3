from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from p2pml.statemachine import (
    Command,
    Compute,
    Computed,
    ComputeFailed,
    Effect,
    Effects,
    Event,
    Finish,
    PeerJoined,
    PeerLeft,
    Received,
    Report,
    Send,
    Started,
    StateMachine,
    Stopping,
    TimerFired,
    on,
    place,
)


@dataclass
class Ping:
    count: int


@dataclass
class Pong:
    count: int


class Plain(StateMachine):
    """A handler of every form that is allowed."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    @on(Started)
    def nothing(self, event: Started) -> None:
        self.seen.append(event)

    @on(PeerJoined)
    def listed(self, event: PeerJoined) -> list[Effect]:
        return [Report("joined", {"peer": event.peer}), Send(event.peer, Ping(0), "ball")]

    @on(Received[Ping])
    def generated(self, event: Received[Ping]) -> Iterator[Effect]:
        self.seen.append(event)
        yield Send(event.peer, Pong(event.message.count), "ball")
        yield Report("now", {"now": self.now})

    @on(PeerLeft, TimerFired, Received[Pong], "average")
    def many(self, event: Any) -> Effects:
        self.seen.append(event)
        return ()


def started(machine: StateMachine, seed: int = 0, now: float = 0.0) -> StateMachine:
    machine.begin("me", seed, now)
    return machine


# ------------------------------------------------------------------------------------------------------- dispatch


def test_a_handler_may_return_nothing_a_list_or_be_a_generator() -> None:
    machine = Plain()
    assert machine.handle(Started(), 0.0) == []
    assert machine.handle(PeerJoined("b"), 0.0) == [Report("joined", {"peer": "b"}), Send("b", Ping(0), "ball")]
    effects = machine.handle(Received("b", Ping(3), "ball"), 1.5)
    assert effects == [Send("b", Pong(3), "ball"), Report("now", {"now": 1.5})]


def test_messages_and_commands_are_told_apart_by_class_and_name() -> None:
    machine = Plain()
    events: list[Event] = [
        PeerLeft("b", "gone"),
        TimerFired("tick"),
        Received("b", Pong(1), "ball"),
        Received("b", Ping(2), "ball"),
        Command("average", 4),
    ]
    for event in events:
        machine.handle(event, 0.0)
    assert machine.seen == events


def test_who_it_is_and_what_time_it_is_comes_from_the_driver() -> None:
    machine = started(Plain(), seed=7, now=3.0)
    assert (machine.me, machine.now) == ("me", 3.0)
    assert machine.random.random() == random.Random(7).random()
    machine.handle(Computed("no handler", None), 4.0)
    assert machine.now == 4.0


def test_it_says_what_it_handles() -> None:
    machine = Plain()
    assert machine.handles(Started)
    assert not machine.handles(Stopping)
    assert machine.accepts(Ping)
    assert not machine.accepts(Event)


def test_a_handler_that_raises_half_way_has_no_effects() -> None:
    class Careless(StateMachine):
        @on(Started)
        def start(self, event: Started) -> Iterator[Effect]:
            yield Report("begun", {})
            raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        Careless().handle(Started(), 0.0)


# ------------------------------------------------------------------------------------------------------ unhandled


def test_an_event_without_a_handler_has_no_effect() -> None:
    assert StateMachine().handle(Started(), 0.0) == []


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Received("b", Ping(1), "ball"), "deaf has no handler for message Ping"),
        (Command("average"), "deaf has no handler for command 'average'"),
    ],
)
def test_a_message_or_command_without_a_handler_is_an_error(event: Event, says: str) -> None:
    class Deaf(StateMachine):
        @on(Received[Pong], "reset")
        def other(self, event: Event) -> None: ...

    with pytest.raises(LookupError, match=says):
        Deaf().handle(event, 0.0)


def test_a_failed_computation_without_a_handler_raises_its_error() -> None:
    error = ZeroDivisionError("in the thread")
    with pytest.raises(ZeroDivisionError) as raised:
        StateMachine().handle(ComputeFailed("step", error), 0.0)
    assert raised.value is error


def test_a_failed_computation_can_be_handled() -> None:
    class Careful(StateMachine):
        @on(ComputeFailed)
        def retry(self, event: ComputeFailed) -> Iterator[Effect]:
            yield Report("failed", {"why": str(event.error)})

    assert Careful().handle(ComputeFailed("step", ValueError("nan")), 0.0) == [Report("failed", {"why": "nan"})]


# --------------------------------------------------------------------------------------------------------- finish


def test_stopping_without_a_handler_finishes() -> None:
    machine = Plain()
    assert machine.handle(Stopping(), 0.0) == [Finish(None)]
    assert machine.finished
    assert machine.result is None


def test_stopping_with_a_handler_is_up_to_the_handler() -> None:
    class Polite(StateMachine):
        @on(Stopping)
        def goodbye(self, event: Stopping) -> Iterator[Effect]:
            yield Send("b", Ping(-1), "ball")

    machine = Polite()
    assert machine.handle(Stopping(), 0.0) == [Send("b", Ping(-1), "ball")]
    assert not machine.finished


def test_finish_is_the_last_effect_and_no_event_follows() -> None:
    class Ends(StateMachine):
        handled = 0

        @on(Started)
        def end(self, event: Started) -> Iterator[Effect]:
            self.handled += 1
            yield Report("last", {})
            yield Finish(42)
            yield Send("b", Ping(0), "ball")
            yield Finish(43)

    machine = Ends()
    assert machine.handle(Started(), 1.0) == [Report("last", {}), Finish(42)]
    assert (machine.finished, machine.result) == (True, 42)
    assert machine.handle(Started(), 2.0) == []
    assert machine.handle(Received("b", Ping(0), "ball"), 2.0) == []  # not even the error for an unknown message
    assert (machine.handled, machine.now, machine.result) == (1, 1.0, 42)


def test_machines_of_one_class_finish_each_for_itself() -> None:
    one, other = Plain(), Plain()
    one.handle(Stopping(), 0.0)
    assert not other.finished


# ------------------------------------------------------------------------------------------------------ the table


def test_a_subclass_inherits_handlers_and_replaces_them_by_method_name() -> None:
    class Louder(Plain):
        def listed(self, event: PeerJoined) -> list[Effect]:
            return [*super().listed(event), Report("louder", {})]

    effects = Louder().handle(PeerJoined("b"), 0.0)
    assert effects == [*Plain().handle(PeerJoined("b"), 0.0), Report("louder", {})]


def test_a_subclass_replaces_a_handler_by_event_and_leaves_its_base_alone() -> None:
    class Quiet(Plain):
        @on(PeerJoined)
        def ignore(self, event: PeerJoined) -> None: ...

        @on(Computed)
        def more(self, event: Computed) -> Iterator[Effect]:
            yield Report("computed", {})

    assert Quiet().handle(PeerJoined("b"), 0.0) == []
    assert len(Plain().handle(PeerJoined("b"), 0.0)) == 2
    assert Quiet().handles(Computed)
    assert not Plain().handles(Computed)
    assert not StateMachine().handles(PeerJoined)


@pytest.mark.parametrize("what", [Started, Received[Ping], "average"])
def test_two_handlers_of_one_event_in_one_class_are_refused(what: Any) -> None:
    with pytest.raises(TypeError, match="Twice: first and second both handle"):

        class Twice(StateMachine):
            @on(what)
            def first(self, event: Any) -> None: ...

            @on(what)
            def second(self, event: Any) -> None: ...


def test_naming_an_event_twice_for_one_handler_is_harmless() -> None:
    class Both(StateMachine):
        @on(Started)
        @on(Started, PeerLeft)
        def either(self, event: Event) -> list[Effect]:
            return [Report("either", {})]

    assert len(Both().handle(Started(), 0.0)) == len(Both().handle(PeerLeft("b", ""), 0.0)) == 1


@pytest.mark.parametrize("wrong", [int, Ping, Ping(1), None, list[Ping], Report])
def test_on_takes_events_only(wrong: Any) -> None:
    with pytest.raises(TypeError, match="@on takes event classes, Received"):
        on(wrong)(lambda self, event: None)


def test_a_machine_is_named_after_its_class_unless_it_says_otherwise() -> None:
    class PingPong(StateMachine): ...

    class Named(StateMachine):
        name = "p2pml/named"

    assert (PingPong.name, Named.name) == ("pingpong", "p2pml/named")


# --------------------------------------------------------------------------------------------------------- places


class Placing(StateMachine):
    @place(Ping)
    def memory(self, peer: str, head: Any) -> list[bytearray]:
        return [bytearray(4)]


class PlacingElsewhere(Placing):
    @place(Ping)
    def elsewhere(self, peer: str, head: Any) -> None: ...

    @place(Pong)
    @on(Started)
    def both(self, *_: Any) -> None: ...


def test_places_are_inherited_replaced_and_kept_apart_from_handlers() -> None:
    assert Placing._places == {Ping: "memory"}
    assert PlacingElsewhere._places == {Ping: "elsewhere", Pong: "both"}
    assert not Placing().accepts(Ping)
    assert PlacingElsewhere().handles(Started)
    assert StateMachine._places == {}


# -------------------------------------------------------------------------------------------- events and effects


def test_events_and_effects_are_values() -> None:
    assert Received("b", Ping(1), "ball") == Received("b", Ping(1), "ball")
    assert Send("b", Ping(1), "ball") != Send("b", Ping(1), "ball", or_drop=True)
    with pytest.raises(AttributeError):
        Compute("tag", print).tag = "other"  # type: ignore[misc]


def test_handlers_of_all_bases_are_found() -> None:
    class Greets(StateMachine):
        @on(Started)
        def greet(self, event: Started) -> list[Effect]:
            return [Report("hello", {})]

    class Mixin:
        @on(Stopping)
        def part(self, event: Stopping) -> list[Effect]:
            return [Finish("bye")]

    class Both(Mixin, Greets):
        name = "both"

    class Role(Both):
        """Keeps the name: its peers know the protocol by it."""

    machine = Role()
    assert machine.name == "both"
    assert machine.handle(Started(), 0.0) == [Report("hello", {})]
    assert machine.handle(Stopping(), 0.0) == [Finish("bye")]


def test_an_event_that_says_too_little_is_refused() -> None:
    for event in (Event, Received, Command):
        with pytest.raises(TypeError, match="too little"):
            on(event)(lambda self, event: None)


def test_a_coroutine_is_no_handler() -> None:
    with pytest.raises(TypeError, match="no coroutine"):

        @on(Started)
        async def begin(self: StateMachine, event: Started) -> None: ...


def test_a_generator_is_left_where_it_finished() -> None:
    reached = []

    class Ends(StateMachine):
        @on(Started)
        def begin(self, event: Started) -> Iterator[Effect]:
            yield Finish(1)
            reached.append("beyond")

    assert Ends().handle(Started(), 0.0) == [Finish(1)]
    assert reached == []
