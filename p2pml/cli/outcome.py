"""How a command can end, beside well: its exit statuses, and the errors that only the command line has."""

from __future__ import annotations

from p2pml.errors import P2PMLError

FAILED, MISUSED, INTERRUPTED, TERMINATED = 1, 2, 130, 143
"""Exit statuses; the last two are those of a shell for Ctrl-C and SIGTERM."""


class Misuse(P2PMLError):
    """The arguments make no sense together; the message says why."""


class Terminated(P2PMLError):
    """The command was told to stop, by SIGTERM or by its parent, and did."""


class Unwritable(P2PMLError):
    """A file of results cannot be written; the message names it."""

    @classmethod
    def of(cls, path: object, error: OSError) -> Unwritable:
        """The error for `path`."""
        return cls(f"{path} cannot be written: {error.strerror or error}")
