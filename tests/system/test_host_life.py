"""Machines on real nodes: who comes and goes, how a machine ends, and faults that stay where they are."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable

import numpy as np
import pytest

from p2pml import statemachine as sm
from p2pml.errors import MachineFailed
from p2pml.host import Host
from p2pml.node import Node
from tests.system.hosts import Heap, Puppet, Word, address, do, two
from tests.system.nodes import Watch

KINDS = pytest.mark.parametrize("kind", ["memory", "tcp"])


class Careless(sm.StateMachine):
    """Has no handler for a computation that fails."""

    @sm.on(sm.Started)
    def start(self, event: sm.Started) -> Iterable[sm.Effect]:
        yield sm.Compute("step 1", lambda: [][0])


async def test_a_failed_computation_that_nobody_handles_stops_the_machine(caplog: pytest.LogCaptureFixture) -> None:
    """flower#1400: the traceback and the peer's name come out."""
    async with Node("a") as node, Host(Careless(), node) as host:
        with pytest.raises(
            MachineFailed, match=r"careless on a failed in its computation 'step 1': IndexError"
        ) as caught:
            await host.result()
    assert caught.value.peer == "a"
    assert "lambda: [][0]" in caught.value.trace
    assert isinstance(caught.value.__cause__, IndexError)
    assert "careless on a failed" in caplog.text  # also where nobody asks for the result


@KINDS
async def test_a_handler_that_raises_stops_its_machine_and_nothing_else(kind: str) -> None:
    def fail(event: sm.Received[Word]) -> Iterable[sm.Effect]:
        yield sm.Report("about to fail", {})
        raise ValueError(event.message.text * 10_000)

    b = Puppet({sm.Received: fail})
    async with two(kind, b=b) as (host_a, host_b):
        a = host_a.machine
        assert isinstance(a, Puppet)
        inbox = host_b.node.open("beside")
        waiting = asyncio.create_task(host_b.command("ask"))
        await asyncio.wait([waiting], timeout=0)
        await do(host_a, *[sm.Send("b", Word("bad news"), "data") for _ in range(50)])
        with pytest.raises(
            MachineFailed, match="puppet on b failed in its handler of Word from a: ValueError: bad news"
        ):
            await host_b.result()
        with pytest.raises(MachineFailed, match="bad news") as caught:
            await waiting
        assert "in fail" in caught.value.trace
        with pytest.raises(MachineFailed, match="bad news"):
            await host_b.command("ask")
        left = await a.until(sm.PeerLeft)
        assert left.peer == "b"
        assert left.reason.startswith("its machine failed in its handler of Word from a: ValueError: bad news")
        assert len(left.reason) < 600
        assert len(b.of(sm.Received)) == 1
        await host_a.node.peers["b"].send("beside", b"still there", timeout=5)
        assert (await inbox.receive(timeout=5))[1] == b"still there"
        assert not host_a.machine.finished


async def test_a_failure_in_the_first_handler_or_in_what_is_announced_is_told_in_the_same_way() -> None:
    async with Node("a") as node:
        async with Host(Puppet({sm.Started: lambda event: iter([1 / 0])}), node) as host:  # type: ignore[list-item]
            with pytest.raises(MachineFailed, match="handler of Started: ZeroDivisionError"):
                await host.result()
        machine = Careless()
        machine.name = "vain"  # type: ignore[misc]
        machine.info = {"face": object()}
        async with Host(machine, node) as host:
            with pytest.raises(MachineFailed, match="info that it announces"):
                await host.result()


async def test_connect_reaches_a_peer_or_says_why_not_for_each_address() -> None:
    async with two() as (host_a, _), Node("c", listen=[address("tcp")]) as node_c:
        a = host_a.machine
        assert isinstance(a, Puppet)
        dead = ["tcp://127.0.0.1:1", "memory://nowhere", "pigeon://x"]
        await do(host_a, sm.Connect("d", [*dead, *node_c.addresses]), sm.Connect("e", []), sm.Connect("b", dead))
        await a.until(sm.PeerLeft, 2)
        left = {event.peer: event.reason for event in a.of(sm.PeerLeft)}
        assert left["e"] == "cannot be reached (no address is known)"
        for where in dead:
            assert where in left["d"]
        assert "refused" in left["d"]
        assert f"{node_c.addresses[0]}: it is c's" in left["d"]
        assert "b" not in left

        async with Host(Puppet(), node_c):
            await do(host_a, sm.Connect("c", ["tcp://127.0.0.1:1", *node_c.addresses]))
            assert (await a.until(sm.PeerJoined, 2)).peer == "c"
            await do(host_a, sm.Disconnect("c", "enough"))
            assert (await a.until(sm.PeerLeft, 3)).reason == "enough"


async def test_a_connected_node_without_the_machine_joins_when_it_has_one_or_leaves() -> None:
    async with two() as (host_a, _), Node("c", listen=[address("tcp")]) as node_c:
        a = host_a.machine
        assert isinstance(a, Puppet)
        watches = Watch(host_a.node), Watch(node_c)
        await do(host_a, sm.Connect("c", node_c.addresses))
        assert [await watch.until("joined") for watch in watches] == [("c", None), ("a", None)]
        assert len(a.of(sm.PeerJoined)) == 1
        await node_c.peers["a"].close("no machine here")
        left = await a.until(sm.PeerLeft)
        assert (left.peer, "no machine here" in left.reason) == ("c", True)


@KINDS
async def test_finish_lets_the_last_messages_out_before_the_peers_hear_of_it(kind: str) -> None:
    async with two(kind) as (host_a, host_b):
        b = host_b.machine
        assert isinstance(b, Puppet)
        big = [sm.Send("b", Heap(number, np.ones(300_000, np.float32)), "data") for number in range(5)]
        finishing = asyncio.create_task(host_a.command("do", [*big, sm.Finish("bye"), sm.Send("b", Word("x"), "data")]))
        assert await host_a.result() == "bye"
        left = await b.until(sm.PeerLeft)  # and not only when its host is closed
        assert left == sm.PeerLeft("a", "its machine has finished")
        assert [event.message.number for event in b.of(sm.Received)] == [0, 1, 2, 3, 4]
        with pytest.raises(MachineFailed, match="has finished"):
            await finishing
        with pytest.raises(MachineFailed, match="puppet on a has finished"):
            await host_a.command("ask")


async def test_last_messages_that_nobody_takes_are_not_waited_for_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("p2pml.host.GOODBYE", 0.05)
    async with two() as (host_a, host_b):
        with pytest.raises(MachineFailed, match="has finished"):
            await do(host_a, sm.Send("b", Word("no credit"), "hand"), sm.Finish())
        assert (await host_b.machine.until(sm.PeerLeft)).reason == "its machine has finished"  # type: ignore[attr-defined]
        assert "not all of its last messages went out" in caplog.text


async def test_stopping_gives_the_machine_a_second_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stubborn = Puppet({sm.Stopping: lambda event: [sm.SetTimer("never", 60)]})
    async with Node("a") as node:
        async with Host(stubborn, node) as host:
            await host.stop(0.02)
            await host.stop(0.02)
            assert "did not end within 0.02 s" in caplog.text
            monkeypatch.setattr(host, "stop", lambda: Host.stop(host, 0.02))
        with pytest.raises(MachineFailed, match="closed before it had finished"):
            await host.result()


async def test_an_error_in_the_block_ends_the_machine_at_once() -> None:
    machine = Puppet()
    async with Node("a") as node:
        with pytest.raises(ZeroDivisionError):
            async with Host(machine, node):
                raise ZeroDivisionError
        assert not machine.of(sm.Stopping)


async def test_commands_are_answered_in_order_and_errors_are_raised() -> None:
    asked: list[sm.Command] = []

    def answer(event: sm.Command) -> Iterable[sm.Effect]:
        if event.name == "ask":
            asked.append(event)
        else:
            for command in asked:
                value = command.value
                yield sm.Reply("ask", value if isinstance(value, Exception) else value * 2)
            yield sm.Reply("ask", "one too many")
            yield sm.Reply("late", "done")

    async with Node("a") as node, Host(Puppet({sm.Command: answer}), node) as host:
        tasks = [asyncio.create_task(host.command("ask", value)) for value in (1, KeyError("no"), 2, 3)]
        await asyncio.wait(tasks, timeout=0)
        tasks[2].cancel()
        assert await host.command("late") == "done"
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[0] == 2
        assert repr(results[1]) == "KeyError('no')"
        assert isinstance(results[2], asyncio.CancelledError)
        assert results[3] == 6
        with pytest.raises(LookupError, match="no handler for command 'dance'"):
            await host.command("dance")
        assert not host.machine.finished


class Other(Puppet):
    name = "other"


@KINDS
async def test_two_machines_on_one_node_do_not_meet(kind: str) -> None:
    async with two(kind) as (host_a, host_b):
        x, y = Other(), Other()
        async with Host(x, host_a.node) as host_x:
            async with Host(y, host_b.node):
                await x.until(sm.PeerJoined)
                await y.until(sm.PeerJoined)
                await do(host_x, sm.Send("b", Word("other"), "data"))
                await do(host_a, sm.Send("b", Word("first"), "data"))
                await y.until(sm.Received)
                await host_b.machine.until(sm.Received)  # type: ignore[attr-defined]
            assert (await x.until(sm.PeerLeft)).reason == "its machine has finished"
        assert [event.message.text for event in y.of(sm.Received)] == ["other"]
        assert not host_a.machine.of(sm.PeerLeft)  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="open already"):
            async with Host(Puppet(), host_a.node):
                pass


async def test_a_host_that_is_closed_while_computing_waits_for_the_thread_and_drops_what_is_queued() -> None:
    begun, free, ran = threading.Event(), threading.Event(), []

    def work(number: int) -> None:
        ran.append(number)
        begun.set()
        free.wait(10)

    machine = Puppet()
    async with Node("a") as node:
        async with Host(machine, node) as host:
            await do(host, *[sm.Compute(number, work, (number,)) for number in range(3)])
            await asyncio.to_thread(begun.wait, 10)
            asyncio.get_running_loop().call_later(0.05, free.set)
        assert ran == [0]
        assert not machine.of(sm.Computed)


async def test_cancelling_a_host_closes_it() -> None:
    begun, free = threading.Event(), threading.Event()
    machine = Puppet({sm.Started: lambda event: [sm.Compute("long", lambda: (begun.set(), free.wait(10)))]})

    async def live(node: Node) -> None:
        async with Host(machine, node) as host:
            await host.result()

    async with Node("a") as node:
        task = asyncio.create_task(live(node))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.wait([task], timeout=0.01)
        assert not task.done()  # its thread still runs
        free.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert machine.finished


async def test_a_node_that_closes_before_its_host_is_no_disaster(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "p2pml")
    machine = Puppet()
    node = Node("a")
    async with node:
        host = await Host(machine, node).__aenter__()
    await do(host, sm.Connect("b", ["memory://x"]))
    assert await machine.until(sm.PeerLeft) == sm.PeerLeft("b", "the node is not running")
    await host.__aexit__(None, None, None)
    assert "its node has gone before it" in caplog.text
    assert await host.result() == "stopped"
