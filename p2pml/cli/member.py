"""One peer of a group, as `p2pml start` and `p2pml join` run it: from its node to the exit status."""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import socket
import traceback
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from p2pml.cli import stopping
from p2pml.cli.children import event
from p2pml.cli.job import Dealer, Job, JobRefused, announce_wish, receive_job
from p2pml.cli.outcome import Misuse, Terminated
from p2pml.cli.progress import Progress
from p2pml.cli.show import Sink, duration, showing, size, write_json
from p2pml.cli.training import train
from p2pml.errors import HandshakeRefused, MachineFailed, P2PMLError, TransportError
from p2pml.node import Node
from p2pml.peer import Peer

FIRST_DELAY, LAST_DELAY = 0.2, 3.0
"""Bounds in seconds of the pauses between attempts to join."""

Summary = dict[str, Any]


class Member:
    """This peer's name, and where its events go."""

    def __init__(self, name: str, sink: Sink) -> None:
        self.name = name
        self._sink = sink

    def emit(self, kind: str, **fields: Any) -> None:
        """Something happened here."""
        self._sink(event(kind, self.name, **fields))


def run_member(
    arguments: argparse.Namespace, progress: Progress, work: Callable[[Member], Coroutine[Any, Any, Summary]]
) -> int:
    """Run a member from the arguments of its command; returns the exit status. Raises what made it fail."""
    name = arguments.name or f"{socket.gethostname().partition('.')[0][:40]}-{secrets.token_hex(2)}"
    with showing(arguments.report, progress) as sink:
        member = Member(name, sink)
        try:
            summary = stopping.run(work(member), arguments.loop, is_child=arguments.child)
        except (KeyboardInterrupt, Terminated):
            member.emit("stopped")
            raise
        except Exception as error:
            trace = (isinstance(error, MachineFailed) and error.trace) or traceback.format_exc()
            member.emit("failed", error=str(error) or type(error).__name__, trace=trace)
            raise
        member.emit("done", **summary)
    if arguments.json is not None:
        write_json(arguments.json, summary)
    if arguments.report != "json":
        print(_describe(summary))
    return 0


async def open_group(member: Member, arguments: argparse.Namespace, listen: list[str]) -> Summary:
    """Open a group and train with it."""
    job = Job(
        task=arguments.task,
        parts=arguments.peers,
        rounds=arguments.rounds,
        rounds_before=await asyncio.to_thread(_rounds_before, arguments) if arguments.resume else 0,
        steps_per_round=arguments.steps_per_round,
        weighting=arguments.weighting,
        combine=arguments.combine,
        seed=arguments.seed,
    )
    node = Node(member.name)
    dealer = Dealer(node, job, arguments.part[0] if arguments.part else 0)  # before anybody can ask for a part
    async with node:
        for address in listen:
            await node.listen(address)
        member.emit("open", addresses=node.addresses, task=job.task, parts=job.parts)
        return await train(node, job, dealer.own, None, arguments, member.emit)


def _rounds_before(arguments: argparse.Namespace) -> int:
    from p2pml.cli.trainee import rounds_in

    before = rounds_in(arguments.checkpoint, arguments.task)
    if arguments.rounds is not None and before >= arguments.rounds:
        raise Misuse(
            f"--rounds: the model in {arguments.checkpoint} has {before} rounds behind it, so there is nothing to do"
        )
    return before


async def join_group(member: Member, arguments: argparse.Namespace, listen: list[str]) -> Summary:
    """Join a group and train with it."""
    async with Node(member.name, listen=listen) as node:
        announce_wish(node, arguments.part)
        opener = await _reach(node, [str(address) for address in arguments.addresses], arguments.wait, member)
        job, part = await receive_job(node, opener)
        _check_task(job.task, arguments.task)
        return await train(node, job, part, opener.id, arguments, member.emit)


async def _reach(node: Node, addresses: list[str], wait: float | None, member: Member) -> Peer:
    """A link to whoever is at one of the addresses. Raises `TransportError` with the last reason for each of them."""
    reasons: dict[str, str] = {}
    delay = FIRST_DELAY
    try:
        async with asyncio.timeout(wait):
            while True:
                for address in addresses:
                    try:
                        return await node.dial(address)
                    except HandshakeRefused as error:
                        if not error.retryable:
                            raise
                        reasons[address] = str(error)
                    except P2PMLError as error:
                        reasons[address] = str(error)
                    member.emit("waiting", address=address, reason=reasons[address])
                await asyncio.sleep(random.uniform(delay / 2, delay))
                delay = min(LAST_DELAY, delay * 1.5)
    except TimeoutError:
        told = "; ".join(reasons.get(address, f"{address}: not tried yet") for address in addresses)
        raise TransportError(f"the group could not be joined within {wait:g} s: {told}") from None


def _check_task(theirs: str, mine: str | None) -> None:
    """A peer's word alone must not choose what code runs here."""
    if mine is not None and mine != theirs:
        raise Misuse(f"--task: the group trains '{theirs}', not '{mine}'")
    if mine is None and ":" in theirs:
        raise JobRefused(
            f"the group trains '{theirs}', code that this machine must have too: join with --task {theirs}"
        )


def _describe(summary: Mapping[str, Any]) -> str:
    """A finished training in one line."""
    accuracy = summary.get("accuracy")
    return (
        f"{summary['rounds']} rounds in {duration(summary['seconds'])}"
        + ("" if accuracy is None else f", held-out accuracy {accuracy:.3f}")
        + f"; {size(summary['bytes_sent'])} sent, {size(summary['bytes_received'])} received"
        + f", at most {size(summary['peak_rss_bytes'])} of memory"
        + (f"; the model is in {summary['checkpoint']}" if summary.get("checkpoint") else "")
    )
