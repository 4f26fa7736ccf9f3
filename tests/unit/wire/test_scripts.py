"""Two sessions, a fair delaying link between them, and applications that do anything at any time."""

from __future__ import annotations

import inspect
import itertools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pml.errors import LinkClosed, MessageError, MessageRefused, MessageTooLarge
from p2pml.wire import codec, events
from p2pml.wire.credits import MemoryBudget, ReceiveWindow, SendWindow
from p2pml.wire.options import ChannelOptions
from p2pml.wire.outgoing import Outgoing, State
from tests.unit.wire.joined import End, Joined, Model, Note, model

MAX_MESSAGE = 400_000
BUDGET = 700_000
CHANNELS = {
    "plain": ChannelOptions(messages=4, bytes=1 << 14, eager=2000),
    "bulk": ChannelOptions(messages=3, bytes=1 << 14, eager=500, weight=3),
    "placed": ChannelOptions(messages=5, bytes=1 << 15, priority=0),
    "manual": ChannelOptions(manual=True, bytes=1 << 14, eager=1000),
}
LATE = ChannelOptions(messages=2, bytes=1 << 14, eager=1000)
NAMES = [*CHANNELS, "late"]
ALIVE = (State.WAITING, State.OFFERED, State.ACCEPTED, State.SENDING)
UNKNOWN = codec.encode(Note(0)).head.replace(b"test/wire/note", b"test/wire/none")


@dataclass
class Sending:
    """A message that was sent: its number is its place among all."""

    number: int
    outgoing: Outgoing | None
    cancelled: bool = False
    refusable: bool = False


def number_of(message: Any) -> int:
    return int.from_bytes(message[:4], "big") if isinstance(message, (bytes, memoryview)) else int(message.number)


def contents(number: int, kind: str, size: int) -> Any:
    if kind == "raw":
        return number.to_bytes(4, "big") + bytes(size)
    if kind == "note":
        return Note(number, "x" * min(size, 9000))
    return model(number, size // 2, 0, size - size // 2)


class Sessions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)
        self.given: dict[int, list[np.ndarray[Any, Any]]] = {}
        self.sent: dict[tuple[int, str], list[Sending]] = {(side, name): [] for side in (0, 1) for name in NAMES}
        self.limits: dict[tuple[int, str, str], int] = {}
        self.late = [False, False]

    @initialize(
        delay=st.sampled_from([0.0, 0.001, 0.02]),
        sizes=st.lists(st.integers(1, 70_000), min_size=1, max_size=4),
        opened=st.sampled_from([True, True, False]),
    )
    def open(self, delay: float, sizes: list[int], opened: bool) -> None:
        self.ends = [
            End(
                name,
                CHANNELS,
                dialer=name == "left",
                budget=MemoryBudget(BUDGET),
                place=self._place,
                max_message=MAX_MESSAGE,
            )
            for name in ("left", "right")
        ]
        self.joined = Joined(*self.ends, delay=delay, sizes=[max(size, 500) for size in sizes])
        if opened:
            self.joined.run(0.2)

    def _place(self, channel: str, head: codec.Head) -> list[Any] | None:
        if channel != "placed" or head.type is not Model:
            return None
        places = [np.zeros(spec.shape, np.uint8) for spec in head.specs]
        self.given[head.fields["number"]] = places
        return places

    # ------------------------------------------------------------------------------------------------------ rules

    @rule(
        side=st.sampled_from([0, 1]),
        name=st.sampled_from(NAMES),
        kind=st.sampled_from(["raw", "note", "model"]),
        size=st.one_of(st.integers(0, 3000), st.integers(0, 390_000)),
        tracked=st.booleans(),
        key=st.sampled_from([None, None, "key"]),
        packing=st.sampled_from([None, None, "lz4", "zstd"]),
    )
    def send(
        self, side: int, name: str, kind: str, size: int, tracked: bool, key: str | None, packing: str | None
    ) -> None:
        number = next(self.numbers)
        codec_name = packing if kind == "model" else None
        sender = self.ends[side].session.sender
        if key is not None:
            sender.supersede(name, key)
        made = self.ends[side].send(name, contents(number, kind, size), codec_name, key=key, tracked=tracked)
        made.owner = number
        self.sent[side, name].append(Sending(number, made))

    @rule(side=st.sampled_from([0, 1]), name=st.sampled_from(NAMES), size=st.integers(0, 2100))
    def try_send(self, side: int, name: str, size: int) -> None:
        sender = self.ends[side].session.sender
        number = next(self.numbers)
        content = contents(number, "raw", size)
        if sender.send_small(name, b"", content):
            self.sent[side, name].append(Sending(number, None))
        elif sender.can_send(name, len(content)):
            made = self.ends[side].send(name, content)
            made.owner = number
            outlet = sender.channel(name)
            assert outlet is not None
            assert made.state is State.OFFERED or outlet.ready(sender.link)
            self.sent[side, name].append(Sending(number, made))

    @rule(side=st.sampled_from([0, 1]), name=st.sampled_from(NAMES), tracked=st.booleans())
    def send_of_unknown_kind(self, side: int, name: str, tracked: bool) -> None:
        number = next(self.numbers)
        made = Outgoing(UNKNOWN, [], owner=number, tracked=tracked)
        self.ends[side].session.sender.send(name, made)
        self.sent[side, name].append(Sending(number, made, refusable=True))

    @rule(side=st.sampled_from([0, 1]), name=st.sampled_from(NAMES))
    def send_too_much(self, side: int, name: str) -> None:
        session = self.ends[side].session
        if session.sender.max_message is not None:
            made = Outgoing(b"", [memoryview(bytes(MAX_MESSAGE + 1))])
            try:
                session.sender.send(name, made)
            except MessageTooLarge:
                return
            raise AssertionError("refused by the other side only")

    @rule(side=st.sampled_from([0, 1]), name=st.sampled_from(NAMES), back=st.integers(0, 8))
    def cancel(self, side: int, name: str, back: int) -> None:
        candidates = [one for one in self.sent[side, name] if one.outgoing is not None]
        candidates = [one for one in candidates if one.outgoing and one.outgoing.state in ALIVE] or candidates
        if candidates:
            one = candidates[back % len(candidates)]
            assert one.outgoing is not None
            waits = one.outgoing.state in ALIVE
            assert self.ends[side].session.sender.cancel(one.number) == waits
            one.cancelled = one.cancelled or waits

    @rule(side=st.sampled_from([0, 1]), name=st.sampled_from(NAMES))
    def supersede(self, side: int, name: str) -> None:
        self.ends[side].session.sender.supersede(name, "key")

    @rule(side=st.sampled_from([0, 1]), reading=st.booleans())
    def read_on_or_pause(self, side: int, reading: bool) -> None:
        self.ends[side].reading = reading

    @rule(side=st.sampled_from([0, 1]), count=st.integers(1, 5))
    def read_some(self, side: int, count: int) -> None:
        self.ends[side].read(count)

    @rule(side=st.sampled_from([0, 1]), messages=st.integers(1, 3))
    def grant(self, side: int, messages: int) -> None:
        self.ends[side].session.receiver.grant("manual", messages)

    @precondition(lambda self: not all(self.late))
    @rule(side=st.sampled_from([0, 1]))
    def open_late(self, side: int) -> None:
        if not self.late[side]:
            self.late[side] = True
            self.ends[side].session.add_channel("late", LATE)

    @rule(side=st.sampled_from([0, 1]), once=st.booleans())
    def pull(self, side: int, once: bool) -> None:
        self.joined.pull(side, once=once)

    @rule(side=st.sampled_from([0, 1]), seconds=st.sampled_from([0.0, 0.001, 0.05]))
    def deliver(self, side: int, seconds: float) -> None:
        self.joined.now += seconds
        self.joined.deliver(side, self.joined.now)

    @rule(seconds=st.sampled_from([0.005, 0.05, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.joined.run(seconds, step=max(0.01, seconds / 10))

    # ------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def nothing_is_sent_without_credit_and_no_limit_falls(self) -> None:
        for side, end in enumerate(self.ends):
            other = self.ends[1 - side].session.receiver
            sender = end.session.sender
            self._window((side, "", "bytes"), sender.link, other.link)
            for name, number in other._numbers.items():
                outlet, inlet = sender.channel(name), other._channels[number]
                if outlet is not None and outlet.id:
                    self._window((side, name, "messages"), outlet.messages, inlet.messages)
                    self._window((side, name, "bytes"), outlet.bytes, inlet.bytes)

    def _window(self, key: tuple[int, str, str], sender: SendWindow, receiver: ReceiveWindow) -> None:
        assert receiver.received <= sender.sent <= sender.limit <= receiver.limit
        assert self.limits.get(key, 0) <= sender.limit
        self.limits[key] = sender.limit
        assert receiver.consumed <= receiver.received
        if not receiver.granted_by_hand:
            assert receiver.limit - receiver.consumed <= receiver.size

    @invariant()
    def memory_is_bounded(self) -> None:
        for end in self.ends:
            assert 0 <= end.budget.used <= end.budget.peak <= BUDGET
            assert end.budget.fixed <= sum(options.bytes for options in (*CHANNELS.values(), LATE))

    @invariant()
    def nobody_is_blamed(self) -> None:
        for end in self.ends:
            assert not end.of(events.Closed)

    # -------------------------------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        if not hasattr(self, "joined"):
            return
        self._come_to_rest()
        self.nothing_is_sent_without_credit_and_no_limit_falls()
        self.memory_is_bounded()
        self.nobody_is_blamed()
        for side, end in enumerate(self.ends):
            other = self.ends[1 - side]
            assert end.session.bytes_out == other.session.bytes_in
            for name in NAMES:
                self._check_channel(end, other, name, self.sent[side, name])
            self._check_events(end)
            assert end.grown() == 0
            assert end.budget.fixed == end.session.receiver.link.size
        self._check_windows()
        self.ends[0].session.close()
        self.joined.settle()
        for end in self.ends:
            end.collect()
            assert isinstance(end.closed.error, LinkClosed)
            assert end.budget.used == end.budget.fixed == 0

    def _come_to_rest(self) -> None:
        for side, end in enumerate(self.ends):
            end.reading = True
            end.collect()
            if not self.late[side]:
                end.session.add_channel("late", LATE)
            end.session.receiver.grant("manual", 1000)
        self.joined.run(0.2).settle()
        for end in self.ends:  # as if the other side waited: all is told
            for number in range(1, len(NAMES) + 1):
                end.session.receiver.blocked_received(number)
        self.joined.settle()

    def _check_channel(self, end: End, other: End, name: str, sent: list[Sending]) -> None:
        failed = {event.outgoing.owner: event.error for event in end.of(events.MessageFailed)}
        arrived = [event for event in other.arrived if event.channel == name]
        expected = [
            one.number
            for one in sent
            if not one.cancelled and not one.refusable and (one.outgoing is None or one.number not in failed)
        ]
        assert [number_of(event.message) for event in arrived] == expected, "all of it, once, in order"
        for event in arrived:
            self._check_contents(name, event)
        for one in sent:
            if one.number in failed:
                assert not one.cancelled
                error = failed[one.number]
                superseded = one.outgoing is not None and one.outgoing.key == "key" and type(error) is MessageError
                assert superseded or (one.refusable and type(error) is MessageRefused)

    def _check_contents(self, name: str, event: events.Arrived) -> None:
        message = event.message
        if isinstance(message, Model):
            number = message.number
            sizes = [tensor.nbytes for tensor in message.tensors.values()]
            again = model(number, *sizes)
            assert all(bytes(message.tensors[key].data) == array.tobytes() for key, array in again.tensors.items())
            if name == "placed" and event.reserved == 0 and number in self.given:
                for tensor, place in zip(message.tensors.values(), self.given[number], strict=True):
                    assert not tensor.nbytes or np.shares_memory(tensor.numpy(), place), "received in place"

    def _check_events(self, end: End) -> None:
        delivered = [event.outgoing for event in end.of(events.MessageDelivered)]
        failed = [event.outgoing for event in end.of(events.MessageFailed)]
        assert len({id(message) for message in delivered}) == len(delivered), "once"
        assert len({id(message) for message in failed}) == len(failed), "once"
        side = self.ends.index(end)
        for one in itertools.chain.from_iterable(self.sent[side, name] for name in NAMES):
            message = one.outgoing
            if message is None:
                continue
            told = sum(item is message for item in (*delivered, *failed))
            if message.tracked and not one.cancelled:
                assert told == 1
            assert message.state in (State.SENT, State.DELIVERED, State.FAILED)

    def _check_windows(self) -> None:
        for side, end in enumerate(self.ends):
            receiver, sender = end.session.receiver, self.ends[1 - side].session.sender
            pairs = [(sender.link, receiver.link)]
            for name, number in receiver._numbers.items():
                outlet, inlet = sender.channel(name), receiver._channels[number]
                assert outlet is not None
                assert not inlet.due
                assert not outlet.queue
                assert not outlet.offered
                assert not outlet.unacknowledged
                pairs += [(outlet.messages, inlet.messages), (outlet.bytes, inlet.bytes)]
            for mine, theirs in pairs:
                assert mine.limit == theirs.limit
                assert mine.sent == theirs.received == theirs.consumed
                if not theirs.granted_by_hand:
                    assert theirs.limit - theirs.consumed == theirs.size, "at rest"


Sessions.TestCase.settings = settings(stateful_step_count=40)
TestSessions = Sessions.TestCase


@pytest.mark.parametrize("seed", range(12))
def test_long_scripts(seed: int) -> None:
    """The same rules, many hundred times on one pair of sessions, most of them while much is under way."""
    draw = random.Random(seed)
    script = Sessions()
    script.open(draw.choice([0.0, 0.02]), [draw.choice([700, 9000, 70_000]) for _ in range(3)], opened=True)
    rules = {
        script.send: 10, script.try_send: 4, script.send_of_unknown_kind: 1, script.send_too_much: 1, script.cancel: 5,
        script.supersede: 1, script.read_on_or_pause: 1, script.read_some: 4, script.grant: 2, script.open_late: 1,
        script.pull: 12, script.deliver: 12, script.pass_time: 2,
    }  # fmt: skip
    choices: dict[str, Any] = {
        "side": lambda: draw.choice([0, 1]),
        "name": lambda: draw.choice(NAMES),
        "kind": lambda: draw.choice(["raw", "note", "model"]),
        "size": lambda: draw.choice([draw.randrange(2000), draw.randrange(390_000), draw.randrange(300_000, 390_000)]),
        "tracked": lambda: draw.choice([True, False]),
        "key": lambda: draw.choice([None, None, "key"]),
        "packing": lambda: draw.choice([None, None, "lz4", "zstd"]),
        "back": lambda: draw.randrange(3),
        "reading": lambda: draw.choice([True, True, False]),
        "count": lambda: draw.randrange(1, 6),
        "messages": lambda: draw.randrange(1, 4),
        "once": lambda: draw.choice([True, False]),
        "seconds": lambda: draw.choice([0.0, 0.001, 0.05]),
    }
    for step in draw.choices(list(rules), list(rules.values()), k=600):
        step(**{name: choices[name]() for name in inspect.signature(step).parameters})
        script.nothing_is_sent_without_credit_and_no_limit_falls()
        script.memory_is_bounded()
        script.nobody_is_blamed()
    script.teardown()
