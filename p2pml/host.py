"""Runs a state machine on a node, in real time.

The host owns what the machine must not touch: the clock, timers, worker threads and queues. Handlers run on the event loop,
one at a time; `Compute` effects run in worker threads, one for each lane, so that training never blocks the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from p2pml import statemachine as sm
from p2pml.errors import LinkClosed, MachineFailed, MessageError, P2PMLError
from p2pml.link import Ticket
from p2pml.node import Node, Peer
from p2pml.wire import codec, events

logger = logging.getLogger("p2pml")

GOODBYE = 1.0
"""Seconds in which a finished machine's last messages may still go out."""
MEASURE_EVERY = 1.0
"""Seconds between `LinkMeasured` events, for machines that want them."""
RUNNING, FINISHED, FAILED = "running", "finished", "failed"

Reporter = Callable[[str, Mapping[str, Any]], None]


class _SendTicket(Ticket):
    __slots__ = ("effect", "host")

    def __init__(self, host: Host, effect: sm.Send) -> None:
        self.host = host
        self.effect = effect

    def sent(self) -> None:
        if self.host.machine.handles(sm.Sent):
            self.host.feed(sm.Sent(self.effect.tag))

    def delivered(self) -> None:
        self.host.feed(sm.Delivered(self.effect.peer, self.effect.tag))

    def failed(self, error: P2PMLError) -> None:
        self.host.feed(sm.SendFailed(self.effect.peer, self.effect.tag, str(error)))


class Host:
    """One machine running on one node. Use ``async with Host(machine, node) as host: await host.result()``.

    seed: of the machine's random generator. report: called with every `Report`'s name and fields.
    """

    def __init__(self, machine: sm.StateMachine, node: Node, *, seed: int = 0, report: Reporter | None = None) -> None:
        self.machine = machine
        self.node = node
        self._seed = seed
        self._report = report
        self._events: deque[sm.Event] = deque()
        self._draining = False
        self._members: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._lanes: dict[str, ThreadPoolExecutor] = {}
        self._commands: dict[str, deque[asyncio.Future[Any]]] = {}
        self._result: asyncio.Future[Any] | None = None
        self._unwatch: Callable[[], None] | None = None
        self._ended = asyncio.Event()
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._effects: dict[type[sm.Effect], Callable[[Any], None]] = {
            sm.Send: self._send,
            sm.Grant: self._grant,
            sm.SetTimer: self._set_timer,
            sm.CancelTimer: self._cancel_timer,
            sm.Compute: self._compute,
            sm.Connect: self._connect,
            sm.Disconnect: self._disconnect,
            sm.Report: lambda effect: self._report(effect.name, effect.fields) if self._report else None,
            sm.Reply: self._reply,
            sm.Finish: self._finish,
        }

    # ------------------------------------------------------------------------------------------------- life

    async def __aenter__(self) -> Host:
        self._loop = asyncio.get_running_loop()
        self._result = self._loop.create_future()
        self._result.add_done_callback(_retrieve)
        machine, node = self.machine, self.node
        machine.begin(node.id, self._seed, self._loop.time())
        for name, options in machine.channels.items():
            node.open(self._channel(name), options, handler=self._arrived, place=self._place)
        self._unwatch = node.watch(self._watch)
        self.feed(sm.Started())
        node.announce(machine.name, [RUNNING, dict(machine.info)])
        for peer in list(node.peers.values()):
            self._look_at(peer)
        if machine.handles(sm.LinkMeasured):
            self._set_measuring()
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self.machine.finished and kind is None:
            await self.stop()
        self._end(LinkClosed("the host is closed"))
        await self._retire(FINISHED, "")
        if self._unwatch is not None:
            self._unwatch()
        for name in self.machine.channels:
            self.node.close_channel(self._channel(name))
        for lane in self._lanes.values():
            await asyncio.to_thread(lane.shutdown, wait=True, cancel_futures=True)

    async def result(self) -> Any:
        """What the machine finished with. Raises `MachineFailed` if it did not get there."""
        assert self._result is not None
        return await asyncio.shield(self._result)

    async def command(self, name: str, value: Any = None) -> Any:
        """Give the machine a `Command`, and wait for its `Reply`. Raises what the machine replied with, or `MachineFailed`."""
        if self._result is not None and self._result.done():
            self._result.result()
            raise MachineFailed(f"{self.machine.name} has finished", peer=self.node.id)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._commands.setdefault(name, deque()).append(future)
        self.feed(sm.Command(name, value))
        return await future

    async def stop(self, patience: float = GOODBYE) -> None:
        """Ask the machine to end, and wait for it, at most `patience` seconds."""
        self.feed(sm.Stopping())
        try:
            async with asyncio.timeout(patience):
                await self._ended.wait()
        except TimeoutError:
            logger.warning("%s did not end within %g s", self.machine.name, patience)

    def _end(self, error: P2PMLError) -> None:
        self.machine.finished = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for task in self._connecting.values():
            task.cancel()
        for waiting in self._commands.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
        self._commands.clear()
        if self._result is not None and not self._result.done():
            self._result.set_exception(error)
        self._ended.set()

    async def _retire(self, state: str, reason: str) -> None:
        """Let the last messages go out, then tell the peers that this machine has ended."""
        try:
            async with asyncio.timeout(GOODBYE):
                for peer_id in sorted(self._members):
                    peer = self.node.peers.get(peer_id)
                    if peer is not None:
                        await peer.link.drained()
        except TimeoutError:
            logger.warning("%s: not all of its last messages went out", self.machine.name)
        self.node.announce(self.machine.name, [state, reason])

    def _fail(self, error: BaseException, where: str) -> None:
        trace = "".join(traceback.format_exception(error))
        text = f"{self.machine.name} on {self.node.id} failed in {where}: {type(error).__name__}: {error}"
        self._end(MachineFailed(text, peer=self.node.id, trace=trace))
        self.node.announce(self.machine.name, [FAILED, f"{where}: {type(error).__name__}: {error}"])

    # ----------------------------------------------------------------------------------------------- events

    def feed(self, event: sm.Event) -> None:
        """Give the machine one more event, after those that wait."""
        self._events.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._draining = False

    def _step(self, event: sm.Event) -> None:
        if self.machine.finished:
            return
        try:
            for effect in self.machine.handle(event, self._loop.time()):
                self._effects[type(effect)](effect)
        except Exception as error:
            self._fail(error, f"its handler of {_describe(event)}")

    def _watch(self, what: str, peer: Peer, detail: Any) -> None:
        if what == "left":
            self._forget(peer.id, str(detail))
        elif what == "credit":
            channel = self._own_channel(detail)
            if channel is not None and peer.id in self._members:
                self.feed(sm.CreditGranted(peer.id, channel))
        else:
            self._look_at(peer)

    def _look_at(self, peer: Peer) -> None:
        """Has this peer a machine of the same name, and does it run?"""
        about = peer.meta.get(self.machine.name)
        if not isinstance(about, list) or len(about) != 2:
            return
        state, detail = about
        if state == RUNNING and peer.id not in self._members:
            self._members.add(peer.id)
            self.feed(sm.PeerJoined(peer.id, detail if isinstance(detail, dict) else {}))
        elif state == FAILED:
            self._forget(peer.id, f"its machine failed in {detail}")
        elif state == FINISHED:
            self._forget(peer.id, "its machine has finished")

    def _forget(self, peer: str, reason: str) -> None:
        if peer in self._members:
            self._members.discard(peer)
            self.feed(sm.PeerLeft(peer, reason))

    def _arrived(self, peer: Peer, arrived: events.Arrived) -> None:
        if peer.id not in self._members:
            self._look_at(peer)
        if not self.machine.accepts(type(arrived.message)):
            what = type(arrived.message).__name__
            peer.link.refuse(arrived, MessageError(f"{self.machine.name} has no use for a message of {what}"))
            return
        channel = self._own_channel(arrived.channel)
        assert channel is not None
        self.feed(sm.Received(peer.id, arrived.message, channel))
        arrived.message = None
        peer.link.consumed(arrived)

    def _place(self, peer: str, head: codec.Head) -> Any:
        method = self.machine._places.get(head.type)
        if method is None or self.machine.finished:
            return None
        try:
            return getattr(self.machine, method)(peer, head)
        except MessageError:
            raise
        except Exception as error:
            self._fail(error, f"its place for {head.kind}")
            raise MessageError(f"{self.machine.name} has failed") from error

    def _channel(self, name: str) -> str:
        return f"{self.machine.name}/{name}"

    def _own_channel(self, channel: str) -> str | None:
        owner, _, name = channel.partition("/")
        return name if owner == self.machine.name and name in self.machine.channels else None

    def _set_measuring(self) -> None:
        def measure() -> None:
            for peer_id in list(self._members):
                peer = self.node.peers.get(peer_id)
                if peer is not None:
                    self.feed(sm.LinkMeasured(peer_id, peer.bytes_per_second, peer.round_trip))
            if not self.machine.finished:
                self._timers["p2pml measure"] = self._loop.call_later(MEASURE_EVERY, measure)

        self._timers["p2pml measure"] = self._loop.call_later(MEASURE_EVERY, measure)

    # ---------------------------------------------------------------------------------------------- effects

    def _send(self, effect: sm.Send) -> None:
        peer = self.node.peers.get(effect.peer)
        tracked = effect.tag is not None
        if peer is None or effect.peer not in self._members:
            if tracked:
                self.feed(sm.SendFailed(effect.peer, effect.tag, "the peer is not here"))
            return
        options = self.machine.channels.get(effect.channel)
        if options is None:
            raise LookupError(f"{self.machine.name} has no channel '{effect.channel}'")
        channel = self._channel(effect.channel)
        session = peer.link.session
        if effect.or_drop and not session.sender.can_send(channel, codec.encode(effect.message).size):
            if tracked:
                self.feed(sm.SendFailed(effect.peer, effect.tag, "no credit"))
            return
        outlet = session.sender.channel(channel)
        if outlet is not None and len(outlet.queue) >= options.queue:
            raise RuntimeError(f"more than {options.queue} messages wait for {effect.peer} on '{effect.channel}'")
        ticket = _SendTicket(self, effect) if tracked else None
        want_delivery = tracked and self.machine.handles(sm.Delivered)
        try:
            peer.link.submit(channel, effect.message, ticket, key=effect.supersedes, tracked=want_delivery)
        except LinkClosed as error:
            if tracked:
                self.feed(sm.SendFailed(effect.peer, effect.tag, str(error)))

    def _grant(self, effect: sm.Grant) -> None:
        peer = self.node.peers.get(effect.peer)
        if peer is not None and not peer.link.session.is_closed:
            peer.link.session.receiver.grant(self._channel(effect.channel), effect.messages)
            peer.link.kick()

    def _set_timer(self, effect: sm.SetTimer) -> None:
        self._cancel_timer(effect)
        self._timers[effect.name] = self._loop.call_later(effect.delay, self._fire, effect.name)

    def _cancel_timer(self, effect: sm.SetTimer | sm.CancelTimer) -> None:
        timer = self._timers.pop(effect.name, None)
        if timer is not None:
            timer.cancel()

    def _fire(self, name: str) -> None:
        self._timers.pop(name, None)
        self.feed(sm.TimerFired(name))

    def _compute(self, effect: sm.Compute) -> None:
        lane = self._lanes.get(effect.lane)
        if lane is None:
            lane = self._lanes[effect.lane] = ThreadPoolExecutor(
                1, thread_name_prefix=f"{self.machine.name}-{effect.lane}"
            )

        def work() -> tuple[Any, float]:
            start = time.perf_counter()
            return effect.work(*effect.arguments), time.perf_counter() - start

        def done(future: asyncio.Future[tuple[Any, float]]) -> None:
            if future.cancelled() or self.machine.finished:
                _retrieve(future)
                return
            error = future.exception()
            if error is not None:
                self.feed(sm.ComputeFailed(effect.tag, error))
            else:
                result, seconds = future.result()
                self.feed(sm.Computed(effect.tag, result, seconds))

        self._loop.run_in_executor(lane, work).add_done_callback(done)

    def _connect(self, effect: sm.Connect) -> None:
        if effect.peer in self._members or effect.peer in self._connecting:
            return

        async def connect() -> None:
            reasons = []
            try:
                for address in effect.addresses:
                    try:
                        await self.node.dial(address)
                        return
                    except P2PMLError as error:
                        reasons.append(f"{address}: {error}")
                self.feed(
                    sm.PeerLeft(effect.peer, f"cannot be reached ({'; '.join(reasons) or 'no address is known'})")
                )
            finally:
                self._connecting.pop(effect.peer, None)

        self._connecting[effect.peer] = self.node.spawn(connect())

    def _disconnect(self, effect: sm.Disconnect) -> None:
        peer = self.node.peers.get(effect.peer)
        if peer is not None:
            peer.link.close(effect.reason)

    def _reply(self, effect: sm.Reply) -> None:
        waiting = self._commands.get(effect.name)
        future = waiting.popleft() if waiting else None
        if future is None or future.done():
            return
        if isinstance(effect.value, BaseException):
            future.set_exception(effect.value)
        else:
            future.set_result(effect.value)

    def _finish(self, effect: sm.Finish) -> None:
        assert self._result is not None
        if not self._result.done():
            self._result.set_result(effect.result)
        self._end(LinkClosed(f"{self.machine.name} has finished"))


def _describe(event: sm.Event) -> str:
    if isinstance(event, sm.Received):
        return f"{type(event.message).__name__} from {event.peer}"
    return type(event).__name__


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
