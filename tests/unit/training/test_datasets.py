from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pml.errors import MissingExtra
from p2pml.protocols.training import datasets
from p2pml.protocols.training.errors import TaskError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("P2PML_CACHE", str(folder))
    return folder


def refuse(source: Path) -> dict[str, Any]:
    raise AssertionError(f"{source} was read although a copy is cached")


def test_the_watch_data_is_what_its_description_says() -> None:
    data = datasets.watch()
    assert data.windows.shape == (3605, 6, 128)
    assert data.windows.dtype == np.float32
    assert data.labels.dtype == data.subjects.dtype == np.int64
    assert np.unique(data.subjects).tolist() == list(range(1, 11))
    assert np.unique(data.labels).tolist() == list(range(len(datasets.WATCH_CLASSES)))
    # consecutive windows of one recording overlap by half
    assert np.array_equal(data.windows[0, :, 64:], data.windows[1, :, :64])


def test_the_digits_are_what_their_description_says() -> None:
    data = datasets.mnist5k()
    assert data.images.shape == (5000, 1, 28, 28)
    assert data.images.dtype == np.uint8
    assert np.bincount(data.labels).tolist() == [500] * 10


def test_the_second_time_comes_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = datasets.watch()
    monkeypatch.setattr(datasets, "_read_watch", refuse)
    assert all(map(np.array_equal, first, datasets.watch()))
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 no archive", None, "other arrays", "a bit"])
def test_a_damaged_cache_is_made_anew(cache: Path, damage: bytes | str | None) -> None:
    expected = datasets.watch()
    (file,) = cache.iterdir()
    content = bytearray(file.read_bytes())
    if damage is None:
        file.write_bytes(content[: len(content) // 2])
    elif damage == "other arrays":
        with file.open("wb") as stream:
            np.savez(stream, something=np.zeros(3))
    elif damage == "a bit":
        content[len(content) // 3] ^= 1
        file.write_bytes(content)
    else:
        assert isinstance(damage, bytes)
        file.write_bytes(damage)
    for found in (datasets.watch(), datasets.watch()):
        assert all(map(np.array_equal, expected, found))
    assert list(cache.iterdir()) == [file]


def test_a_cached_pickle_is_not_unpickled(cache: Path) -> None:
    datasets.watch()
    (file,) = cache.iterdir()
    with file.open("wb") as stream:
        np.savez(stream, windows=np.array([{}], object), labels=np.zeros(1), subjects=np.zeros(1))
    assert datasets.watch().windows.shape == (3605, 6, 128)


def test_another_version_of_the_source_is_read_afresh(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    monkeypatch.setattr(datasets, "_shipped", lambda package, file: source)

    def read(path: Path) -> dict[str, Any]:
        return {"images": np.frombuffer(path.read_bytes(), np.uint8), "labels": np.zeros(1)}

    monkeypatch.setattr(datasets, "_read_mnist5k", read)
    for content in (b"one", b"two"):
        source.write_bytes(content)
        assert datasets.mnist5k().images.tobytes() == content
    assert len(list(cache.iterdir())) == 2


def test_processes_that_race_for_an_empty_cache_all_get_the_data(cache: Path) -> None:
    program = (
        "import sys, zlib; from p2pml.protocols.training.datasets import watch; data = watch()\n"
        "assert not {'torch', 'seglearn', 'sklearn'} & set(sys.modules)\n"
        "print(*(zlib.crc32(array.tobytes()) for array in data))"
    )
    racing = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = {process.communicate(timeout=50)[0] for process in racing}
    assert [process.returncode for process in racing] == [0] * 4
    assert len(outputs) == 1
    assert len(list(cache.iterdir())) == 1


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"needs seglearn.*p2pml\[data\]"):
        datasets.watch()


def test_a_package_without_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seglearn").mkdir()
    (tmp_path / "seglearn" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "seglearn", raising=False)
    with pytest.raises(TaskError, match=r"does not ship data/watch_dataset\.npy"):
        datasets.watch()


def test_a_source_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "mnist.csv.gz"
    source.write_bytes(b"no gzip")
    monkeypatch.setattr(datasets, "_shipped", lambda package, file: source)
    with pytest.raises(TaskError, match=r"data set mnist5k: .*mnist\.csv\.gz cannot be read"):
        datasets.mnist5k()


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.touch()  # a file where the folder should be
    with pytest.raises(TaskError, match=r"cannot write the cache .*P2PML_CACHE"):
        datasets.watch()


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [
        ("linux", "XDG_CACHE_HOME", "base/p2pml"),
        ("linux", None, "home/.cache/p2pml"),
        ("darwin", None, "home/Library/Caches/p2pml"),
        ("win32", "LOCALAPPDATA", "base/p2pml"),
        ("win32", None, "home/AppData/Local/p2pml"),
    ],
)
def test_the_platforms_cache_folder(
    platform: str, variable: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("P2PML_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "base"))
    monkeypatch.setattr(datasets.sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert datasets.cache_folder() == tmp_path / expected
