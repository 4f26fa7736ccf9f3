"""Files that are either the old ones or the new ones, never half of each."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the block a new file's path in the folder of `path`; when it ends well, that file becomes `path`.

    It reaches the disk before it gets its name, so that after a crash or on a full disk `path` is what it was. Any
    number
    of processes may do this to one path at a time: the last to end wins. Raises `OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield draft
        with draft.open("rb+") as file:  # Windows flushes only files opened for writing
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()
    if os.name == "posix":  # the name is on the disk when its folder is
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
