"""How a channel behaves."""

from __future__ import annotations

from dataclasses import dataclass

from p2pml.wire.framing import MAX_HEAD

COMPRESS = ("none", "lz4", "zstd", "auto")


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """How a machine receives on one of its channels.

    messages, bytes: the window: what may be under way or unread at a time, from each peer; bytes counts messages of up to
        `eager` bytes (larger ones are offered first, and reserve memory of their own before they are sent), and the heads
        of all. It must have room for one head, 16 KiB.
    manual: no credit is given by itself, only by `Grant`. The first grant may come at any time.
    priority: channels with a lower number go first; those of one number take turns by `weight`.
    compress: 'none', 'lz4', 'zstd' or 'auto' (by measured benefit), for what this side sends.
    queue: how many messages may wait to be sent, for each peer.
    """

    messages: int = 4096
    bytes: int = 1 << 20
    eager: int = 1 << 16
    manual: bool = False
    priority: int = 1
    weight: int = 1
    compress: str = "none"
    queue: int = 1024

    def __post_init__(self) -> None:
        least = {"messages": 0 if self.manual else 1, "bytes": MAX_HEAD, "eager": 0, "weight": 1, "queue": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"a channel's '{name}' must be at least {bound}, not {getattr(self, name)}")
        if self.compress not in COMPRESS:
            raise ValueError(f"a channel's 'compress' must be one of {', '.join(COMPRESS)}, not '{self.compress}'")
