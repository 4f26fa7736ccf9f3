"""The asyncio side of p2pml: a `Node` listens, dials, and exchanges messages with its `Peer`s on named channels.

::

    async with Node("alice", listen=["tcp://0.0.0.0:7700"]) as node:
        inbox = node.open("tensors")
        peer = await node.dial("tcp://10.0.0.2:7700")
        await peer.send("tensors", Gradient(round=1, values=array))
        sender, message = await inbox.receive()

Everything runs on one event loop. A node owns its listeners, links and tasks: leaving the ``async with`` block closes them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from p2pml.address import Address
from p2pml.errors import (
    DuplicateLink,
    HandshakeRefused,
    LinkClosed,
    MessageError,
    MessageTooLarge,
    P2PMLError,
    TransportError,
    UnknownChannel,
)
from p2pml.link import Link
from p2pml.peer import Inbox, Peer, Watcher, retrieve
from p2pml.transport import Listener, Transport, transport_for
from p2pml.wire import codec, events
from p2pml.wire.credits import MemoryBudget
from p2pml.wire.hello import SessionOptions
from p2pml.wire.options import ChannelOptions
from p2pml.wire.session import Session

logger = logging.getLogger("p2pml")

MAX_PENDING = 64
"""Incoming connections that have not completed their handshake; further ones are dropped."""
FIRST_DELAY = 0.1
LAST_DELAY = 10.0
"""Bounds of the back-off between attempts to reconnect, in seconds; the actual delay is random below it (full jitter)."""
PATIENCE = 5.0
"""Seconds that a node, when it closes, waits for its connections to be gone, before it drops them."""
DESCRIPTION = 15 << 10
"""Bytes that a node's channels and announced facts may take; a HELLO, which has them all, may have 16 KiB."""
GOODBYE = "the node shuts down"


class Node:
    """One peer of a group: an identity, its listeners, and its links.

    name: the peer id; by default a random one. Ids must differ within a group.
    listen: addresses to listen on.
    memory: bytes that all links together may hold of what they have received and nobody has taken.
    heartbeat, timeout: seconds between pings, and without any sign of life before a peer is given up.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        listen: Iterable[str] = (),
        memory: int = 1 << 30,
        max_message: int = 1 << 32,
        heartbeat: float = 2.5,
        timeout: float = 10.0,
        handshake: float = 10.0,
    ) -> None:
        self.id = name or secrets.token_hex(8)
        if len(self.id) > 128 or not self.id.isprintable():
            raise ValueError(f"a node's name is at most 128 printable characters, not {self.id!r:.200}")
        self.instance = secrets.token_hex(8)
        self.budget = MemoryBudget(memory)
        self.peers: dict[str, Peer] = {}
        self._listen = [Address.parse(text) for text in listen]
        self._session_options = SessionOptions(
            peer=self.id,
            instance=self.instance,
            heartbeat=heartbeat,
            timeout=timeout,
            handshake=handshake,
            max_message=max_message,
        )
        self._channels: dict[str, ChannelOptions] = {}
        self._preferences: dict[str, ChannelOptions] = {}
        self._inboxes: dict[str, Inbox] = {}
        self.sinks: dict[str, Callable[[Any, events.Arrived], None]] = {}
        self._placers: dict[str, Callable[[str, codec.Head], Any]] = {}
        self._listeners: list[Listener] = []
        self._links: set[Link] = set()
        self._accepted: dict[str, Link] = {}
        self._dials: dict[Link, asyncio.Future[Peer]] = {}
        self._awaited: dict[asyncio.Future[Peer], str] = {}
        self._watchers: list[Watcher] = []
        self._kept: dict[str, asyncio.Task[None]] = {}
        self._bytes_in = self._bytes_out = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._closing = False
        self._random = random.Random(self.instance)

    # ------------------------------------------------------------------------------------------------- life

    async def __aenter__(self) -> Node:
        if self._tasks is not None:
            raise RuntimeError("a node is entered once; make a new one")
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        try:
            for address in self._listen:
                await self.listen(str(address))
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        assert self._tasks is not None
        try:
            await self._shut_down()
        finally:
            # Not given the error of the block: it would come out wrapped in a group. The tasks end without errors of their own.
            await self._tasks.__aexit__(None, None, None)

    async def _shut_down(self) -> None:
        """Close all that is open. What must not be left out is done before the first await, where this may be cancelled."""
        self._closing = True
        for task in self._background:
            task.cancel()
        for link in list(self._links):
            link.close(GOODBYE)
        for inbox in self._inboxes.values():
            inbox._close()
        for future in self._awaited:
            _reject(future, LinkClosed(GOODBYE))
        try:
            await asyncio.gather(*(listener.close() for listener in self._listeners))
            if self._links:
                await asyncio.wait([link.finished for link in self._links], timeout=PATIENCE)
        finally:
            for link in list(self._links):
                link.abort(GOODBYE)
        if self._links:
            await asyncio.wait([link.finished for link in self._links], timeout=1.0)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that ends, at the latest, with the node. Raises `LinkClosed` if the node is not running."""
        if not self._runs():
            work.close()
            raise LinkClosed("the node is not running")
        assert self._tasks is not None
        task = self._tasks.create_task(_guard(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda _: work.close())  # if it was cancelled before it could begin
        return task

    def _runs(self) -> bool:
        return self._tasks is not None and not self._closing

    async def listen(self, address: str) -> list[str]:
        """Listen on one more address; returns where it can be dialed.

        Raises `AddressError`, `TransportError`, and `LinkClosed` if the node is not running.
        """
        where = Address.parse(address)
        carrier = transport_for(where)
        listener = await carrier.listen(where, lambda: self._accept(carrier))
        if not self._runs():
            await listener.close()
            raise LinkClosed("the node is not running")
        self._listeners.append(listener)
        return [str(found) for found in listener.addresses]

    @property
    def addresses(self) -> list[str]:
        """Where this node can be dialed."""
        return [str(address) for listener in self._listeners for address in listener.addresses]

    @property
    def bytes_in(self) -> int:
        """Bytes that all links of this node have received, those that are closed too, framing and control included."""
        return self._bytes_in + sum(link.session.bytes_in for link in self._links)

    @property
    def bytes_out(self) -> int:
        """Bytes that all links of this node have sent, those that are closed too, framing and control included."""
        return self._bytes_out + sum(link.session.bytes_out for link in self._links)

    # --------------------------------------------------------------------------------------------- channels

    def open(
        self,
        channel: str,
        options: ChannelOptions | None = None,
        *,
        handler: Callable[[Peer, events.Arrived], None] | None = None,
        place: Callable[[str, codec.Head], Any] | None = None,
    ) -> Inbox:
        """Open a channel for receiving, on all links, now and later. Peers can send on it as soon as they hear of it.

        With a `handler`, messages go to ``handler(peer, arrived)``, which must see to it that ``peer.link.consumed(arrived)`` is
        called, and not into the inbox. `place` says where large messages go (see `p2pml.statemachine.place`).
        """
        if channel in self._channels:
            raise ValueError(f"channel '{channel}' is open already")
        options = options or ChannelOptions()
        self._check_description({**self._channels, channel: options}, self._session_options.meta)
        self._channels[channel] = options
        self._preferences.setdefault(channel, options)
        inbox = self._inboxes[channel] = Inbox(channel)
        self.sinks[channel] = inbox._put if handler is None else handler
        if place is not None:
            self._placers[channel] = place
        for link in list(self._links):
            if not link.session.is_closed:
                link.session.add_channel(channel, options)
                link.kick()
        return inbox

    def _check_description(self, channels: Mapping[str, ChannelOptions], meta: Mapping[str, Any]) -> None:
        """Refuse what would not fit into a HELLO, before any link is told. Raises `MessageError`."""
        largest = 1 << 63  # for limits, which grow
        described = [[largest, name, largest, largest, largest] for name in channels]
        size = len(codec.plain_dumps({"channels": described, "meta": meta}, "what this node announces"))
        if size > DESCRIPTION:
            raise MessageTooLarge(f"this node's channels and facts take {size} bytes to tell (at most {DESCRIPTION})")

    def prefer(self, channel: str, options: ChannelOptions) -> None:
        """How this node sends on a channel of this name that it has not opened itself: priority, weight, compression."""
        self._preferences[channel] = options
        for link in self._links:
            link.session.sender.prefer(channel, options)

    def close_channel(self, channel: str) -> None:
        """Drop what is in a channel's inbox, and what still comes. The name stays taken for the life of the node's links."""
        inbox = self.channel(channel)
        self.sinks[channel] = lambda peer, arrived: peer.link.consumed(arrived)
        self._placers.pop(channel, None)
        while inbox.receive_nowait() is not None:
            pass

    def channel(self, name: str) -> Inbox:
        """The inbox of an open channel. Raises `UnknownChannel`."""
        try:
            return self._inboxes[name]
        except KeyError:
            raise UnknownChannel(
                f"no channel '{name}' is open here (open: {', '.join(self._channels) or 'none'})"
            ) from None

    def announce(self, key: str, value: Any) -> None:
        """Tell all peers, now and later, a small CBOR-able fact about this node; None takes it back. Raises `MessageError`."""
        meta = {**self._session_options.meta, key: value}
        if value is None:
            del meta[key]
        self._check_description(self._channels, meta)
        self._session_options.meta = meta
        for link in list(self._links):
            link.session.announce()
            link.kick()

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Have `watcher` called for what happens to peers; returns a function that ends it."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def _tell(self, what: str, peer: Peer, detail: Any = None) -> None:
        for watcher in list(self._watchers):
            try:
                watcher(what, peer, detail)
            except Exception:
                logger.exception("a watcher failed when it was told that %s %s", peer.id, what)

    # ---------------------------------------------------------------------------------------------- dialing

    async def dial(self, address: str, *, timeout: float = 10.0, keep: bool = False) -> Peer:
        """Connect to the node at `address`; if a link to it stands already, that is it.

        With `keep`, a link that is lost is dialed again, with growing random pauses, until the node or the peer is closed on
        this side, or the other side refuses for good. Cancelled, it leaves no link behind.

        Raises `AddressError`, `TransportError`, `HandshakeRefused`, `LinkClosed`, `ProtocolError` (what answers is no peer).
        """
        where = Address.parse(address)
        clock = asyncio.timeout(timeout)
        what = "no answer"
        try:
            async with clock:
                try:
                    peer = await self._dial_once(where)
                except DuplicateLink as duplicate:
                    what = f"{duplicate.peer} has another link to this node, which does not open here,"
                    peer = await self._joined(duplicate.peer)
        except TimeoutError as error:
            if clock.expired():
                raise TransportError(f"{address}: {what} within {timeout:g} s") from error
            raise
        if keep and peer.id not in self._kept:
            self._kept[peer.id] = self.spawn(self._keep(peer, where, timeout))
        return peer

    async def _dial_once(self, where: Address) -> Peer:
        if not self._runs():
            raise LinkClosed("the node is not running")
        carrier = transport_for(where)
        made = await carrier.dial(where, lambda: self._link(carrier, dialer=True))
        assert isinstance(made, Link)
        future: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self._dials[made] = future
        try:
            if not self._runs():
                raise LinkClosed("the node was closed meanwhile")
            if made.session.is_open:
                return self.peers[made.session.peer]
            if made.error is not None:
                raise made.error
            return await future
        except BaseException:
            made.close("the dial was given up")  # also where it opened in this very turn
            made.abort("the dial was given up")
            raise
        finally:
            retrieve(future)
            del self._dials[made]

    async def _joined(self, peer_id: str) -> Peer:
        """The peer of this id, once its link is open."""
        if peer_id in self.peers:
            return self.peers[peer_id]
        future: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self._awaited[future] = peer_id
        try:
            return await future
        finally:
            retrieve(future)
            del self._awaited[future]

    async def _keep(self, peer: Peer, where: Address, timeout: float) -> None:
        """Dial a peer again whenever its link is lost."""
        try:
            while True:
                await asyncio.shield(peer.link.finished)
                again = None if peer.dropped else self.peers.get(peer.id) or await self._redial(where, timeout)
                if again is None:
                    return
                if again.id != peer.id:  # a node that chooses its id at random was started anew
                    if again.id in self._kept:
                        return
                    self._kept[again.id] = self._kept.pop(peer.id)
                peer = again
        finally:
            if self._kept.get(peer.id) is asyncio.current_task():
                del self._kept[peer.id]

    async def _redial(self, where: Address, timeout: float) -> Peer | None:
        """Dial until it succeeds; None if the other side refuses for good."""
        delay = FIRST_DELAY
        while True:
            await asyncio.sleep(self._random.uniform(0, delay))
            delay = min(LAST_DELAY, delay * 2)
            try:
                return await self.dial(str(where), timeout=timeout)
            except P2PMLError as error:
                if isinstance(error, HandshakeRefused) and not error.retryable:
                    logger.warning("%s is not dialed again: %s", where, error)
                    return None
                logger.info("%s: %s; trying again", where, error)

    def unkeep(self, peer: str) -> None:
        """See `p2pml.peer.Keeper`."""
        task = self._kept.pop(peer, None)
        if task is not None:
            task.cancel()

    # ------------------------------------------------------------------------------------------------ links

    def _link(self, carrier: Transport, *, dialer: bool) -> Link:
        def make(now: float) -> Session:
            return Session(
                self._session_options,
                self._channels,
                self.budget,
                dialer=dialer,
                now=now,
                place=self._placer(lambda: link),
            )

        link = Link(self, make, asyncio.get_running_loop(), carrier)
        link.options = self._preferences
        for channel, preferred in self._preferences.items():
            link.session.sender.prefer(channel, preferred)
        self._links.add(link)
        link.finished.add_done_callback(lambda _: self._forget(link))
        return link

    def _forget(self, link: Link) -> None:
        self._links.discard(link)
        self._bytes_in += link.session.bytes_in
        self._bytes_out += link.session.bytes_out

    def _placer(self, link: Callable[[], Link]) -> Callable[[str, codec.Head], Any]:
        def place(channel: str, head: codec.Head) -> Any:
            placer = self._placers.get(channel)
            if placer is None:
                return None
            try:
                found = placer(link().session.peer, head)
                return None if found is None else [memoryview(buffer) for buffer in found]
            except MessageError:
                raise
            except Exception as error:
                logger.exception("the place for '%s' on channel '%s' failed", head.kind, channel)
                raise MessageError(f"{head.kind}: the receiver failed to find a place for it") from error

        return place

    def _accept(self, carrier: Transport) -> Link:
        link = self._link(carrier, dialer=False)
        sessions = [other.session for other in self._links if not other.session.dialer]
        pending = sum(1 for session in sessions if session.hello is None and not session.is_closed)
        if self._closing or pending > MAX_PENDING:
            link.session.lost(LinkClosed("too many connections without a handshake"))
        return link

    def said_hello(self, link: Link, hello: events.Hello) -> None:
        """Decide whether a link is wanted. Of two nodes that dial each other at once, the lower id's dial stays."""
        session = link.session
        if hello.instance == self.instance:
            session.refuse("this node dialed itself")
            return
        if hello.peer == self.id:
            session.refuse(f"peer id '{hello.peer}' is in use (it is this node's)")
            return
        other = self._accepted.get(hello.peer)
        if other is not None and not other.session.is_closed:
            same = other.session.hello is not None and other.session.hello.instance == hello.instance
            if not same:
                session.refuse(f"peer id '{hello.peer}' is in use", retry=True)
                return
            mine_wins = self.id < hello.peer
            if other.session.is_open or session.dialer == other.session.dialer or session.dialer != mine_wins:
                session.refuse_duplicate()
                return
            self._accepted[hello.peer] = link
            other.drop_duplicate()
        self._accepted[hello.peer] = link
        session.accept()

    def opened(self, link: Link) -> None:
        assert link.session.hello is not None
        peer = link.peer = Peer(self, link, link.session.hello)
        self.peers[peer.id] = peer
        dialing = self._dials.get(link)
        waiting = [future for future, peer_id in self._awaited.items() if peer_id == peer.id]
        for future in waiting if dialing is None else [dialing, *waiting]:
            if not future.done():
                future.set_result(peer)
        self._tell("joined", peer)

    def channels_changed(self, link: Link) -> None:
        if link.peer is not None:
            self._tell("changed", link.peer)

    def credit_available(self, link: Link, channel: str) -> None:
        if link.peer is not None:
            self._tell("credit", link.peer, channel)

    def closed(self, link: Link, error: P2PMLError, orderly: bool) -> None:
        dialing = self._dials.get(link)
        if dialing is not None:
            _reject(dialing, error)
        hello = link.session.hello
        if hello is None:
            if not isinstance(error, LinkClosed):
                logger.warning("a connection was dropped: %s", error)
            return
        if self._accepted.get(hello.peer) is link:
            del self._accepted[hello.peer]
        peer = self.peers.get(hello.peer)
        if peer is not None and peer.link is link:
            del self.peers[hello.peer]
            self._tell("left", peer, str(error))


def _reject(future: asyncio.Future[Any], error: P2PMLError) -> None:
    if not future.done():
        future.set_exception(error)


async def _guard(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        logger.exception("a background task of a node failed")
