"""What a bench shows: tables for people (rich on a terminal, plain lines elsewhere), JSON for programs, targets for both."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from p2pml.cli.bench.harness import installed_loops

MET, MISSED_OR_FAILED, NOT_JUDGED = 0, 1, 3
"""Exit statuses: all targets met; one missed, or a contestant failed; none missed, but one could not be judged."""
EXIT_STATUS = (
    "exit status: 0 if every target is met, 1 if one is missed or a contestant failed, 3 if one could not be judged because "
    "a package is not installed. With --quick the figures mean nothing, and targets are not judged."
)


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio and what it should be: at least, or at most, `bound`. Without a value it could not be measured."""

    name: str
    value: float | None
    bound: float
    at_least: bool

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def as_json(self) -> dict[str, Any]:
        kind = "at_least" if self.at_least else "at_most"
        return {"name": self.name, "value": self.value, kind: self.bound, "met": self.met}

    def as_row(self) -> list[str]:
        verdict = {True: "met", False: "MISSED", None: "not measured"}[self.met]
        value = "-" if self.value is None else f"{self.value:.2f}"
        return [self.name, value, f"{'≥' if self.at_least else '≤'} {self.bound:.3g}", verdict]


def exit_status(targets: Sequence[Target], failed: Mapping[str, str], *, quick: bool) -> int:
    """What the whole run says to a program."""
    if failed or (not quick and any(target.met is False for target in targets)):
        return MISSED_OR_FAILED
    if not quick and any(target.met is None for target in targets):
        return NOT_JUDGED
    return MET


def machine() -> dict[str, Any]:
    """The facts about this machine without which figures say little."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    packages: dict[str, str | None] = {}
    for name in ("uvloop", "numpy", "pyzmq", "websockets", "torch", "hivemind"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "loops": installed_loops(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "load_before": load,
        "packages": packages,
    }


def machine_line(facts: Mapping[str, Any]) -> str:
    """The same in one line for people."""
    packages = ", ".join(f"{name} {found}" for name, found in facts["packages"].items() if found)
    load = "" if facts["load_before"] is None else f", load {facts['load_before']:.1f}"
    return f"Python {facts['python']}, {facts['usable_cores']} of {facts['cores']} cores{load}; {packages}; {facts['platform']}"


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that shows what is going on: one live line on a terminal, a line for each call elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        yield lambda text: print(text, file=sys.stderr, flush=True)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column to the left, figures to the right."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if console.is_terminal:
        table = Table(title=title, title_justify="left", title_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    print(f"\n{title}")
    for row in (columns, *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        print("  ".join(cells).rstrip())


def show_targets(targets: Sequence[Target], *, quick: bool) -> None:
    """Print the targets and whether they are met."""
    if targets:
        show(
            "Targets (not judged: --quick)" if quick else "Targets",
            ["ratio", "value", "target", ""],
            [target.as_row() for target in targets],
        )


def show_end(facts: Mapping[str, Any], failed: Mapping[str, str], *more: str) -> None:
    """Print why contestants failed, and what all this was measured on."""
    for name, reason in failed.items():
        print(f"\n{name} failed: {reason}")
    print(f"\n{'; '.join([machine_line(facts), *more])}")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write the result for programs."""
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
