"""ChainSGD for an ordinary training loop: join a group, and every few steps hand over the model and get the group's back.

::

    group = Group.join("tcp://10.0.0.2:7700", model)    # or Group.start(model, listen="tcp://10.0.0.2:7700", peers=4)
    for step, batch in enumerate(batches):
        ...                                             # the loop as it was
        if step % 20 == 0:
            group.average()
    group.leave()

`Group` blocks; its links live on an event loop in a thread of its own, so that it works in a script, in a notebook, and in
processes that were spawned. In a program with an event loop of its own use a `p2pml.Node`, and a `p2pml.Host` with a
`ChainGroup`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from p2pml.errors import P2PMLError
from p2pml.host import Host
from p2pml.loops import LoopThread
from p2pml.node import Node
from p2pml.protocols.chainsgd.agent import Options
from p2pml.protocols.chainsgd.machine import AverageResult, ChainGroup, Contribution
from p2pml.protocols.chainsgd.member import GroupEnd
from p2pml.protocols.training.tensors import state_tensors

Reporter = Callable[[str, Mapping[str, Any]], None]


class Group:
    """One peer's membership in a group that averages models. Make one by `start` or `join`.

    model: a torch module, whose parameters and buffers are averaged in place; or a map of names to tensors or arrays. All
    peers' models must be alike. It gets the group's model when it joins, and must not change while `average` runs.
    """

    def __init__(self, model: Any, name: str | None, listen: Sequence[str], report: Reporter | None, loop: str) -> None:
        self.model = model
        self._name = name
        self._listen = listen
        self._report = report
        self._thread = LoopThread(loop)
        self._node: Node | None = None
        self._host: Host | None = None
        self._leave = asyncio.Event()
        self._life: concurrent.futures.Future[None] | None = None

    @classmethod
    def start(
        cls,
        model: Any,
        *,
        listen: str | Sequence[str] = "tcp://127.0.0.1:0",
        peers: int = 2,
        name: str | None = None,
        round_timeout: float | None = None,
        report: Reporter | None = None,
        loop: str = "auto",
    ) -> Group:
        """Open a group, whose initial model is this one; `addresses` is where others join.

        The first average begins when there are `peers` members, this one included. round_timeout: seconds after the first
        contribution to a round, after which it goes on without the members that have none yet; None waits for all.
        Raises `AddressError`, `TransportError`.
        """
        listening = [listen] if isinstance(listen, str) else list(listen)
        group = cls(model, name, listening, report, loop)
        group._begin(None, Options(min_peers=peers, round_timeout=round_timeout), None)
        return group

    @classmethod
    def join(
        cls,
        address: str,
        model: Any,
        *,
        listen: str | Sequence[str] = "tcp://127.0.0.1:0",
        name: str | None = None,
        timeout: float = 60.0,
        report: Reporter | None = None,
        loop: str = "auto",
    ) -> Group:
        """Join the group that was started at `address`, and take its model. Tried until it is there, `timeout` seconds long.

        listen: where the other members reach this one: an address of this machine that they can dial. Raises
        `AddressError`; `TransportError` with the last cause; `ModelMismatch`, naming the tensor, if the models differ.
        """
        listening = [listen] if isinstance(listen, str) else list(listen)
        group = cls(model, name, listening, report, loop)
        group._begin(address, None, timeout)
        return group

    def _begin(self, address: str | None, options: Options | None, timeout: float | None) -> None:
        begun: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._life = self._thread.submit(self._live(address, options, timeout, begun))
        try:
            concurrent.futures.wait([begun, self._life], return_when=concurrent.futures.FIRST_COMPLETED)
            if not begun.done():
                self._life.result()
            begun.result()
        except BaseException:
            self._life.cancel()
            self._thread.close()
            raise

    async def _live(
        self,
        address: str | None,
        options: Options | None,
        timeout: float | None,
        begun: concurrent.futures.Future[None],
    ) -> None:
        """The life of the membership, on the loop's thread."""
        async with Node(self._name, listen=self._listen) as node:
            agent = None if address is None else (await _dial(node, address, timeout or 0.0)).id
            tensors = self.model if isinstance(self.model, Mapping) else state_tensors(self.model)
            machine = ChainGroup(tensors, agent=agent, options=options, addresses=node.addresses)
            async with Host(machine, node, report=self._report) as host:
                self._node, self._host = node, host
                async with asyncio.timeout(timeout):
                    await host.command("joined")
                begun.set_result(None)
                await self._leave.wait()
                if not machine.finished:
                    await host.command("leave")

    @property
    def addresses(self) -> list[str]:
        """Where this peer can be dialed; those of the peer that started the group are where others join it."""
        return self._running()[0].addresses

    @property
    def members(self) -> list[str]:
        """The ids of the group's members, as this peer knows them."""
        machine = self._running()[1].machine
        assert isinstance(machine, ChainGroup)
        return list(machine.members)

    def average(self, weight: float = 1.0, timeout: float | None = None) -> AverageResult:
        """Hand in the model and wait for the group's average, which is then in the model.

        weight: how much this model counts, such as its number of samples. All members take part, so it waits for the
        slowest (see `start`, round_timeout). Raises `TrainingError` where a round has no result (naming whose NaN it
        was, say), `MachineFailed`, `LinkClosed`, and `TimeoutError` after `timeout` seconds.
        """
        result: AverageResult = self._call("average", Contribution(weight=weight), timeout)
        return result

    def leave(self) -> None:
        """Leave the group in order, after the round under way; safe to call twice. If this peer started it, it ends."""
        if self._life is None:
            return
        life, self._life = self._life, None
        try:
            self._thread.submit(_set(self._leave)).result()
            life.result()
        finally:
            self._thread.close()

    def _call(self, name: str, value: Any, timeout: float | None) -> Any:
        return self._thread.call(self._running()[1].command(name, value), timeout)

    def _running(self) -> tuple[Node, Host]:
        if self._life is None or self._node is None or self._host is None:
            raise P2PMLError("this peer has left its group")
        return self._node, self._host

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


async def _dial(node: Node, address: str, timeout: float) -> Any:
    """Dial until it works; the last error if it does not in time."""
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        try:
            return await node.dial(address, timeout=min(10.0, timeout))
        except (P2PMLError, OSError) as error:
            if isinstance(error, ValueError) or asyncio.get_running_loop().time() + 0.2 > deadline:
                raise
            await asyncio.sleep(0.2)


async def _set(event: asyncio.Event) -> None:
    event.set()


__all__ = ["AverageResult", "Group", "GroupEnd"]
