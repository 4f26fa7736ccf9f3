"""Machines on real nodes: events and effects as their API has them."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import pytest

from p2pml import statemachine as sm
from p2pml.errors import MachineFailed, MessageError
from p2pml.host import Host
from p2pml.node import Node
from p2pml.wire import codec
from tests.system.hosts import Foreign, Heap, Puppet, Word, do, two
from tests.system.nodes import Watch

KINDS = pytest.mark.parametrize("kind", ["memory", "tcp"])


@KINDS
async def test_machines_find_each_other_and_exchange_messages(kind: str) -> None:
    a, b = Puppet(), Puppet()
    b.info = {"samples": 7}
    async with two(kind, a, b) as (host_a, host_b):
        assert a.of(sm.PeerJoined) == [sm.PeerJoined("b", {"samples": 7})]
        assert b.of(sm.PeerJoined) == [sm.PeerJoined("a", {})]
        block = np.arange(500_000, dtype=np.float32)
        await do(host_a, sm.Send("b", Word("hello"), "data"), sm.Send("b", Heap(1, block), "data", tag="big"))
        await b.until(sm.Received, 2)
        words, heaps = b.of(sm.Received)
        assert words == sm.Received("a", Word("hello"), "data")
        assert np.array_equal(heaps.message.values.numpy(), block)
        assert await a.until(sm.Sent) == sm.Sent("big")
        assert await a.until(sm.Delivered) == sm.Delivered("b", "big")
        assert a.now > 0
        assert a.me == "a"
    assert await host_a.result() == await host_b.result() == "stopped"


@KINDS
async def test_messages_of_one_channel_keep_the_order_of_their_effects(kind: str) -> None:
    async with two(kind) as (host_a, host_b):
        effects = []
        for number in range(100):
            values = np.zeros(40_000 if number % 3 == 0 else 4, np.float32)
            effects.append(sm.Send("b", Heap(number, values), "data", tag=number if number % 2 else None))
        await do(host_a, *effects)
        await host_b.machine.until(sm.Received, 100)  # type: ignore[attr-defined]
        assert [event.message.number for event in host_b.machine.of(sm.Received)] == list(range(100))  # type: ignore[attr-defined]


async def test_a_send_to_an_absent_peer_fails_with_its_tag_only() -> None:
    async with two() as (host_a, _):
        machine = host_a.machine
        assert isinstance(machine, Puppet)
        await do(host_a, sm.Send("nobody", Word("x"), "data"), sm.Send("nobody", Word("x"), "data", tag=1))
        assert await machine.until(sm.SendFailed) == sm.SendFailed("nobody", 1, "the peer is not here")
        assert len(machine.of(sm.SendFailed)) == 1


def holding() -> Puppet:
    """A machine that keeps the credit of what it receives, until the test sets its `threading.Event`."""
    machine = Puppet()
    machine.free = threading.Event()  # type: ignore[attr-defined]

    def keep(event: sm.Received[Word]) -> Iterable[sm.Effect]:
        yield sm.Compute(event.message.text, machine.free.wait, (10,), consumes=event)  # type: ignore[attr-defined]

    machine.script[sm.Received] = keep
    return machine


async def test_or_drop_declines_what_has_no_credit_now() -> None:
    b = holding()
    async with two(b=b) as (host_a, _):
        a = host_a.machine
        assert isinstance(a, Puppet)
        send = [sm.Send("b", Word(text), "one", tag=text, or_drop=True) for text in ("first", "second")]
        await do(host_a, *send)
        assert await a.until(sm.SendFailed) == sm.SendFailed("b", "second", "no credit")
        await b.until(sm.Received)
        assert not a.of(sm.CreditGranted)
        b.free.set()  # type: ignore[attr-defined]
        assert await a.until(sm.CreditGranted) == sm.CreditGranted("b", "one")
        await do(host_a, sm.Send("b", Word("third"), "one", tag="third", or_drop=True))
        await b.until(sm.Received, 2)
        assert [event.message.text for event in b.of(sm.Received)] == ["first", "third"]


async def test_a_later_message_supersedes_a_waiting_one_of_its_key() -> None:
    b = holding()
    async with two(b=b) as (host_a, _):
        a = host_a.machine
        assert isinstance(a, Puppet)
        send = [sm.Send("b", Word(text), "one", tag=text, supersedes="model") for text in ("v1", "v2", "v3")]
        await do(host_a, send[0])
        await b.until(sm.Received)
        await do(host_a, *send[1:])
        await do(host_a, sm.Send("b", Word("other"), "one", tag="other", supersedes="state"))
        failed = await a.until(sm.SendFailed)
        assert (failed.tag, "superseded" in failed.reason) == ("v2", True)
        b.free.set()  # type: ignore[attr-defined]
        await b.until(sm.Received, 3)
        assert [event.message.text for event in b.of(sm.Received)] == ["v1", "v3", "other"]
        assert len(a.of(sm.SendFailed)) == 1


async def test_a_machine_that_overruns_its_queue_is_stopped() -> None:
    b = holding()
    async with two(b=b) as (host_a, host_b):
        with pytest.raises(MachineFailed, match=r"more than 2 messages wait for b on 'short'"):
            await do(host_a, *[sm.Send("b", Word(str(number)), "short") for number in range(4)])
        left = await b.until(sm.PeerLeft)
        assert "more than 2 messages" in left.reason
        b.free.set()  # type: ignore[attr-defined]
        assert not host_b.machine.finished


async def test_credit_by_hand_one_message_at_a_time() -> None:
    """FedOptima's sender status: the sender sends when it holds the one credit, and drops what it has otherwise."""
    async with two() as (host_a, host_b):
        a, b = host_a.machine, host_b.machine
        assert isinstance(a, Puppet)
        assert isinstance(b, Puppet)

        def offer(text: str) -> sm.Effect:
            return sm.Send("b", Word(text), "hand", tag=text, or_drop=True)

        await do(host_a, offer("too early"))
        assert (await a.until(sm.SendFailed)).tag == "too early"
        for turn in range(1, 4):
            await do(host_b, sm.Grant("a", "hand"))
            assert await a.until(sm.CreditGranted, turn) == sm.CreditGranted("b", "hand")
            await do(host_a, offer(f"good {turn}"), offer(f"dropped {turn}"))
            assert (await a.until(sm.SendFailed, 1 + turn)).tag == f"dropped {turn}"
            await b.until(sm.Received, turn)
        assert [event.message.text for event in b.of(sm.Received)] == ["good 1", "good 2", "good 3"]


async def test_grants_to_absent_peers_are_dropped_and_wrong_ones_are_errors() -> None:
    async with two() as (host_a, host_b):
        await do(host_a, sm.Grant("nobody", "hand"))
        with pytest.raises(MachineFailed, match="not manual"):
            await do(host_a, sm.Grant("b", "data"))
        with pytest.raises(MachineFailed, match="has no channel 'dada'"):
            await do(host_b, sm.Send("a", Word("x"), "dada"))


async def test_timers_fire_are_replaced_and_cancelled() -> None:
    async with two() as (host_a, _):
        a = host_a.machine
        assert isinstance(a, Puppet)
        await do(
            host_a,
            sm.CancelTimer("none"),
            sm.SetTimer("late", 30),
            sm.SetTimer("cancelled", 0.01),
            sm.SetTimer("late", 0.02),
            sm.CancelTimer("cancelled"),
            sm.SetTimer("last", 0.06),
        )
        await a.until(sm.TimerFired, 2)
        assert [event.name for event in a.of(sm.TimerFired)] == ["late", "last"]


async def test_lanes_run_at_the_same_time_and_each_in_order() -> None:
    meet = threading.Barrier(2)
    order: list[str] = []

    def together(name: str) -> str:
        meet.wait(10)
        order.append(name)
        return threading.current_thread().name

    async with two() as (host_a, _):
        a = host_a.machine
        assert isinstance(a, Puppet)
        lanes = [sm.Compute((lane, turn), together, (f"{lane}{turn}",), lane) for turn in range(3) for lane in "xy"]
        await do(host_a, *lanes)
        await a.until(sm.Computed, 6)
        for lane in "xy":
            assert [name for name in order if name[0] == lane] == [f"{lane}{turn}" for turn in range(3)]
            assert [event.tag[1] for event in a.of(sm.Computed) if event.tag[0] == lane] == [0, 1, 2]
        assert {event.result.rpartition("_")[0] for event in a.of(sm.Computed)} == {"puppet-x", "puppet-y"}
        assert all(event.seconds >= 0 for event in a.of(sm.Computed))


@pytest.mark.parametrize("error", [ZeroDivisionError("division"), StopIteration(5), SystemExit(3)], ids=type)
async def test_a_failed_computation_is_an_event(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async with two() as (host_a, _):
        a = host_a.machine
        assert isinstance(a, Puppet)
        await do(host_a, sm.Compute("bad", fail), sm.Compute("good", lambda: 1))
        assert await a.until(sm.ComputeFailed) == sm.ComputeFailed("bad", error)
        assert (await a.until(sm.Computed)).result == 1


async def test_messages_that_are_none_of_the_machine_s_are_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with two() as (host_a, host_b), Node("stranger") as stranger:
        b = host_b.machine
        assert isinstance(b, Puppet)
        await do(host_a, sm.Send("b", Foreign(), "data"), sm.Send("b", Word("fine"), "data"))
        peer = host_a.node.peers["b"]
        wrong = codec.encode(Word("kind")).head.replace(b"system/word", b"system/wurd")
        await peer.send("puppet/data", codec.Encoded(wrong, [], []), timeout=5)
        await peer.send("puppet/data", b"bytes", timeout=5)
        await peer.send("puppet/data", Word("last"), timeout=5)
        await b.until(sm.Received, 2)
        assert [event.message.text for event in b.of(sm.Received)] == ["fine", "last"]
        for what in ("no use for a message of Foreign", "system/wurd", "no use for a message of bytes"):
            assert what in caplog.text

        outside = await stranger.dial(host_a.node.addresses[0])
        await outside.send("puppet/data", Word("from a node without a machine"), delivered=True, timeout=5)
        assert "knows no machine on stranger" in caplog.text
        assert not host_a.machine.of(sm.Received)  # type: ignore[attr-defined]


class Placing(Puppet):
    """Receives heaps into memory of its own, wrongly for some numbers."""

    name = "puppet"

    def __init__(self) -> None:
        super().__init__()
        self.memory = np.zeros(250_000, np.float32)

    @sm.place(Heap)
    def where(self, peer: str, head: codec.Head) -> object:
        number = head.fields["number"]
        if number == 1:
            return [self.memory]
        if number == 2:
            return [self.memory[:-1]]
        if number == 3:
            return [bytes(self.memory.nbytes)]
        if number == 4:
            return None
        if number == 5:
            raise MessageError("not this one")
        return 6


@KINDS
async def test_big_messages_arrive_in_the_machine_s_own_memory_and_wrong_memory_is_refused(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    b = Placing()
    async with two(kind, b=b) as (host_a, _):
        a = host_a.machine
        assert isinstance(a, Puppet)
        block = np.arange(250_000, dtype=np.float32)
        await do(host_a, *[sm.Send("b", Heap(number, block), "data", tag=number) for number in (1, 2, 3, 4)])
        await b.until(sm.Received, 2)
        assert [event.message.number for event in b.of(sm.Received)] == [1, 4]
        received = b.of(sm.Received)[0].message.values.numpy()
        assert np.shares_memory(received, b.memory)
        assert np.array_equal(b.memory, block)
        await a.until(sm.SendFailed, 2)
        assert [event.tag for event in a.of(sm.SendFailed)] == [2, 3]
        assert all("the place for it" in event.reason for event in a.of(sm.SendFailed))

        await do(host_a, sm.Send("b", Heap(5, block), "data", tag=5))
        assert "not this one" in (await a.until(sm.SendFailed, 3)).reason
        await do(host_a, sm.Send("b", Heap(6, block), "data", tag=6))
        left = await a.until(sm.PeerLeft)
        assert "its place for system/heap: TypeError" in left.reason


async def test_reports_and_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    class Measuring(Puppet):
        name = "puppet"

        @sm.on(sm.LinkMeasured, sm.ResourcesMeasured)
        def measured(self, event: sm.Event) -> Iterable[sm.Effect]:
            self.seen.append(event)
            self._more.set()
            yield sm.Report("measured", {"what": type(event).__name__})

    monkeypatch.setattr("p2pml.host.MEASURE_EVERY", 0.02)
    reports: list[str] = []
    machine = Measuring()
    async with two() as (host_a, _), Node("c") as node:
        async with Host(machine, node, report=lambda name, fields: reports.append(f"{name} {fields['what']}")):
            await node.dial(host_a.node.addresses[0])
            measured = await machine.until(sm.LinkMeasured)
            assert measured.peer == "a"
            await machine.until(sm.ResourcesMeasured, 2)
            assert machine.of(sm.ResourcesMeasured)[0].resources.memory_total > 0
        assert {"measured LinkMeasured", "measured ResourcesMeasured"} == set(reports)


async def test_the_credit_of_unhandled_messages_comes_back() -> None:
    """grpclib#67: a machine that ended must not hold up the others on its link."""
    async with two() as (host_a, host_b):
        await do(host_a, *[sm.Send("b", Word(str(number)), "one") for number in range(10)])
        await host_b.machine.until(sm.Received, 10)  # type: ignore[attr-defined]
        host_b.machine.finished = True
        peer = host_a.node.peers["b"]
        for _ in range(10):
            await peer.send("puppet/one", Word("into the void"), timeout=5)
        watch = Watch(host_b.node)
        await peer.close()
        await watch.until("left")
        assert host_b.node.budget.used == 0
