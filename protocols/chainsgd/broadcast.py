"""The binomial tree by which a result reaches all peers in ⌈log2 n⌉ rounds (MDLdroid, "Resource-aware Broadcasting").

Peers are ranked, 0 the one that has the result, the others by their resources, best first. In round r each rank i < 2^r
sends to rank i + 2^r. So the better a peer's rank, the more it forwards. The ranks below a child are every 2^(r+1)-th
of the list, and are again such a tree: a peer needs to be told its own part of the list, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def subtrees(tree: Sequence[str]) -> list[list[str]]:
    """The parts of a tree below its first peer, each beginning with the one to send to, the largest first."""
    parts, step = [], 1
    while step < len(tree):
        parts.append(list(tree[step :: 2 * step]))
        step *= 2
    return parts


def ranked(root: str, peers: Sequence[str], resources: Mapping[str, float]) -> list[str]:
    """All of `peers` as a tree: the root, then the others, who has most resources first."""
    return [root, *sorted((peer for peer in peers if peer != root), key=lambda peer: (-resources.get(peer, 0.0), peer))]


def trees(sources: Sequence[str], targets: Sequence[str]) -> list[list[str]]:
    """As many trees as there are sources and targets for: each source serves its share of the targets."""
    used = sources[: len(targets)]
    return [[source, *targets[at :: len(used)]] for at, source in enumerate(used)]
