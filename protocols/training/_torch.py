"""torch, or the error that says how to install it. Every module here that computes imports it from this one."""

from __future__ import annotations

from p2pml.errors import MissingExtra

try:
    import torch
    from torch import nn
except ModuleNotFoundError as error:
    if error.name != "torch":  # an installed torch that lacks a part of its own is another problem
        raise
    raise MissingExtra.of("torch", "torch", "training") from error

__all__ = ["nn", "torch"]
