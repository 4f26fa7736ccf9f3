"""What ChainSGD peers say to each other.

A round is numbered from 1; 0 is the initial model on its way to those who join. An attempt is one try at a round:
whatever goes wrong, the agent aborts it and starts another with a higher number, and what belongs to an earlier one is
dropped.
"""

from __future__ import annotations

from p2pml.wire.codec import TensorLike, message

# ----------------------------------------------------------------------------------------- device to mobile agent


@message("chainsgd/join")
class Join:
    """A peer wants to be a member. `signature`: CBOR of its model's names, dtypes, shapes, as bytes since it may be
    long.
    """

    signature: TensorLike
    resources: float


@message("chainsgd/meshed")
class Meshed:
    """The sender has links to all peers that its `Welcome` named."""


@message("chainsgd/ready")
class Ready:
    """The sender has a contribution of weight θ for this attempt."""

    round: int
    attempt: int
    weight: float


@message("chainsgd/merged")
class Merged:
    """All that `sender` had to send in this attempt is merged into the contribution of who says so."""

    round: int
    attempt: int
    sender: str


@message("chainsgd/done")
class Done:
    """The sender is through with the attempt, and has the whole result, of weight Σθ, if there is one.

    `applied`: so that it can contribute to the next round. `holds`: it has a model that it can give to those who join.
    """

    round: int
    attempt: int
    weight: float
    applied: bool
    holds: bool


@message("chainsgd/aborted")
class Aborted:
    """The sender has dropped the attempt. `complete`: but it had the whole result by then."""

    round: int
    attempt: int
    complete: bool


@message("chainsgd/refused")
class Refused:
    """A contribution cannot be used: that of `peer`, who is found out by the sender or is the sender itself."""

    round: int
    attempt: int
    peer: str
    reason: str


@message("chainsgd/accused")
class Accused:
    """`peer` sent the sender what no member may send."""

    peer: str
    reason: str


@message("chainsgd/unlinked")
class Unlinked:
    """The sender lost its link to `peer`, or cannot make it."""

    peer: str
    reason: str


@message("chainsgd/linked")
class Linked:
    """The sender has the link to `peer` again."""

    peer: str


@message("chainsgd/leave")
class Leave:
    """The sender wants to go, after the running round if it takes part in it."""


# ----------------------------------------------------------------------------------------- mobile agent to device


@message("chainsgd/rejected")
class Rejected:
    """The receiver cannot be a member."""

    reason: str


@message("chainsgd/welcome")
class Welcome:
    """The receiver can be one, as soon as it has links to `peers` (with the addresses that they listen at)."""

    peers: dict[str, list[str]]
    segment_bytes: int


@message("chainsgd/plan")
class Plan:
    """A new attempt. `contributors` reduce their models to one along `pairs` of sender and receiver.

    `excluded` are members that do not, with the reason. Each of `trees` lists peers that get the result, the first of
    which has it (see `broadcast`). Without contributors nothing is reduced, and the first of each tree has the result
    already. Pairs and trees that are not known yet follow as `Pair` and `Root`. `joining`: between rounds, the group's
    model is given to those who join.
    """

    round: int
    attempt: int
    members: list[str]
    contributors: list[str]
    excluded: dict[str, str]
    pairs: list[list[str]]
    trees: list[list[str]]
    joining: bool = False


@message("chainsgd/pair")
class Pair:
    """`sender` sends what it has merged to `receiver`, and gets no more to merge."""

    round: int
    attempt: int
    sender: str
    receiver: str


@message("chainsgd/root")
class Root:
    """The first of `tree` finishes the result and sends it down the tree."""

    round: int
    attempt: int
    tree: list[str]


@message("chainsgd/abort")
class Abort:
    """Drop this attempt, and say so."""

    round: int
    attempt: int
    reason: str


@message("chainsgd/void")
class Void:
    """The round is over without a result."""

    round: int
    attempt: int
    reason: str


@message("chainsgd/gone")
class Gone:
    """`peer` is a member no more."""

    peer: str
    reason: str


@message("chainsgd/stop")
class Stop:
    """The group ends, or the receiver's membership."""

    reason: str
    expelled: bool = False


# ----------------------------------------------------------------------------------------------- device to device


@message("chainsgd/segment")
class Segment:
    """MDLdroid's (W, θ), a segment of it: what the sender has merged, of weight Σθ, on its way up to the root."""

    round: int
    attempt: int
    index: int
    weight: float
    data: TensorLike


@message("chainsgd/result")
class Result:
    """A segment of the result, on its way down. `subtree`, in the first one: the receiver, and to whom it forwards."""

    round: int
    attempt: int
    index: int
    weight: float
    data: TensorLike
    subtree: list[str]
