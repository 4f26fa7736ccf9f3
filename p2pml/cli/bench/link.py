"""`p2pml bench link`: one link over loopback TCP, p2pml beside raw sockets, ZeroMQ, asyncio streams and WebSockets.

Each contestant has two processes of its own, all started before the first measurement. They take turns in rounds, so that
whatever else the machine does hits all of them alike, and the figure of each is the median over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from p2pml.cli.bench import report
from p2pml.cli.bench.ends import End
from p2pml.cli.bench.harness import ContestantFailed, Group, installed_loops
from p2pml.cli.bench.ours import NodeEnd
from p2pml.cli.bench.report import Target
from p2pml.cli.bench.sockets import SocketEnd
from p2pml.cli.bench.streams import StreamEnd
from p2pml.cli.bench.websockets_ import WebSocketEnd
from p2pml.cli.bench.zmq_ import ZmqEnd

FAMILIES: dict[str, type[End]] = {
    "sockets": SocketEnd,
    "zmq": ZmqEnd,
    "streams": StreamEnd,
    "websockets": WebSocketEnd,
    "p2pml": NodeEnd,
}
WITHOUT_LOOP = ("sockets", "zmq")

MEASURES = {
    "throughput": "bytes/s of tensors, one way; p2pml receives into memory that was there before, as sockets do",
    "throughput_fresh": "the same, each tensor received into new memory",
    "rate": "small messages/s, one way, as bytes",
    "rate_typed": "the same, as a typed message of three fields",
    "round_trip": "seconds of a small message and its answer, median",
    "round_trip_typed": "the same, as a typed message",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is measured. Sizes are in bytes, the rest are counts for each round."""

    tensor_bytes: int = 46_440_000
    tensors: int = 8
    small_bytes: int = 100
    small_messages: int = 20_000
    round_trips: int = 2_000
    rounds: int = 5


QUICK = Settings(tensor_bytes=1 << 20, tensors=3, small_messages=500, round_trips=50, rounds=2)


@dataclass(frozen=True, slots=True)
class Ratio:
    """p2pml's figure over that of another family on the same loop; sockets and ZeroMQ have none. `bound` makes it a target."""

    key: str
    measure: str
    against: str
    bound: float | None = None
    at_least: bool = True


RATIOS = (
    Ratio("throughput_ratio_to_sockets", "throughput", "sockets", 0.80),
    Ratio("throughput_ratio_to_zmq", "throughput", "zmq", 1.0),
    Ratio("throughput_ratio_to_streams", "throughput", "streams"),
    Ratio("throughput_ratio_to_websockets", "throughput", "websockets"),
    Ratio("small_rate_ratio_to_websockets", "rate", "websockets", 2.0),
    Ratio("small_rate_ratio_to_streams", "rate", "streams", 2.0),
    Ratio("small_rate_ratio_to_sockets", "rate", "sockets"),
    Ratio("small_rate_ratio_to_zmq", "rate", "zmq"),
    Ratio("round_trip_ratio_to_streams", "round_trip", "streams", 1.5, at_least=False),
    Ratio("round_trip_ratio_to_websockets", "round_trip", "websockets", at_least=False),
)

Figures = dict[str, dict[str, list[float]]]
"""Contestant -> measure -> its figure in each round."""


@dataclass(slots=True)
class Outcome:
    """What was measured, and what could not be and why (contestant -> reason)."""

    figures: Figures = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def contestants(families: Sequence[str]) -> dict[str, tuple[type[End], str]]:
    """Name -> class and loop, in the order of their turns."""
    found = {}
    for family in families:
        if family in WITHOUT_LOOP:
            found[family] = (FAMILIES[family], "asyncio")
        else:
            found |= {f"{family}-{loop}": (FAMILIES[family], loop) for loop in installed_loops()}
    return found


def measure(families: Sequence[str], settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Run all rounds. A contestant that fails is left out from then on."""
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        groups: dict[str, tuple[type[End], Group]] = {}
        for name, (end, loop) in contestants(families).items():
            reason = end.missing()
            if reason is not None:
                outcome.unavailable[name] = reason
                continue
            say(f"starting {name}")
            try:
                groups[name] = end, stack.enter_context(Group(name, end, 2, loop=loop))
            except ContestantFailed as error:
                outcome.failed[name] = str(error)
        for number in range(settings.rounds):
            for name, (end, group) in list(groups.items()):
                say(f"round {number + 1} of {settings.rounds}: {name}")
                try:
                    found = _round(group, end, settings)
                except ContestantFailed as error:
                    outcome.failed[name] = str(error)
                    outcome.figures.pop(name, None)
                    del groups[name]
                    continue
                kept = outcome.figures.setdefault(name, {})
                for key, value in found.items():
                    kept.setdefault(key, []).append(value)
    return outcome


def _round(group: Group, end: type[End], settings: Settings) -> dict[str, float]:
    """One contestant's turn. The sender's stopwatch counts."""
    found = {}
    for way in end.bulk:
        key = "throughput" if way == "tensor" else f"throughput_{way}"
        found[key] = group.call("throughput", way, settings.tensor_bytes, settings.tensors)[0]
    for way in end.small:
        suffix = "" if way == "message" else f"_{way}"
        found[f"rate{suffix}"] = group.call("rate", way, settings.small_bytes, settings.small_messages)[0]
        found[f"round_trip{suffix}"] = group.call("round_trip", way, settings.small_bytes, settings.round_trips)[0]
    return found


def medians(figures: Figures) -> dict[str, dict[str, float]]:
    """Contestant -> measure -> median over the rounds."""
    return {name: {key: statistics.median(values) for key, values in kept.items()} for name, kept in figures.items()}


def compare(middle: Mapping[str, Mapping[str, float]], loops: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Key of a ratio -> loop -> its value, None where one of the two was not measured."""
    found: dict[str, dict[str, float | None]] = {}
    for ratio in RATIOS:
        found[ratio.key] = {}
        for loop in loops:
            other = ratio.against if ratio.against in WITHOUT_LOOP else f"{ratio.against}-{loop}"
            ours, theirs = (middle.get(name, {}).get(ratio.measure) for name in (f"p2pml-{loop}", other))
            found[ratio.key][loop] = None if ours is None or theirs is None else ours / theirs
    return found


def worst(ratio: Ratio, values: Mapping[str, float | None]) -> float | None:
    """Of the values on all loops the least favourable; None if one is missing."""
    present = [value for value in values.values() if value is not None]
    if len(present) < len(values):
        return None
    return min(present) if ratio.at_least else max(present)


def run(arguments: argparse.Namespace) -> int:
    """Measure, show, write. Returns the exit status."""
    settings = QUICK if arguments.quick else Settings()
    if arguments.rounds is not None:
        settings = Settings(**{**asdict(settings), "rounds": arguments.rounds})
    families = [family for family in FAMILIES if family in arguments.only]
    facts, loops = report.machine(), installed_loops()
    with report.progress() as say:
        outcome = measure(families, settings, say)
    middle = medians(outcome.figures)
    compared = compare(middle, loops)
    judged = [ratio for ratio in RATIOS if ratio.bound is not None and {"p2pml", ratio.against} <= set(families)]
    targets = [
        Target(f"{ratio.key} ({loop})", compared[ratio.key][loop], ratio.bound, ratio.at_least)
        for ratio in judged
        for loop in loops
        if ratio.bound is not None
    ]
    _show_figures(settings, outcome, middle)
    report.show_targets(targets, quick=arguments.quick)
    _show_others(compared, targets)
    report.show_end(facts, outcome.failed)
    if arguments.json is not None:
        result = {
            "bench": "link",
            "quick": arguments.quick,
            "machine": facts,
            "settings": asdict(settings),
            **{ratio.key: worst(ratio, compared[ratio.key]) for ratio in RATIOS},
            "per_loop": compared,
            "targets": [target.as_json() for target in targets],
            "measures": MEASURES,
            "medians": middle,
            "rounds": outcome.figures,
            "unavailable": outcome.unavailable,
            "failed": outcome.failed,
        }
        report.write_json(arguments.json, result)
    return report.exit_status(targets, outcome.failed, quick=arguments.quick)


def _show_figures(settings: Settings, outcome: Outcome, middle: Mapping[str, Mapping[str, float]]) -> None:
    units = [("throughput", 1e-9, 2), ("throughput_fresh", 1e-9, 2), ("rate", 1, 0), ("rate_typed", 1, 0)]
    units += [("round_trip", 1e6, 0), ("round_trip_typed", 1e6, 0)]
    rows = [
        [name, *(f"{kept[key] * scale:,.{digits}f}" if key in kept else "-" for key, scale, digits in units), ""]
        for name, kept in middle.items()
    ]
    absent = {**outcome.unavailable, **dict.fromkeys(outcome.failed, "failed, see below")}
    rows += [[name, *["-"] * len(units), reason] for name, reason in absent.items()]
    size = f"{settings.tensor_bytes / 1e6:.4g} MB"
    report.show(
        f"A link over loopback TCP: tensors of {size}, messages of {settings.small_bytes} B, medians of {settings.rounds} rounds",
        ["contestant", "GB/s", "GB/s fresh", "messages/s", "typed/s", "round trip µs", "typed µs", "note"],
        rows,
    )


def _show_others(compared: Mapping[str, Mapping[str, float | None]], targets: Sequence[Target]) -> None:
    shown = {target.name for target in targets}
    others = [
        [f"{key} ({loop})", f"{value:.2f}"]
        for key, values in compared.items()
        for loop, value in values.items()
        if value is not None and f"{key} ({loop})" not in shown
    ]
    if others:
        report.show("Other ratios", ["ratio", "value"], others)


def _families(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in FAMILIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(FAMILIES)}")
    return chosen


def add_parser(subparsers: Any) -> None:
    """Add the command `link`."""
    parser = subparsers.add_parser(
        "link",
        help="throughput, message rate and round trip of a link",
        description=__doc__,
        epilog=report.EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", type=_families, default=list(FAMILIES), metavar="A,B", help=f"of: {', '.join(FAMILIES)}"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds to take the median of (default 5)")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE as well")
    parser.set_defaults(run=run)
