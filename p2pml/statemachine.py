"""The API for protocols: events in, effects out.

A protocol is a class whose methods handle events and yield effects. It never awaits, opens a socket, reads a clock,
starts a thread or draws an unseeded random number; its driver does all of that. So the same class runs on real links
(`p2pml.host`), in a simulator, and in a unit test that feeds it events and compares the effects::

    @message("ping")
    class Ping:
        count: int

    class PingPong(StateMachine):
        channels = {"ball": ChannelOptions()}

        @on(PeerJoined)
        def serve(self, event):
            yield Send(event.peer, Ping(0), "ball")

        @on(Received[Ping])
        def hit_back(self, event):
            if event.message.count == 10:
                yield Finish(event.message.count)
            yield Send(event.peer, Ping(event.message.count + 1), "ball")

Time (`self.now`, seconds on a monotonic clock), randomness (`self.random`, seeded) and identity (`self.me`) are given to
the machine by its driver. Handlers run one at a time; none may block for longer than a few milliseconds: what takes
longer is a `Compute`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

from p2pml.wire.options import ChannelOptions

M = TypeVar("M")

# ---------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, given to a machine by its driver."""


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The machine runs; always the first event."""


@dataclass(frozen=True, slots=True)
class PeerJoined(Event):
    """A link to `peer` stands and the peer runs a machine of the same name. `info` is what its machine announced."""

    peer: str
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeerLeft(Event):
    """`peer` is gone, or its machine stopped. What was queued for it is dropped."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Received(Event, Generic[M]):
    """A message from `peer`. Subscript it to choose the message: ``@on(Received[Gradient])``.

    The message's tensors belong to the machine from here on. Unless the channel is `manual`, the receiver's credit for it
    is returned when the handler ends, or where a `Compute` takes it over (`consumes`).
    """

    peer: str
    message: M
    channel: str


@dataclass(frozen=True, slots=True)
class CreditGranted(Event):
    """`peer` can take at least one more message on `channel`, after a time in which it could not.

    A channel's initial window brings none; the first `Grant` on a `manual` channel does.
    """

    peer: str
    channel: str


@dataclass(frozen=True, slots=True)
class Sent(Event):
    """All bytes of the `Send` with this `tag` left this process: its tensors may be changed now."""

    tag: Any


@dataclass(frozen=True, slots=True)
class Delivered(Event):
    """The `Send` with this `tag` arrived whole at `peer` (it acknowledged it)."""

    peer: str
    tag: Any


@dataclass(frozen=True, slots=True)
class SendFailed(Event):
    """The `Send` with this `tag` was declined for lack of credit, superseded or refused; or its peer left before it was
    acknowledged, and then it may have arrived.
    """

    peer: str
    tag: Any
    reason: str


@dataclass(frozen=True, slots=True)
class TimerFired(Event):
    """The timer `name` is due."""

    name: str


@dataclass(frozen=True, slots=True)
class Computed(Event):
    """The `Compute` with this `tag` is done; `seconds` is what it took."""

    tag: Any
    result: Any
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ComputeFailed(Event):
    """The `Compute` with this `tag` raised. A machine without a handler for this event is stopped by it."""

    tag: Any
    error: BaseException


@dataclass(frozen=True, slots=True)
class LinkMeasured(Event):
    """What the traffic itself shows of the link to `peer`: bytes/s it carried while busy, round trip in seconds."""

    peer: str
    bytes_per_second: float | None
    round_trip: float | None


@dataclass(frozen=True, slots=True)
class ResourcesMeasured(Event):
    """What this peer measured of itself (see `p2pml.resources.Resources`)."""

    resources: Any


@dataclass(frozen=True, slots=True)
class Command(Event):
    """The program around the machine asks for something (`Hosted.command`): e.g. 'average', with the tensors."""

    name: str
    value: Any = None


@dataclass(frozen=True, slots=True)
class Stopping(Event):
    """The driver wants the machine to end: say goodbye (at most one second of sending) and `Finish`."""


# --------------------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Effect:
    """Something that a machine asks its driver to do."""


@dataclass(frozen=True, slots=True)
class Send(Effect):
    """Send `message` to `peer` on `channel`.

    Messages on one channel arrive in the order of their effects. Tensors are not copied: they must not change until the
    driver says `Sent` (asked for by `tag`), or until an answer proves that they arrived. A message without credit waits
    in the channel's queue, whose length is bounded (a machine that overruns it is stopped with an error): with
    `or_drop` it is declined instead, with `SendFailed` for a tag. `supersedes` names a key: a message with the same key
    to the same peer and channel that waits, unsent, is dropped in favour of this one.
    """

    peer: str
    message: Any
    channel: str
    tag: Any = None
    or_drop: bool = False
    supersedes: str | None = None


@dataclass(frozen=True, slots=True)
class Grant(Effect):
    """Let `peer` send `messages` more messages on a `manual` channel. Grants to an absent peer are dropped."""

    peer: str
    channel: str
    messages: int = 1


@dataclass(frozen=True, slots=True)
class SetTimer(Effect):
    """Fire `TimerFired(name)` in `delay` seconds; replaces a timer of the same name."""

    name: str
    delay: float


@dataclass(frozen=True, slots=True)
class CancelTimer(Effect):
    """Forget the timer `name`; no error if there is none."""

    name: str


@dataclass(frozen=True, slots=True)
class Compute(Effect):
    """Run ``work(*arguments)`` in a worker thread; answers `Computed` or `ComputeFailed` with `tag`.

    Computations of one machine on one `lane` run one after the other, in order; different lanes run at the same time.
    `cost` is for a simulator: the work's size in whatever unit its cost model has (for training: samples). `consumes` is the
    `Received` that is being handled: its credit, and the memory of its tensors, go back to their sender when the
    computation is done and not when the handler ends, so that what waits for a lane is bounded too.
    """

    tag: Any
    work: Callable[..., Any]
    arguments: Sequence[Any] = ()
    lane: str = "compute"
    cost: float = 0.0
    consumes: Received[Any] | None = None


@dataclass(frozen=True, slots=True)
class Connect(Effect):
    """Have a link to `peer`, known to listen at `addresses`: dial unless there is one. `PeerJoined` or `PeerLeft` follow."""

    peer: str
    addresses: Sequence[str]


@dataclass(frozen=True, slots=True)
class Disconnect(Effect):
    """Close the link to `peer`, telling it `reason`. `PeerLeft` follows."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report(Effect):
    """Progress for people and programs: a name ('round', 'accuracy', ...) and JSON-able fields."""

    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply(Effect):
    """The answer to the oldest unanswered `Command` of this name; an exception as `value` is raised there."""

    name: str
    value: Any = None


@dataclass(frozen=True, slots=True)
class Finish(Effect):
    """The machine is done, with this result; no effect after it is carried out and no event follows."""

    result: Any = None


# -------------------------------------------------------------------------------------------------------- machines


Effects = Generator[Effect, None, None] | Iterable[Effect] | None
_H = TypeVar("_H", bound=Callable[..., Any])


def on(*events: Any) -> Callable[[_H], _H]:
    """Mark a method as the handler of event classes, of ``Received[SomeMessage]``, or of ``Command`` by name: ``on("average")``."""

    def mark(method: _H) -> _H:
        if iscoroutinefunction(method):
            raise TypeError(f"{method.__name__}: a handler yields effects, it is no coroutine")
        keys = [_key(event) for event in events]
        method.__p2pml_on__ = [*getattr(method, "__p2pml_on__", ()), *keys]  # type: ignore[attr-defined]
        return method

    return mark


def place(message: type) -> Callable[[_H], _H]:
    """Mark a method that says where the tensors of an arriving large message go, before its bytes come.

    It is called for messages that are offered first (larger than the channel's `eager`) and not compressed, as
    ``method(peer, head)`` with the message's `p2pml.wire.codec.Head` (kind, plain fields, tensor
    descriptors) and returns one writable buffer of the exact size for each tensor, or None for fresh memory. The memory
    belongs to the wire until `Received` or `PeerLeft`.
    """

    def mark(method: _H) -> _H:
        method.__p2pml_place__ = message  # type: ignore[attr-defined]
        return method

    return mark


def _key(event: Any) -> Any:
    if isinstance(event, str):
        return (Command, event)
    if get_origin(event) is Received:
        return (Received, get_args(event)[0])
    if event in (Event, Received, Command):
        raise TypeError(f"@on({event.__name__}) is too little: say Received[Message], or a command's name")
    if isinstance(event, type) and issubclass(event, Event):
        return event
    raise TypeError(f"@on takes event classes, Received[Message] or a command's name, not {event!r}")


class StateMachine:
    """Base of every protocol: a table from events to handlers.

    Class attributes: `name` identifies the protocol (peers whose machines have the same name see each other), `channels`
    says how it receives. `info`, an instance attribute, is a small CBOR-able map that peers get with `PeerJoined`.
    """

    name: ClassVar[str] = ""
    channels: ClassVar[Mapping[str, ChannelOptions]] = {}
    _named: ClassVar[bool] = False
    _handlers: ClassVar[dict[Any, str]] = {}
    _places: ClassVar[dict[type, str]] = {}

    me: str = ""
    now: float = 0.0
    random: random.Random
    info: Mapping[str, Any] = {}
    finished: bool = False
    result: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in cls.__dict__:
            cls._named = True
        elif not cls._named:
            cls.name = cls.__name__.lower()
        cls._handlers, cls._places = {}, {}
        for base in reversed(cls.__mro__):
            own: dict[Any, str] = {}
            for attribute, method in vars(base).items():
                placed = getattr(method, "__p2pml_place__", None)
                keys = [*getattr(method, "__p2pml_on__", ()), *([("place", placed)] if placed else ())]
                for key in keys:
                    if own.setdefault(key, attribute) != attribute:
                        raise TypeError(f"{base.__name__}: {own[key]} and {attribute} both handle {key}")
                    if placed is not None and key == ("place", placed):
                        cls._places[placed] = attribute
                    else:
                        cls._handlers[key] = attribute

    def begin(self, me: str, seed: int, now: float) -> None:
        """Called by the driver before `Started`: who this is, its random seed, the time."""
        self.me, self.now, self.random = me, now, random.Random(seed)

    def handles(self, event: type[Event]) -> bool:
        """Whether this machine has a handler for an event class (drivers skip work for events nobody wants)."""
        return event in self._handlers

    def accepts(self, message: type) -> bool:
        """Whether this machine has a handler for a class of messages."""
        return (Received, message) in self._handlers

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Give the machine one event at time `now`; returns the effects, in order.

        An event without a handler has no effects, but a `Received` without one raises `LookupError` and a `ComputeFailed`
        without one raises its error: a peer's unknown message and a failed computation must not go unnoticed.
        """
        if self.finished:
            return []
        self.now = now
        kind = type(event)
        if kind is Received:
            handler = self._handlers.get((Received, type(event.message)))  # type: ignore[attr-defined]
        elif kind is Command:
            handler = self._handlers.get((Command, event.name))  # type: ignore[attr-defined]
        else:
            handler = self._handlers.get(kind)
        if handler is None:
            return self._unhandled(event)
        effects: list[Effect] = []
        for effect in getattr(self, handler)(event) or ():
            effects.append(effect)
            if type(effect) is Finish:
                self.finished, self.result = True, effect.result
                break
        return effects

    def _unhandled(self, event: Event) -> list[Effect]:
        if isinstance(event, Received):
            raise LookupError(f"{self.name} has no handler for message {type(event.message).__name__}")
        if isinstance(event, Command):
            raise LookupError(f"{self.name} has no handler for command '{event.name}'")
        if isinstance(event, ComputeFailed):
            raise event.error
        if isinstance(event, Stopping):
            self.finished = True
            return [Finish(None)]
        return []
