"""Models, and if wished their optimizers, in files.

``name.safetensors`` holds everything, the metadata too, and is replaced as a whole: a crash or a full disk leaves the
old one. ``name.json`` beside it repeats the metadata for people and programs; it is never read here. Nothing is
pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pml.errors import MissingExtra
from p2pml.protocols.training._torch import torch
from p2pml.protocols.training.errors import CheckpointError
from p2pml.protocols.training.files import replacing

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ModuleNotFoundError as missing:
    raise MissingExtra.of("safetensors", "torch", "reading and writing checkpoints") from missing

FORMAT = 1
_MODEL, _OPTIMIZER = "model.", "optimizer."  # prefixes of the tensors' names in the file


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What a file held: the model's tensors by name, the metadata, the optimizer's state for its `load_state_dict`."""

    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]
    optimizer: dict[str, Any] | None = None


def save(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    meta: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Write `tensors`, JSON-able `meta` and the state of `optimizer` to `path` (``.safetensors`` is added if need be).

    Raises `CheckpointError`, naming the path, and then leaves what was there.
    """
    path = _named(path)
    stored = {_MODEL + name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    header: dict[str, Any] = {"format": FORMAT, "meta": dict(meta)}
    try:
        if optimizer is not None:
            header["optimizer"] = _pack(optimizer.state_dict(), stored)
        described = json.dumps(header, allow_nan=False)
        shown = json.dumps({"format": FORMAT, **meta, "tensors": len(tensors)}, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be written: {error}") from error
    try:
        with replacing(path) as draft:
            save_file(stored, draft, {"p2pml": described})
        with replacing(path.with_suffix(".json")) as draft:
            draft.write_text(shown, encoding="utf-8")
    except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: tensors that share memory
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise CheckpointError(f"checkpoint {path} cannot be written: {reason}") from error


def load(path: str | Path) -> Checkpoint:
    """Read what `save` wrote. Raises `CheckpointError`, naming the path, if it is absent, damaged or not p2pml's."""
    path = _named(path)
    try:
        with safe_open(path, "pt") as file:
            described = (file.metadata() or {}).get("p2pml")
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise CheckpointError(f"checkpoint {path} cannot be read: {reason}") from error
    try:
        header = json.loads(described or "null")
        if not isinstance(header, dict) or not isinstance(header["meta"], dict):
            raise CheckpointError(f"checkpoint {path} was not written by p2pml: it has no description")
        if header["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {header['format']}; this p2pml reads format {FORMAT}")
        optimizer = _unpack(header["optimizer"], stored) if "optimizer" in header else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path} has a damaged description: {error!r}") from error
    tensors = {name.removeprefix(_MODEL): tensor for name, tensor in stored.items() if name.startswith(_MODEL)}
    return Checkpoint(tensors, header["meta"], optimizer)


def _named(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".safetensors" else path.with_name(path.name + ".safetensors")


def _pack(state: dict[str, Any], stored: dict[str, torch.Tensor]) -> dict[str, Any]:
    """An optimizer's state as JSON; its tensors go to `stored`, under the number of the parameter and their key."""
    plain: dict[str, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        plain[str(number)] = {}
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                stored[f"{_OPTIMIZER}{number}.{key}"] = value.detach().contiguous()
            else:
                plain[str(number)][key] = value
    return {"state": plain, "param_groups": state["param_groups"]}


def _unpack(packed: dict[str, Any], stored: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    state = {int(number): dict(entries) for number, entries in packed["state"].items()}
    for name, tensor in stored.items():
        if name.startswith(_OPTIMIZER):
            number, _, key = name.removeprefix(_OPTIMIZER).partition(".")
            state[int(number)][key] = tensor
    return {"state": state, "param_groups": packed["param_groups"]}
