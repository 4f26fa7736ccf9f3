"""p2pml: asyncio peer-to-peer networking for collaborative deep learning.

Three ways to use it: exchange messages between nodes (`Node`, `message`), write a protocol (`StateMachine`, `Host`), or train
with one of the protocols in `p2pml.protocols`.
"""

from __future__ import annotations

import importlib as _importlib
import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from p2pml.errors import P2PMLError as P2PMLError
    from p2pml.host import Host as Host
    from p2pml.loops import LoopThread as LoopThread
    from p2pml.loops import run as run
    from p2pml.node import Node as Node
    from p2pml.peer import Inbox as Inbox
    from p2pml.peer import Peer as Peer
    from p2pml.statemachine import StateMachine as StateMachine
    from p2pml.statemachine import on as on
    from p2pml.wire.codec import Tensor as Tensor
    from p2pml.wire.codec import TensorLike as TensorLike
    from p2pml.wire.codec import Tensors as Tensors
    from p2pml.wire.codec import message as message
    from p2pml.wire.options import ChannelOptions as ChannelOptions

# In a checkout, `transports` and `protocols` stand beside this package and not inside it. Where an installed copy is shadowed
# by the checkout (a working directory on sys.path), they are found there all the same.
_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if all(_os.path.isfile(_os.path.join(_root, _name, "__init__.py")) for _name in ("transports", "protocols")):
    __path__.append(_root)

__version__ = "0.1.0"

_HOME = {
    "ChannelOptions": "p2pml.wire.options",
    "Host": "p2pml.host",
    "Inbox": "p2pml.peer",
    "LoopThread": "p2pml.loops",
    "Node": "p2pml.node",
    "P2PMLError": "p2pml.errors",
    "Peer": "p2pml.peer",
    "StateMachine": "p2pml.statemachine",
    "Tensor": "p2pml.wire.codec",
    "TensorLike": "p2pml.wire.codec",
    "Tensors": "p2pml.wire.codec",
    "message": "p2pml.wire.codec",
    "on": "p2pml.statemachine",
    "run": "p2pml.loops",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> _Any:
    if name not in _HOME:
        raise AttributeError(f"module 'p2pml' has no attribute '{name}'")
    value = getattr(_importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
