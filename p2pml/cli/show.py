"""Where the events of a training go: a live display on a terminal, plain lines, or JSON lines for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from p2pml.cli.outcome import Unwritable
from p2pml.cli.progress import Event, Progress

Sink = Callable[[Event], None]

_SENTENCES = {
    "joined": "{member} joined; members: {members}",
    "left": "{member} is gone: {reason}; members left: {members}",
    "rejected": "{member} was not let in: {reason}",
    "refused": "round {round}: the contribution of {member} is not used: {reason}",
    "accused": "{by} accuses {member}: {reason}",
    "aborted": "round {round} begins again: {reason}",
    "void": "round {round} has no result: {reason}",
    "note": "{peer}: {text}",
    "done": "{peer} is done",
    "stopped": "{peer} was stopped",
}
"""Of events that are told alike, whatever is known before."""


@contextmanager
def showing(kind: str, progress: Progress, out: TextIO | None = None) -> Iterator[Sink]:
    """What to call with every event; `kind` is 'lines', 'json', or 'auto': live on a terminal, lines elsewhere.

    `progress` is fed by it.
    """
    out = sys.stdout if out is None else out
    if kind == "auto" and out.isatty():
        from p2pml.cli.live import Live

        with Live(progress, out) as live:
            yield live
    elif kind == "json":
        yield JsonLines(progress, out)
    else:
        yield Lines(progress, out)


class JsonLines:
    """One JSON object on each line; NaN and infinities, which JSON does not have, become null."""

    def __init__(self, progress: Progress, out: TextIO) -> None:
        self._progress, self._out = progress, out

    def __call__(self, event: Event) -> None:
        self._progress.feed(event)
        print(json.dumps(_plain(event), allow_nan=False, separators=(",", ":")), file=self._out, flush=True)


class Lines:
    """Lines for people, where there is no terminal: what happens to peers, and each round once all have finished it."""

    def __init__(self, progress: Progress, out: TextIO) -> None:
        self._progress, self._out = progress, out
        self._shown = 0

    def __call__(self, event: Event) -> None:
        text = describe(event, self._progress)
        self._progress.feed(event)
        if text:
            print(text, file=self._out, flush=True)
        for _ in self._progress.closed[self._shown :]:
            print(describe_round(self._progress, self._shown, event["time"]), file=self._out, flush=True)
            self._shown += 1


def describe(event: Event, progress: Progress) -> str:
    """One line on what happened, or nothing for what is told otherwise. `progress` is as it was before."""
    kind, peer = event["event"], event["peer"]
    known = progress.peers.get(peer)
    if kind == "open":
        where = " ".join(event["addresses"])
        return f"{peer} opened a group of {event['parts']} to train {event['task']}; to join:  p2pml join {where}"
    if kind == "waiting":
        repeated = known is not None and known.reason == event["reason"]
        return "" if repeated else f"{peer} cannot join yet: {event['reason']}; trying again"
    if kind == "ready":
        return f"{peer} is ready with part {event['part'] + 1} of {event['parts']} ({event['samples']} examples)"
    if kind == "left" and event["reason"] == "its machine has finished":
        return ""  # all rounds are done, and everybody goes
    if kind in _SENTENCES:
        return _SENTENCES[kind].format_map(event)
    if kind == "exited":
        return "\n".join([f"{peer} ended with {event['status']}", *(f"  | {line}" for line in event["tail"])])
    return ""


def describe_round(progress: Progress, index: int, now: float) -> str:
    """A line on the round at `index` of those that are closed."""
    done = progress.closed[index]
    of = f"/{progress.rounds}" if progress.rounds else ""
    parts = [f"round {done.number}{of}"]
    if done.loss is not None:
        parts.append(f"loss {done.loss:.3f}")
    if done.accuracy is not None:
        parts.append(f"accuracy {done.accuracy:.3f}")
    parts.append(f"{size(done.bytes_sent)} at {size(done.bytes_per_second)}/s")
    if done.seconds is not None:
        parts.append(f"{done.seconds:.1f} s")
    if done.pairs:
        parts.append(" ".join(f"{sender}→{receiver}" for sender, receiver in done.pairs))
    left = progress.seconds_left(now)
    if left:
        parts.append(f"ETA {duration(left)}")
    return "  ".join(parts)


def write_json(path: Path, figures: Mapping[str, Any]) -> None:
    """Write figures to a file. Raises `Unwritable`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_plain(figures), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise Unwritable.of(path, error) from error


def size(count: float) -> str:
    """Bytes for people: '1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes all")


def duration(seconds: float) -> str:
    """Seconds for people: '42 s', '3:07', '1:02:45'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
