"""The accuracy over the rounds as a picture: the group beside each peer alone and one machine with all the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from p2pml.cli.outcome import Unwritable
from p2pml.errors import MissingExtra

Series = Sequence[float | None]


def require() -> None:
    """Raise `MissingExtra` if there is nothing to draw with, which is better known before a long run than after it."""
    if find_spec("matplotlib") is None:
        raise MissingExtra.of("matplotlib", "plot", "the plot (without it: --no-plot)")


def draw(path: Path, title: str, group: Series, alone: Mapping[str, Series], central: Series) -> None:
    """Write a picture, in the format of the path's suffix; all series hold a figure for each round, None where there is none."""
    require()
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and looks for a display
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for index, series in enumerate(alone.values()):
        # All in one colour and one entry: what matters is where they are as a group.
        axes.plot(*_points(series), color="#9aa5b1", linewidth=1.2, label=None if index else "each peer alone")
    axes.plot(*_points(central), color="#5b8a3c", linewidth=1.6, linestyle="--", label="one machine with all the data")
    axes.plot(*_points(group), color="#c8451b", linewidth=2.6, marker="o", markersize=4, label="the group")
    axes.set(title=title, xlabel="round", ylabel="accuracy on held-out data", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise Unwritable.of(path, error) from error


def _points(series: Series) -> tuple[list[int], list[float]]:
    known = [(number, value) for number, value in enumerate(series, 1) if value is not None]
    return [number for number, _ in known], [value for _, value in known]
