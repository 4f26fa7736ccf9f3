"""`p2pml bench reduce`: the mean of one float32 vector over N processes, p2pml beside gloo and, if wanted, hivemind.

For each N, every contestant has N processes of its own, all started before the first measurement; they take turns in rounds, so
that whatever else the machine does hits all of them alike, and the figure of each is the median over the rounds. A time is
from the common start until the last rank has the mean.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2pml.cli.bench import report
from p2pml.cli.bench.chain import ChainReducer
from p2pml.cli.bench.gloo import GlooReducer
from p2pml.cli.bench.harness import ContestantFailed, Group, installed_loops
from p2pml.cli.bench.hivemind_ import HivemindReducer
from p2pml.cli.bench.reducers import Reducer
from p2pml.cli.bench.report import Target

OURS = "p2pml"
FAMILIES: dict[str, type[Reducer]] = {OURS: ChainReducer, "gloo": GlooReducer, "hivemind": HivemindReducer}

START_DELAY = 0.5
"""Seconds until a common start: enough for a busy machine to tell all ranks of it."""
SMALL, IN_A_ROW = 4 << 20, 10
"""Vectors below `SMALL` bytes are reduced so often in one measurement: all ranks start at once only to a fraction of a ms."""
MEMORY_COPIES, MEMORY_SLACK = 2, 16_000_000
"""What a peer may need beyond its own model: so many models, and so many bytes."""

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(slots=True)
class Outcome:
    """What was measured with one number of peers, and what could not be and why (contestant -> reason)."""

    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Contestant -> size -> seconds of one reduction, in each round."""
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    """Contestant -> size -> bytes that the peer with the highest need had beyond its own vector, over all rounds."""
    memory_methods: set[str] = field(default_factory=set)
    unavailable: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def measure(
    families: Sequence[str], loop: str, peers: int, sizes: Mapping[str, int], rounds: int, say: Callable[[str], None]
) -> Outcome:
    """Run all rounds with `peers` processes for each contestant. One that fails is left out from then on."""
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        groups = {}
        for name in families:
            reason = FAMILIES[name].missing()
            if reason is not None:
                outcome.unavailable[name] = reason
                continue
            say(f"{peers} peers: starting {name}")
            try:
                groups[name] = stack.enter_context(Group(name, FAMILIES[name], peers, loop=loop))
            except ContestantFailed as error:
                outcome.failed[name] = str(error)
        for number in range(rounds + 1):
            for label, size in sizes.items():
                for name, group in list(groups.items()):
                    say(f"{peers} peers: {label}, {f'round {number} of {rounds}' if number else 'warming up'}: {name}")
                    try:
                        _turn(outcome, name, group, label, size, counts=number > 0)
                    except ContestantFailed as error:
                        outcome.failed[name] = str(error)
                        outcome.seconds.pop(name, None)
                        outcome.memory.pop(name, None)
                        del groups[name]
    return outcome


def _turn(outcome: Outcome, name: str, group: Group, label: str, size: int, *, counts: bool) -> None:
    group.call("meet", group.call("fill", size // 4))
    times = IN_A_ROW if size < SMALL else 1
    ranks = group.call("timed", time.monotonic() + START_DELAY, times)
    group.call("verify")
    group.call("forget")
    seconds = (max(ended for _, ended, _, _ in ranks) - min(began for began, _, _, _ in ranks)) / times
    if counts:
        outcome.seconds.setdefault(name, {}).setdefault(label, []).append(seconds)
        highest = outcome.memory.setdefault(name, {})
        highest[label] = max(highest.get(label, 0), *(extra for _, _, extra, _ in ranks))
        outcome.memory_methods.update(method for _, _, _, method in ranks)


def compare(
    outcomes: Mapping[int, Outcome], sizes: Mapping[str, int], against: str
) -> dict[str, dict[str, float | None]]:
    """Size -> number of peers -> our median time over that of `against`, None where one of the two was not measured."""
    found: dict[str, dict[str, float | None]] = {}
    for label in sizes:
        found[label] = {}
        for peers, outcome in outcomes.items():
            ours, theirs = (outcome.seconds.get(name, {}).get(label) for name in (OURS, against))
            ratio = None if ours is None or theirs is None else statistics.median(ours) / statistics.median(theirs)
            found[label][str(peers)] = ratio
    return found


def memory_copies(outcomes: Mapping[int, Outcome], label: str, size: int) -> dict[str, float | None]:
    """Number of peers -> our extra memory in sizes of the vector."""
    need = {peers: outcome.memory.get(OURS, {}).get(label) for peers, outcome in outcomes.items()}
    return {str(peers): None if extra is None else extra / size for peers, extra in need.items()}


def worst(values: Mapping[str, float | None]) -> float | None:
    """The highest; None if one is missing."""
    present = [value for value in values.values() if value is not None]
    return max(present) if present and len(present) == len(values) else None


def judge(
    ratios: Mapping[str, Mapping[str, Mapping[str, float | None]]],
    copies: Mapping[str, float | None],
    sizes: Mapping[str, int],
) -> list[Target]:
    """All targets. `ratios`: against whom -> size -> number of peers -> value; `copies` as of `memory_copies`."""
    largest = max(sizes, key=lambda label: sizes[label])
    targets = []
    for against, of_sizes in ratios.items():
        for label, of_peers in of_sizes.items():
            for peers, value in of_peers.items():
                bound = _bound(against, sizes[label])
                if bound is not None:
                    name = f"time_ratio_to_{against} ({label}, {peers} peers)"
                    targets.append(Target(name, value, bound, at_least=False))
    allowed = MEMORY_COPIES + MEMORY_SLACK / sizes[largest]
    for peers, value in copies.items():
        targets.append(Target(f"extra_memory_copies ({largest}, {peers} peers)", value, allowed, at_least=False))
    return targets


def _bound(against: str, size: int) -> float | None:
    if against == "hivemind":
        return 0.1
    if size <= 1 << 20:
        return 1.0
    return 1.1 if size >= 10**7 else None


def run(arguments: argparse.Namespace) -> int:
    """Measure, show, write. Returns the exit status."""
    sizes: dict[str, int] = arguments.sizes or parse_sizes("4KB,256KB" if arguments.quick else "4KB,1MiB,46.4MB")
    rounds = arguments.rounds or (2 if arguments.quick else 5)
    against: list[str] = arguments.against
    families = [name for name in (OURS, *against) if name in FAMILIES]
    facts = report.machine()
    with report.progress() as say:
        outcomes = {peers: measure(families, arguments.loop, peers, sizes, rounds, say) for peers in arguments.peers}
    largest = max(sizes, key=lambda label: sizes[label])
    ratios = {name: compare(outcomes, sizes, name) for name in against}
    copies = memory_copies(outcomes, largest, sizes[largest])
    targets = judge(ratios, copies, sizes)
    _show_figures(sizes, rounds, outcomes)
    report.show_targets(targets, quick=arguments.quick)
    failed = {
        f"{name} ({peers} peers)": why for peers, outcome in outcomes.items() for name, why in outcome.failed.items()
    }
    report.show_end(facts, failed, f"loop of p2pml: {arguments.loop}")
    if arguments.json is not None:
        result = {
            "bench": "reduce",
            "quick": arguments.quick,
            "machine": facts,
            "settings": {"peers": arguments.peers, "sizes": sizes, "rounds": rounds, "loop": arguments.loop},
            **{f"time_ratio_to_{name}": worst(ratios[name][largest]) for name in against},
            "extra_memory_copies": worst(copies),
            "memory_method": sorted(set().union(*(outcome.memory_methods for outcome in outcomes.values()))),
            "ratios": ratios,
            "extra_memory_copies_by_peers": copies,
            "targets": [target.as_json() for target in targets],
            "seconds": {str(peers): outcome.seconds for peers, outcome in outcomes.items()},
            "extra_memory_bytes": {str(peers): outcome.memory for peers, outcome in outcomes.items()},
            "unavailable": {name: why for outcome in outcomes.values() for name, why in outcome.unavailable.items()},
            "failed": failed,
        }
        report.write_json(arguments.json, result)
    return report.exit_status(targets, failed, quick=arguments.quick)


def _show_figures(sizes: Mapping[str, int], rounds: int, outcomes: Mapping[int, Outcome]) -> None:
    rows = []
    for peers, outcome in outcomes.items():
        for name, of_sizes in outcome.seconds.items():
            for label, seconds in of_sizes.items():
                copies = outcome.memory[name][label] / sizes[label]
                rows.append([name, str(peers), label, f"{statistics.median(seconds) * 1e3:.2f}", f"{copies:.2f}", ""])
        absent = {**outcome.unavailable, **dict.fromkeys(outcome.failed, "failed, see below")}
        rows += [[name, str(peers), "-", "-", "-", reason] for name, reason in absent.items()]
    columns = ["contestant", "peers", "size", "ms", "extra memory, copies", "note"]
    report.show(f"Mean of float32 over processes, medians of {rounds} rounds", columns, rows)


def parse_sizes(text: str) -> dict[str, int]:
    """'4KB,1MiB' -> label -> bytes, a multiple of a float32's. Raises `argparse.ArgumentTypeError`."""
    sizes = {}
    for label in text.split(","):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B)", label.strip(), re.IGNORECASE)
        size = round(float(found[1]) * _UNITS[found[2].upper()]) // 4 * 4 if found else 0
        if not size:
            raise argparse.ArgumentTypeError(f"{label!r} is no size of at least 4 bytes, such as 4KB, 1MiB or 46.4MB")
        sizes[label.strip()] = size
    return sizes


def _peers(text: str) -> list[int]:
    numbers = [int(number) for number in text.split(",") if number.isdecimal()]
    if len(numbers) != text.count(",") + 1 or min(numbers) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 2 on, such as 2,4,8")
    return numbers


def _against(text: str) -> list[str]:
    chosen, known = text.split(","), [name for name in FAMILIES if name != OURS]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    for name in chosen:
        reason = FAMILIES[name].missing()
        if reason is not None:
            raise argparse.ArgumentTypeError(f"{name} is {reason}")
    return chosen


def add_parser(subparsers: Any) -> None:
    """Add the command `reduce`."""
    loops = installed_loops()
    parser = subparsers.add_parser(
        "reduce",
        help="reduction and broadcast over N processes",
        description=__doc__,
        epilog=report.EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--peers", type=_peers, default=[2, 4, 8], metavar="N,M", help="how many processes (default 2,4,8)"
    )
    parser.add_argument("--sizes", type=parse_sizes, metavar="A,B", help="of the vectors (default 4KB,1MiB,46.4MB)")
    parser.add_argument(
        "--against", type=_against, default=["gloo"], metavar="A,B", help="gloo, hivemind (default gloo)"
    )
    parser.add_argument("--loop", choices=loops, default=loops[-1], help=f"p2pml's event loop (default {loops[-1]})")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds to take the median of (default 5)")
    parser.add_argument("--quick", action="store_true", help="small vectors and few rounds: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE as well")
    parser.set_defaults(run=run)
