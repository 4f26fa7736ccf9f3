"""A peer's training by ChainSGD on a node: task, machine, host, and what is reported of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2pml import resources
from p2pml.cli.job import Job
from p2pml.errors import LinkClosed, P2PMLError
from p2pml.host import Host
from p2pml.node import Node
from p2pml.peer import Peer
from p2pml.telemetry import Telemetry

if TYPE_CHECKING:
    from p2pml.cli.trainee import GroupTrainer, Trainee
    from p2pml.protocols.chainsgd.training import ChainSGD, TrainingEnd

SAMPLE_SECONDS = 1.0
"""Time between two samples of the telemetry."""
LEAVE_SECONDS = 5.0
"""Time that a peer which is told to stop has to finish the running round and say goodbye."""
GRACE_SECONDS = 2.0
"""Time that the machine has to end by itself when the group's opener is gone."""

Emit = Callable[..., None]


class GroupLost(P2PMLError):
    """The training ended before its last round; the message says why."""


async def train(
    node: Node, job: Job, part: int, opener: str | None, arguments: argparse.Namespace, emit: Emit
) -> dict[str, Any]:
    """Train with the group of `opener` (None: this node opens it) until it ends; returns the figures of the whole run.

    arguments: those of `p2pml.cli.options.add_peer`. Events go to ``emit(kind, **fields)``. Cancelled, it leaves the group in
    order. Raises what made it fail.
    """
    async with _watched(node, opener) as check_opener:
        trainee = await asyncio.to_thread(_load, job, part, opener, arguments)
        trainer = trainee.trainer
        emit("ready", task=job.task, part=part, parts=job.parts, samples=len(trainer.data), rounds=trainer.rounds)
        recorder = _Recorder(trainer, node.id, arguments.verify)
        machine = _machine(trainee, node, opener, recorder)
        began = time.perf_counter()
        with Telemetry(node) as telemetry:

            def report(name: str, fields: Mapping[str, Any]) -> None:
                told = {("member" if key == "peer" else key): value for key, value in fields.items()}
                if "round" in told:
                    told["round"] += job.rounds_before
                if name == "round":
                    told |= telemetry.sample()
                emit(name, **told)

            async with Host(machine, node, seed=job.seed, report=report) as host:
                ticking = asyncio.create_task(_tick(telemetry, emit))
                try:
                    await check_opener(host.result())
                    ended: TrainingEnd = await host.result()
                except asyncio.CancelledError:
                    await asyncio.shield(host.stop(LEAVE_SECONDS))
                    raise
                finally:
                    ticking.cancel()
            figures = telemetry.sample()
        await asyncio.to_thread(recorder.close)
    last = {**(ended.rounds[-1] if ended.rounds else {"round": 0})}
    last["round"] += job.rounds_before
    if last["round"] < trainer.rounds:
        raise GroupLost(f"it is over after round {last['round']} of {trainer.rounds}: {ended.end.reason}")
    return {
        "protocol": "chainsgd",
        "task": job.task,
        "rounds": last["round"],
        "accuracy": last.get("accuracy"),
        "held_out_loss": last.get("held_out_loss"),
        "loss": last["loss"],
        "seconds": time.perf_counter() - began,
        **figures,
        "checkpoint": None if arguments.checkpoint is None else str(arguments.checkpoint),
    }


def _load(job: Job, part: int, opener: str | None, arguments: argparse.Namespace) -> Trainee:
    from p2pml.cli.trainee import make_trainee

    trainee = make_trainee(job, part, threads=arguments.threads)
    trainee.trainer.checkpoint = arguments.checkpoint
    if opener is None and arguments.resume:
        trainee.trainer.resume(arguments.checkpoint)
    return trainee


class _Recorder:
    """Tells the trainer the round, and keeps what `deviation` needs in files, which a thread of its own writes."""

    def __init__(self, trainer: GroupTrainer, peer: str, folder: Path | None) -> None:
        self._trainer, self._peer, self._folder = trainer, peer, folder
        self._writer = ThreadPoolExecutor(1, "recorder")
        self._written: list[Future[None]] = []

    def __call__(self, kind: str, number: int, tensors: Mapping[str, Any], weight: float) -> None:
        from p2pml.cli import deviation

        self._trainer.round = number + self._trainer.job.rounds_before
        if self._folder is not None:
            arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
            self._written.append(
                self._writer.submit(
                    deviation.record, self._folder, kind, self._trainer.round, self._peer, arrays, weight
                )
            )

    def close(self) -> None:
        """Wait for the files. Raises what went wrong with them."""
        self._writer.shutdown()
        for one in self._written:
            one.result()


def _machine(trainee: Trainee, node: Node, opener: str | None, recorder: _Recorder) -> ChainSGD:
    from p2pml.protocols.chainsgd.agent import Options
    from p2pml.protocols.chainsgd.training import ChainSGD

    trainer, job = trainee.trainer, trainee.trainer.job

    return ChainSGD(
        trainer,
        trainee.held_out,
        agent=opener,
        options=Options(min_peers=job.parts),
        addresses=node.addresses,
        resources=resources.measure().idle_cpus,
        rounds=trainer.rounds - job.rounds_before,
        steps_per_round=job.steps_per_round,
        combine=job.combine,
        weighting=job.weighting,
        record=recorder,
    )


async def _tick(telemetry: Telemetry, emit: Emit) -> None:
    while True:
        await asyncio.sleep(SAMPLE_SECONDS)
        emit("sample", **telemetry.sample())


@contextlib.asynccontextmanager
async def _watched(node: Node, opener: str | None) -> AsyncIterator[Callable[[Any], Any]]:
    """Watch for the opener's leaving, from now on, also as long as there is no machine that would.

    Gives a coroutine function that waits for the result of a machine, and raises `LinkClosed` if the machine does not notice.
    """
    gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def watch(what: str, peer: Peer, detail: Any) -> None:
        if what == "left" and peer.id == opener and not gone.done():
            gone.set_result(f"{opener}, who opened the group, is gone: {detail}")

    end = node.watch(watch)
    if opener is not None and opener not in node.peers:
        gone.set_result(f"{opener}, who opened the group, is gone")

    async def wait(result: Any) -> None:
        waiting = asyncio.ensure_future(result)
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                await asyncio.wait({waiting}, timeout=GRACE_SECONDS)
            if not waiting.done():
                raise LinkClosed(gone.result())
            waiting.result()
        finally:
            waiting.cancel()

    try:
        yield wait
    finally:
        end()
