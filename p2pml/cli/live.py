"""The live display of a training on a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self, TextIO

from rich import live
from rich import progress as rich_progress
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from p2pml.cli.progress import Event, PeerProgress, Progress
from p2pml.cli.show import describe, duration, size

PER_SECOND = 8
"""How often it is drawn anew."""
NOTES = 4
"""How many of the last things that happened are shown below."""
BARS = "▁▂▃▄▅▆▇█"
STYLES = {"training": "green", "done": "bold green", "failed": "bold red", "left": "yellow", "joining": "yellow"}


class Live:
    """A context manager; call it with every event."""

    def __init__(self, progress: Progress, out: TextIO) -> None:
        self._progress = progress
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._live = live.Live(
            console=Console(file=out), get_renderable=self._render, refresh_per_second=PER_SECOND, transient=False
        )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.__exit__(None, None, None)

    def __call__(self, event: Event) -> None:
        text = describe(event, self._progress)
        self._progress.feed(event)
        if event["event"] in ("open", "exited"):
            self._live.console.print(Text(text))  # stays above, to be read and copied at leisure
        elif text:
            self._notes.append(text)

    def _render(self) -> RenderableType:
        return render(self._progress, self._notes, time.time())


def render(progress: Progress, notes: deque[str], now: float) -> RenderableType:
    """The display as it is at `now`, seconds since the epoch."""
    rows: list[RenderableType] = [_headline(progress, now)]
    if progress.closed:
        rows.append(_curve(progress))
    rows.append(_peers(progress))
    if progress.pairs:
        pairs = Text("combining  ", style="dim")
        pairs.append("   ".join(f"{sender} → {receiver}" for sender, receiver in progress.pairs), style="cyan")
        rows.append(pairs)
    rows += [Text(note, style="dim", overflow="ellipsis", no_wrap=True) for note in notes]
    return Group(*rows)


def _headline(progress: Progress, now: float) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    cells: list[RenderableType] = [Text(f"ChainSGD · {progress.task or '…'}", style="bold")]
    if progress.closed:
        done = progress.closed[-1].number
        cells.append(Text(f"round {done}/{progress.rounds or '?'}"))
        cells.append(ProgressBar(total=max(progress.rounds, done), completed=done, width=24))
        cells.append(Text(f"{size(progress.bytes_per_second)}/s"))
        left = progress.seconds_left(now)
        if left:
            cells.append(Text(f"ETA {duration(left)}"))
    else:
        here = len(progress.members) or sum(not peer.is_over for peer in progress.peers.values())
        cells.append(Text(f"{here} of {progress.expected or '?'} peers are here", style="yellow"))
    row.add_row(*cells)
    return row


def _curve(progress: Progress) -> RenderableType:
    accuracies = [done.accuracy for done in progress.closed if done.accuracy is not None]
    if not accuracies:
        return Text("")
    top = len(BARS) - 1
    bars = "".join(BARS[min(top, int(max(0.0, value) * len(BARS)))] for value in accuracies[-48:])
    text = Text("held-out accuracy  ", style="dim")
    text.append(bars, style="green")
    return text.append(f"  {accuracies[-1]:.3f}", style="bold green")


def _peers(progress: Progress) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("peer", "data", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("round", "loss", "sends", "receives", "memory", "loop lag"):
        table.add_column(title, justify="right", no_wrap=True)
    known = sorted(progress.peers.values(), key=lambda peer: peer.name)
    for peer in known:
        table.add_row(*_row(peer))
    for member in sorted(set(progress.members) - set(progress.peers)):
        table.add_row(member, "", "member", style="dim")
    return table


def _row(peer: PeerProgress) -> list[RenderableType]:
    state = Text(peer.state, style=STYLES.get(peer.state, ""))
    figures = [str(peer.round or ""), "" if peer.loss is None else f"{peer.loss:.3f}"]
    if peer.sampled is not None:
        figures += [f"{size(peer.send_rate)}/s", f"{size(peer.receive_rate)}/s"] if not peer.is_over else ["", ""]
        figures += [size(peer.peak_rss_bytes), f"{peer.loop_lag_p99_seconds * 1000:.1f} ms"]
    return [peer.name, peer.part, state, *figures]


@contextmanager
def bars(titles: Mapping[str, str], rounds: int) -> Iterator[Callable[[Event], None]]:
    """A bar for each of the baselines `titles` (by the names that are their events' peers); call it with every event."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with rich_progress.Progress(*columns) as shown:
        tasks = {name: shown.add_task(title, total=rounds, said="") for name, title in titles.items()}

        def show(event: Event) -> None:
            task = tasks[event["peer"]]
            if event["event"] == "round":
                reached = "" if event["accuracy"] is None else f"[green]{event['accuracy']:.3f}"
                shown.update(task, completed=event["round"], said=reached)
            elif event["event"] == "exited":
                shown.console.print(
                    Text("\n".join([f"{titles[event['peer']]} ended: {event['status']}", *event["tail"]]))
                )
                shown.update(task, said="[bold red]failed")

        yield show
