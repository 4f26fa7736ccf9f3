"""Whether the group's model is the mean: what peers contributed and got, kept in files, against the mean in float64."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TENSOR, _WEIGHT = "tensor:", "weight"
"""Names in a file: before each tensor's own, and of the weight."""
_NAME = re.compile(r"(?P<kind>contribution|result)-(?P<round>\d+)-(?P<peer>.+)\.npz")

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Deviation:
    """The largest distance of any value from the weighted mean, over all tensors, peers and rounds that were verified.

    absolute: as it is. relative: in units of the largest magnitude that the same tensor has in any contribution.
    identical: whether all peers of a round got the same bits.
    """

    rounds: int
    absolute: float
    relative: float
    identical: bool


def record(folder: Path, kind: str, round_: int, peer: str, tensors: Arrays, weight: float) -> None:
    """Keep a 'contribution' of a peer, or the 'result' that it got, with its weight, for `measure`."""
    entries: dict[str, Any] = {_TENSOR + name: tensor for name, tensor in tensors.items()}
    entries[_WEIGHT] = np.float64(weight)
    np.savez(folder / f"{kind}-{round_}-{peer}.npz", **entries)


def measure(folder: Path, peers: int) -> Deviation | None:
    """Compare what is in `folder`, for every round of which all `peers` kept both; None if there is no such round."""
    found: dict[int, dict[str, dict[str, Path]]] = {}
    for path in folder.iterdir():
        named = _NAME.fullmatch(path.name)
        if named is not None:
            kinds = found.setdefault(int(named["round"]), {"contribution": {}, "result": {}})
            kinds[named["kind"]][named["peer"]] = path
    rounds = [kinds for kinds in found.values() if all(len(paths) == peers for paths in kinds.values())]
    if not rounds:
        return None
    verified = [_verify(kinds) for kinds in rounds]
    absolute, relative = (max(one[index] for one in verified) for index in (0, 1))
    return Deviation(len(rounds), absolute, relative, all(one[2] for one in verified))


def _verify(kinds: Mapping[str, Mapping[str, Path]]) -> tuple[float, float, bool]:
    contributions = [_load(path) for path in kinds["contribution"].values()]
    results = [_load(path) for path in kinds["result"].values()]
    weights = np.array([float(contribution[_WEIGHT]) for contribution in contributions])
    absolute = relative = 0.0
    identical = True
    for name in results[0].keys() - {_WEIGHT}:
        first = results[0][name]
        values = np.stack([contribution[name].astype(np.float64) for contribution in contributions])
        mean = np.tensordot(weights, values, 1) / weights.sum()
        if not np.issubdtype(first.dtype, np.inexact):
            mean = np.rint(mean)  # counters are averaged too, and stay whole
        scale = float(np.abs(values).max(initial=0.0))
        for result in results:
            distance = float(np.abs(result[name].astype(np.float64) - mean).max(initial=0.0))
            absolute = max(absolute, distance)
            relative = max(relative, distance / scale if scale else distance)
            identical = identical and result[name].tobytes() == first.tobytes()
    return absolute, relative, identical


def _load(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}
