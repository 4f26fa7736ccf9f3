"""The end of a demo: a table beside which everything is, a picture, and the figures for programs."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import p2pml
from p2pml.cli import plot
from p2pml.cli.baselines import CENTRAL, Curve
from p2pml.cli.bench.report import show as show_table
from p2pml.cli.children import event
from p2pml.cli.group import GroupRun
from p2pml.cli.outcome import FAILED
from p2pml.cli.progress import Progress
from p2pml.cli.show import JsonLines, duration, size, write_json

PACKAGES = ("numpy", "torch", "uvloop", "cbor2")
LAG_TARGET = 0.02
"""Seconds; how late the loops may be at the 99th percentile while torch trains."""


def conclude(arguments: argparse.Namespace, group: GroupRun, curves: Mapping[str, Curve]) -> int:
    """Show, draw and write the results; returns the exit status."""
    failures = group.failures | {name: curve.error for name, curve in curves.items() if curve.error}
    figures = collect(arguments, group, curves)
    if group.is_complete:
        picture = None if arguments.no_plot else _draw(arguments, group, curves)
        figures["plot"] = None if picture is None else str(picture)
        if arguments.report == "json":
            JsonLines(Progress(), sys.stdout)(event("result", "", **figures))
        else:
            _show(group, curves, figures)
    if arguments.json is not None:
        write_json(arguments.json, figures)
    wrong = group.deviation is not None and not group.deviation.identical
    return FAILED if failures or wrong or not group.is_complete else 0


def collect(arguments: argparse.Namespace, group: GroupRun, curves: Mapping[str, Curve]) -> dict[str, Any]:
    """All figures; bytes and seconds, accuracies of 0 to 1, None for what is not known."""
    peers = group.progress.peers
    alone = {name: _last(curve.accuracy) for name, curve in curves.items() if name != CENTRAL}
    known = [value for value in alone.values() if value is not None]
    central = curves.get(CENTRAL, Curve())
    deviation = group.deviation
    history = [done.accuracy for done in group.progress.closed]
    return {
        "protocol": "chainsgd",
        "task": arguments.task,
        "peers": arguments.peers,
        "rounds": len(history),
        "accuracy": _last(history),
        "alone_accuracy": max(known) if known else None,
        "central_accuracy": _last(central.accuracy),
        "seconds": group.seconds,
        "total_seconds": time.time() - group.started_at,
        "bytes_sent": sum(peer.bytes_sent for peer in peers.values()),
        "peak_rss_bytes": max((peer.peak_rss_bytes for peer in peers.values()), default=None),
        "max_deviation_from_mean": None if deviation is None else deviation.absolute,
        "max_relative_deviation_from_mean": None if deviation is None else deviation.relative,
        "verified_rounds": 0 if deviation is None else deviation.rounds,
        "identical_on_all_peers": None if deviation is None else deviation.identical,
        "loop_lag_p99_seconds": max((peer.loop_lag_p99_seconds for peer in peers.values()), default=None),
        "alone_accuracies": alone,
        "accuracy_by_round": history,
        "alone_accuracy_by_round": {name: curve.accuracy for name, curve in curves.items() if name != CENTRAL},
        "central_accuracy_by_round": central.accuracy,
        "loss_by_round": [done.loss for done in group.progress.closed],
        "by_peer": {
            name: {
                "bytes_sent": peer.bytes_sent,
                "bytes_received": peer.bytes_received,
                "peak_rss_bytes": peer.peak_rss_bytes,
                "loop_lag_p99_seconds": peer.loop_lag_p99_seconds,
                "failure": group.failures.get(name),
            }
            for name, peer in peers.items()
        },
        "settings": {
            key: getattr(arguments, key)
            for key in ("rounds", "steps_per_round", "weighting", "combine", "seed", "loop")
        },
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Of p2pml, Python and the packages that matter."""
    found: dict[str, str | None] = {"p2pml": p2pml.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _draw(arguments: argparse.Namespace, group: GroupRun, curves: Mapping[str, Curve]) -> Path | None:
    series = [done.accuracy for done in group.progress.closed]
    if _last(series) is None:
        return None
    path: Path = arguments.plot or Path("runs", f"demo-chainsgd-{arguments.task.replace(':', '-')}.png")
    alone = {name: curve.accuracy for name, curve in curves.items() if name != CENTRAL}
    title = f"ChainSGD: {arguments.peers} peers train {arguments.task}, {len(series)} rounds"
    plot.draw(path, title, series, alone, curves.get(CENTRAL, Curve()).accuracy)
    return path


def _show(group: GroupRun, curves: Mapping[str, Curve], figures: Mapping[str, Any]) -> None:
    rows = [
        [
            f"the group of {figures['peers']}",
            _figure(figures["accuracy"]),
            duration(group.seconds),
            size(figures["bytes_sent"]),
            f"{size(figures['peak_rss_bytes'])} each",
        ]
    ]
    for name, curve in curves.items():
        title = "one machine with all the data" if name == CENTRAL else f"{name} alone"
        memory = "failed" if curve.error else size(curve.peak_rss_bytes)
        rows.append([title, _figure(_last(curve.accuracy)), duration(curve.seconds), "", memory])
    show_table(
        f"Accuracy on held-out data after {figures['rounds']} rounds of {figures['task']}",
        ["", "accuracy", "wall time", "bytes sent", "peak memory"],
        rows,
    )
    print()
    if figures["accuracy"] is not None and figures["alone_accuracy"] is not None:
        gain = figures["accuracy"] - figures["alone_accuracy"]
        print(f"The group is {abs(gain):.3f} {'better' if gain >= 0 else 'worse'} than the best peer alone.")
    if group.deviation is not None:
        same = "the same bits on all peers" if group.deviation.identical else "DIFFERENT on the peers"
        print(
            f"Its model is the mean of theirs to within {group.deviation.absolute:.1e} "
            f"({group.deviation.relative:.1e} relative), and {same}, in {group.deviation.rounds} verified rounds."
        )
    lag = figures["loop_lag_p99_seconds"]
    print(f"While torch trained, event loops were {lag * 1000:.1f} ms late or less in 99 % of the time.")
    for name, reason in group.failures.items():
        print(f"{name} FAILED ({reason}), the others went on without it.")
    if figures.get("plot"):
        print(f"Plot: {figures['plot']}")


def _last(series: list[float | None]) -> float | None:
    return series[-1] if series else None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
