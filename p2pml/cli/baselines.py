"""What a group is compared with: each peer alone with its own part of the data, and one machine with all of it.

They train as the peers do, from the same initial model and for as many rounds, only without averaging. ``python -m
p2pml.cli.baselines`` does it for one of them, in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from p2pml.cli.children import Child, Family, end_with_parent, event
from p2pml.cli.job import Job
from p2pml.cli.options import as_flags
from p2pml.cli.progress import Event, Progress
from p2pml.cli.show import JsonLines, describe
from p2pml.errors import P2PMLError
from p2pml.telemetry import peak_memory

CENTRAL = "central"


@dataclass(slots=True)
class Curve:
    """The held-out accuracy of a model after each round (None for a task that has no such figure), and what it took."""

    accuracy: list[float | None] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    error: str = ""


async def run_baselines(arguments: argparse.Namespace, names: Sequence[str], rounds: int) -> dict[str, Curve]:
    """Train the baselines of the peers `names`, which have the parts in this order, and the central one.

    As many at a time as there are processors. One that fails has an `error` in its curve.
    """
    curves = {name: Curve() for name in [*names, CENTRAL]}
    free = asyncio.Semaphore(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

    with _showing(arguments.report, names, rounds) as show:

        def take(child: Child, found: Event) -> None:
            curve = curves[child.name]
            if found["event"] == "round":
                curve.accuracy.append(found["accuracy"])
            elif found["event"] == "done":
                curve.samples, curve.seconds = found["samples"], found["seconds"]
                curve.peak_rss_bytes = found["peak_rss_bytes"]
            elif found["event"] == "exited":
                curve.error = f"{found['status']}: {found['tail'][-1] if found['tail'] else 'it said nothing'}"
            show({**found, "peer": child.name})

        async def run(name: str, part: int, parts: int, instead_of: int) -> None:
            async with free:
                flags = as_flags(arguments, "task", "steps_per_round", "seed")
                flags += ["--part", str(part), "--parts", str(parts), "--rounds", str(rounds)]
                flags += ["--instead-of", str(instead_of)]
                child = await family.start(name, ["p2pml.cli.baselines", *flags])
                await child.finished.wait()

        async with Family(take) as family, asyncio.TaskGroup() as tasks:
            tasks.create_task(run(CENTRAL, 0, 1, len(names)))  # the longest first
            for part, name in enumerate(names):
                tasks.create_task(run(name, part, len(names), 1))
    return curves


@contextmanager
def _showing(kind: str, names: Sequence[str], rounds: int) -> Iterator[Callable[[Event], None]]:
    """What to call with every event: bars on a terminal, else a line for each that is through, or JSON lines."""
    titles = {name: f"{name} alone" for name in names} | {CENTRAL: "one machine with all the data"}
    if kind == "json":
        json_lines = JsonLines(Progress(), sys.stdout)
        yield lambda found: json_lines({**found, "event": f"baseline {found['event']}"})
    elif kind == "auto" and sys.stdout.isatty():
        from p2pml.cli.live import bars

        with bars(titles, rounds) as show:
            yield show
    else:
        last: dict[str, Event] = {}

        def show_line(found: Event) -> None:
            name = found["peer"]
            if found["event"] == "round":
                last[name] = found
            elif found["event"] == "done":
                accuracy = last[name]["accuracy"]
                reached = "" if accuracy is None else f"accuracy {accuracy:.3f} "
                print(f"{titles[name]}: {reached}after {rounds} rounds in {found['seconds']:.1f} s", flush=True)
            elif found["event"] == "exited":
                print(f"{titles[name]}: {describe(found, Progress())}", flush=True)

        yield show_line


def main() -> int:
    """The process of one baseline."""
    parser = argparse.ArgumentParser(prog="p2pml.cli.baselines")
    parser.add_argument("--task", required=True)
    for flag in ("--part", "--parts", "--rounds", "--seed"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--steps-per-round", type=int)
    parser.add_argument("--instead-of", type=int, default=1)
    arguments = parser.parse_args()
    end_with_parent(lambda: os._exit(1))
    try:
        _train(arguments)
    except P2PMLError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _train(arguments: argparse.Namespace) -> None:
    from p2pml.cli.trainee import make_trainee

    job = Job(arguments.task, arguments.parts, arguments.rounds, seed=arguments.seed)
    trainee = make_trainee(job, arguments.part, threads=1)
    trainer = trainee.trainer
    steps = trainer.steps_per_epoch
    if arguments.steps_per_round is not None:
        steps = arguments.steps_per_round * arguments.instead_of
    show = JsonLines(Progress(), sys.stdout)
    began = time.perf_counter()
    for number in range(1, arguments.rounds + 1):
        result = trainer.steps(steps, (number - 1) / arguments.rounds)
        figures = trainer.evaluate(trainee.held_out)
        show(event("round", "", round=number, loss=result.loss, accuracy=figures.get("accuracy")))
    took = time.perf_counter() - began
    show(event("done", "", samples=len(trainer.data), seconds=took, peak_rss_bytes=peak_memory()))


if __name__ == "__main__":
    sys.exit(main())
