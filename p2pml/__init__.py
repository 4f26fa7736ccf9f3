"""p2pml: asyncio peer-to-peer networking for collaborative deep learning."""

from __future__ import annotations

import os as _os

# In a checkout, `transports` and `protocols` stand beside this package and not inside it. Where an installed copy is shadowed
# by the checkout (a working directory on sys.path), they are found there all the same.
_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if all(_os.path.isfile(_os.path.join(_root, _name, "__init__.py")) for _name in ("transports", "protocols")):
    __path__.append(_root)

__version__ = "0.1.0"
