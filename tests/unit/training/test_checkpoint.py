from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from p2pml.protocols.training import checkpoint, files
from p2pml.protocols.training._torch import nn, torch
from p2pml.protocols.training.errors import CheckpointError
from p2pml.protocols.training.task import Task
from p2pml.protocols.training.tensors import load_state_tensors, state_tensors
from p2pml.protocols.training.trainer import Trainer

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64, torch.uint8]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(7), "empty": torch.empty(0, 4), "transposed": torch.arange(6.0).view(2, 3).T}
    meta = {"task": "watch", "round": 3, "accuracy": 0.5, "nested": {"list": [1, None, "é"]}}
    checkpoint.save(tmp_path / "run.v1", tensors, meta)
    loaded = checkpoint.load(tmp_path / "run.v1")
    assert loaded.meta == meta
    assert loaded.optimizer is None
    assert set(loaded.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(loaded.tensors[name], tensor)
    assert sorted(contents(tmp_path)) == ["run.v1.json", "run.v1.safetensors"]
    beside = json.loads((tmp_path / "run.v1.json").read_text())
    assert beside == {"format": checkpoint.FORMAT, "tensors": len(tensors), **meta}


def test_views_of_one_flat_tensor_are_saved_each(tmp_path: Path) -> None:
    flat = torch.arange(6.0)
    checkpoint.save(tmp_path / "a", {"one": flat[:2], "two": flat[2:].view(2, 2)}, {})
    assert checkpoint.load(tmp_path / "a").tensors["two"].tolist() == [[2.0, 3.0], [4.0, 5.0]]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_been(
    make_task: Callable[..., Task], optimizer: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
) -> None:
    task = make_task(optimizer=optimizer)
    first = Trainer(task, task.data(0, 1), task.make_model(0), seed=0)
    first.steps(5)
    checkpoint.save(tmp_path / "a", state_tensors(first.model), {"steps": 5}, first.optimizer)

    loaded = checkpoint.load(tmp_path / "a")
    second = Trainer(task, task.data(0, 1), task.make_model(9), seed=0)
    load_state_tensors(second.model, loaded.tensors)
    assert loaded.optimizer is not None
    second.optimizer.load_state_dict(loaded.optimizer)
    for _ in range(5):
        second.backward()  # the same batches as the first has had
    first.steps(5)
    second.steps(5)
    pairs = zip(state_tensors(first.model).values(), state_tensors(second.model).values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def full_disk(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("module", "name"), [(files.os, "fsync"), (files.os, "replace"), (checkpoint, "save_file"), (files.Path, "open")]
)
def test_a_full_disk_leaves_the_old_checkpoint(
    module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "a", {"weight": torch.zeros(3)}, {"round": 1})
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, full_disk)
        with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be written: No space left") as caught:
            checkpoint.save(tmp_path / "a", {"weight": torch.ones(3)}, {"round": 2})
    assert str(tmp_path) in str(caught.value)
    assert contents(tmp_path) == before
    assert checkpoint.load(tmp_path / "a").meta == {"round": 1}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file.a\.safetensors cannot be written"):
        checkpoint.save(tmp_path / "file" / "a", {"weight": torch.ones(1)}, {})


@pytest.mark.parametrize("meta", [{"a": object()}, {"a": float("nan")}, {"a": torch.ones(1)}])
def test_metadata_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path, meta: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be written"):
        checkpoint.save(tmp_path / "a", {"weight": torch.ones(1)}, meta)
    assert not contents(tmp_path)


def test_an_optimizer_whose_state_is_not_plain_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["history"] = [torch.ones(1)]
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        checkpoint.save(tmp_path / "a", state_tensors(model), {}, optimizer)
    assert not contents(tmp_path)


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read: No such file"):
        checkpoint.load(tmp_path / "a")


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"\xff" * 100, None])
def test_a_damaged_file(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "a.safetensors"
    checkpoint.save(file, {"weight": torch.ones(100)}, {})
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read"):
        checkpoint.load(file)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (None, "was not written by p2pml"),
        ("null", "was not written by p2pml"),
        ("{", "has a damaged description"),
        ('{"format": 1}', "has a damaged description"),
        ('{"format": 1, "meta": []}', "was not written by p2pml"),
        ('{"meta": {}}', "has a damaged description"),
        ('{"format": 2, "meta": {}}', "has format 2; this p2pml reads format 1"),
        ('{"format": 1, "meta": {}, "optimizer": 3}', "has a damaged description"),
        ('{"format": 1, "meta": {}, "optimizer": {"state": {"x": {}}}}', "has a damaged description"),
    ],
)
def test_a_file_of_others(tmp_path: Path, described: str | None, said: str) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"weight": torch.ones(1)}, file, None if described is None else {"p2pml": described})
    with pytest.raises(CheckpointError, match=said) as caught:
        checkpoint.load(file)
    assert str(file) in str(caught.value)
