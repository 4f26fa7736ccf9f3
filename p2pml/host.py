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
from p2pml.link import Ticket, as_encoded
from p2pml.node import Node
from p2pml.peer import Peer
from p2pml.resources import measure
from p2pml.wire import codec, events
from p2pml.wire.options import ChannelOptions

logger = logging.getLogger("p2pml")

GOODBYE = 1.0
"""Seconds in which a finished machine's last messages may still go out."""
MEASURE_EVERY = 1.0
"""Seconds between `LinkMeasured` and `ResourcesMeasured` events, for machines that want them."""
MAX_REASON = 500
"""Characters of a failure that peers are told."""
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
        self._measuring: asyncio.TimerHandle | None = None
        self._lanes: dict[str, ThreadPoolExecutor] = {}
        self._computing: set[asyncio.Future[Any]] = set()
        self._unread: dict[int, tuple[Peer, events.Arrived]] = {}  # by the id of the event that says so
        self._commands: dict[str, deque[asyncio.Future[Any]]] = {}
        self._result: asyncio.Future[Any] | None = None
        self._unwatch: Callable[[], None] | None = None
        self._ended = asyncio.Event()
        self._failed = False
        self._retiring: asyncio.Task[None] | None = None
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._expected: set[str] = set()
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
        if machine.finished:
            return self
        try:
            node.announce(machine.name, [RUNNING, dict(machine.info)])
        except MessageError as error:
            self._fail(error, "the info that it announces")
            return self
        for peer in list(node.peers.values()):
            self._look_at(peer)
        if machine.handles(sm.LinkMeasured) or machine.handles(sm.ResourcesMeasured):
            self._measuring = self._loop.call_later(MEASURE_EVERY, self._measure)
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Ask the machine to end if it has not, and wait for the computations that are under way: a thread can't be stopped."""
        try:
            if not self.machine.finished and kind is None:
                await self.stop()
            self._close()
            if self._retiring is not None:
                await asyncio.wait([self._retiring])
        finally:
            self._close()
            if self._computing:
                await asyncio.wait(self._computing)

    def _close(self) -> None:
        self._end(f"{self.machine.name} on {self.node.id}: its host was closed before it had finished")
        self._retire_soon()
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        for name in self.machine.channels:
            self.node.close_channel(self._channel(name))
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)

    async def result(self) -> Any:
        """What the machine finished with. Raises `MachineFailed` if it did not get there."""
        assert self._result is not None
        return await asyncio.shield(self._result)

    async def command(self, name: str, value: Any = None) -> Any:
        """Give the machine a `Command`, and wait for its `Reply`.

        Raises what the machine replied with, `MachineFailed` if it ends or has ended, `LookupError` if it has no such command.
        """
        if self._result is not None and self._result.done():
            self._result.result()
            raise MachineFailed(f"{self.machine.name} on {self.node.id} has finished", peer=self.node.id)
        if (sm.Command, name) not in self.machine._handlers:
            raise LookupError(f"{self.machine.name} has no handler for command '{name}'")
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

    def _end(self, reason: str, cause: BaseException | None = None) -> None:
        """Stop everything that runs for the machine; who still waits for something from it gets a `MachineFailed`."""
        self.machine.finished = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._measuring is not None:
            self._measuring.cancel()
        for task in self._connecting.values():
            task.cancel()
        waiting = [future for asked in self._commands.values() for future in asked]
        self._commands.clear()
        if self._result is not None:
            waiting.append(self._result)
        trace = "".join(traceback.format_exception(cause)) if cause is not None else ""
        for future in waiting:
            if not future.done():
                failure = MachineFailed(reason, peer=self.node.id, trace=trace)
                failure.__cause__ = cause
                future.set_exception(failure)
        self._ended.set()

    def _retire_soon(self) -> None:
        """Let the last messages go out, then tell the peers that this machine has ended."""
        if self._retiring is None and not self._failed:
            try:
                self._retiring = self.node.spawn(self._retire())
            except LinkClosed:
                logger.info("%s: its node has gone before it", self.machine.name)

    async def _retire(self) -> None:
        try:
            async with asyncio.timeout(GOODBYE):
                for peer_id in sorted(self._members):
                    peer = self.node.peers.get(peer_id)
                    if peer is not None:
                        await peer.link.drained()
        except TimeoutError:
            logger.warning("%s: not all of its last messages went out", self.machine.name)
        self.node.announce(self.machine.name, [FINISHED, ""])

    def _fail(self, error: BaseException, where: str) -> None:
        self._failed = True
        what = f"{where}: {type(error).__name__}: {error}"
        text = f"{self.machine.name} on {self.node.id} failed in {what}"
        logger.warning("%s", text)
        self._end(text, error)
        self.node.announce(self.machine.name, [FAILED, what[:MAX_REASON]])

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

    # `Exception` is caught in what follows because a machine is other people's code: whatever it raises is its end, not the node's.

    def _step(self, event: sm.Event) -> None:
        if not self.machine.finished:
            try:
                for effect in self.machine.handle(event, self._loop.time()):
                    self._effects[type(effect)](effect)
            except Exception as error:
                self._fail(error, f"its handler of {_describe(event)}")
        if self._unread:
            self._give_back(self._unread.pop(id(event), None))

    def _watch(self, what: str, peer: Peer, detail: Any) -> None:
        if what == "left":
            self._forget(peer.id, str(detail))
        elif peer.link.session.is_closed:
            return  # its 'left' is on its way
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
            self._expected.discard(peer.id)
            self.feed(sm.PeerJoined(peer.id, detail if isinstance(detail, dict) else {}))
        elif state == FAILED:
            self._forget(peer.id, f"its machine failed in {detail}")
        elif state == FINISHED:
            self._forget(peer.id, "its machine has finished")

    def _forget(self, peer: str, reason: str) -> None:
        if peer in self._members or peer in self._expected:
            self._members.discard(peer)
            self._expected.discard(peer)
            self.feed(sm.PeerLeft(peer, reason))

    def _arrived(self, peer: Peer, arrived: events.Arrived) -> None:
        if self.machine.finished:
            peer.link.consumed(arrived)
            return
        if peer.id not in self._members or self.node.peers.get(peer.id) is not peer:
            # Not from a machine of this name, or unpacked so late that its sender has left.
            peer.link.refuse(arrived, MessageError(f"{self.machine.name} knows no machine on {peer.id}"))
            return
        if not self.machine.accepts(type(arrived.message)):
            what = type(arrived.message).__name__
            peer.link.refuse(arrived, MessageError(f"{self.machine.name} has no use for a message of {what}"))
            return
        channel = self._own_channel(arrived.channel)
        assert channel is not None
        event: sm.Received[Any] = sm.Received(peer.id, arrived.message, channel)
        arrived.message = None
        self._unread[id(event)] = (peer, arrived)
        self.feed(event)

    def _give_back(self, unread: tuple[Peer, events.Arrived] | None) -> None:
        """A message is done with: return its credit to its sender."""
        if unread is not None:
            peer, arrived = unread
            peer.link.consumed(arrived)

    def _place(self, peer: str, head: codec.Head) -> Any:
        method = self.machine._places.get(head.type)
        if method is None or self.machine.finished:
            return None
        try:
            found = getattr(self.machine, method)(peer, head)
            return None if found is None else [memoryview(buffer) for buffer in found]
        except MessageError:
            raise
        except Exception as error:
            self._fail(error, f"its place for {head.kind}")
            raise MessageError(f"{self.machine.name} has failed") from error

    def _channel(self, name: str) -> str:
        return f"{self.machine.name}/{name}"

    def _own_channel(self, channel: str) -> str | None:
        name = channel.removeprefix(f"{self.machine.name}/")
        return name if name in self.machine.channels and channel == self._channel(name) else None

    def _measure(self) -> None:
        if self.machine.handles(sm.LinkMeasured):
            for peer_id in sorted(self._members):
                peer = self.node.peers.get(peer_id)
                if peer is not None:
                    self.feed(sm.LinkMeasured(peer_id, peer.bytes_per_second, peer.round_trip))
        if self.machine.handles(sm.ResourcesMeasured):
            self.feed(sm.ResourcesMeasured(measure()))
        if not self.machine.finished:
            self._measuring = self._loop.call_later(MEASURE_EVERY, self._measure)

    # ---------------------------------------------------------------------------------------------- effects

    def _own_options(self, channel: str) -> ChannelOptions:
        try:
            return self.machine.channels[channel]
        except KeyError:
            raise LookupError(f"{self.machine.name} has no channel '{channel}'") from None

    def _send(self, effect: sm.Send) -> None:
        options, channel = self._own_options(effect.channel), self._channel(effect.channel)
        peer = self.node.peers.get(effect.peer)
        if peer is None or effect.peer not in self._members:
            self._decline(effect, "the peer is not here")
            return
        link, encoded, ticket = peer.link, as_encoded(effect.message), None
        if effect.or_drop and not link.can_send(channel, encoded.size):
            self._decline(effect, "no credit")
            return
        if effect.tag is not None:
            ticket = _SendTicket(self, effect)
        elif effect.supersedes is None and link.send_now(channel, encoded):
            return
        if link.waiting(channel) >= options.queue:
            raise RuntimeError(f"more than {options.queue} messages wait for {effect.peer} on '{effect.channel}'")
        want_delivery = ticket is not None and self.machine.handles(sm.Delivered)
        try:
            link.submit(channel, encoded, ticket, key=effect.supersedes, tracked=want_delivery)
        except LinkClosed as error:
            self._decline(effect, str(error))

    def _decline(self, effect: sm.Send, reason: str) -> None:
        if effect.tag is not None:
            self.feed(sm.SendFailed(effect.peer, effect.tag, reason))

    def _grant(self, effect: sm.Grant) -> None:
        if not self._own_options(effect.channel).manual:
            raise ValueError(f"channel '{effect.channel}' is not manual: its credit returns by itself")
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

        def work() -> sm.Computed | sm.ComputeFailed:
            start = time.perf_counter()
            try:
                result = effect.work(*effect.arguments)
            except BaseException as error:  # a future would not take some of them, such as StopIteration
                return sm.ComputeFailed(effect.tag, error)
            return sm.Computed(effect.tag, result, time.perf_counter() - start)

        def done(future: asyncio.Future[sm.Computed | sm.ComputeFailed]) -> None:
            self._computing.discard(future)
            self._give_back(consumed)
            if future.cancelled() or self.machine.finished:
                return
            event = future.result()
            if isinstance(event, sm.ComputeFailed) and not self.machine.handles(sm.ComputeFailed):
                self._fail(event.error, f"its computation {event.tag!r:.100}")
            else:
                self.feed(event)

        # Taken over from the handler, which would have returned the credit at its end.
        consumed = self._unread.pop(id(effect.consumes), None) if effect.consumes is not None else None
        future = self._loop.run_in_executor(lane, work)
        self._computing.add(future)
        future.add_done_callback(done)

    def _connect(self, effect: sm.Connect) -> None:
        if effect.peer in self._members or effect.peer in self._connecting:
            return
        try:
            self._connecting[effect.peer] = self.node.spawn(self._reach(effect))
        except LinkClosed as error:
            self.feed(sm.PeerLeft(effect.peer, str(error)))

    async def _reach(self, effect: sm.Connect) -> None:
        reasons = []
        try:
            for address in effect.addresses:
                try:
                    peer = await self.node.dial(address)
                except P2PMLError as error:
                    reasons.append(str(error) if address in str(error) else f"{address}: {error}")
                    continue
                if peer.id != effect.peer:
                    reasons.append(f"{address}: it is {peer.id}'s")
                elif not peer.link.session.is_closed:
                    if peer.id not in self._members:  # its machine may start later, or never
                        self._expected.add(peer.id)
                    return
        finally:
            self._connecting.pop(effect.peer, None)
        self.feed(sm.PeerLeft(effect.peer, f"cannot be reached ({'; '.join(reasons) or 'no address is known'})"))

    def _disconnect(self, effect: sm.Disconnect) -> None:
        peer = self.node.peers.get(effect.peer)
        if peer is not None:
            peer.drop(effect.reason)

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
        self._end(f"{self.machine.name} on {self.node.id} has finished")
        self._retire_soon()


def _describe(event: sm.Event) -> str:
    if isinstance(event, sm.Received):
        return f"{type(event.message).__name__} from {event.peer}"
    if isinstance(event, (sm.Command, sm.TimerFired)):
        return f"{type(event).__name__} '{event.name}'"
    return type(event).__name__


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
