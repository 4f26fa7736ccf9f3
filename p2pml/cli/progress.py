"""What is known of a running training, put together from what its peers report; nothing is drawn or printed here.

An event is a map with `event` (its name), `peer` (who reports it), `time` (seconds since the epoch) and fields of its own:

==========  ==========================================================================================
`open`      a group is open: addresses (where to join), task, parts
`waiting`   joining has not worked yet: address, reason
`ready`     the peer has its data and model: task, part, parts, samples, rounds
`sample`    figures of `p2pml.telemetry.Telemetry.sample`; they stand in `round` too
`round`     a round is over for this peer: round, loss, accuracy, seconds
`done`      the peer has finished: its summary
`failed`    the peer stops with an error: error, trace
`stopped`   the peer was told to stop, and left in order
`exited`    the process of a peer ended otherwise than it should: status, tail
==========  ==========================================================================================

and what the protocol's machines report of the group, in which the `peer` that is spoken of is called `member`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

Event = Mapping[str, Any]
LAST_ROUNDS = 5
"""Rounds whose duration says how long the rest will take."""
RATE_SECONDS = 0.5
"""A rate is taken over at least this long."""
OVER = ("done", "failed", "stopped")
"""The states of a peer from which nothing more comes."""


@dataclass(slots=True)
class PeerProgress:
    """One peer. Rates are in bytes per second, memory in bytes."""

    name: str
    state: str = "starting"
    part: str = ""
    round: int = 0
    loss: float | None = None
    accuracy: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    send_rate: float = 0.0
    receive_rate: float = 0.0
    peak_rss_bytes: int = 0
    loop_lag_p99_seconds: float = 0.0
    reason: str = ""
    sampled: tuple[float, int, int] | None = None
    """Time, bytes sent and received, since when the next rates are counted."""

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    def sample(self, event: Event) -> None:
        """Take in figures of `Telemetry.sample`."""
        now, sent, received = event["time"], event["bytes_sent"], event["bytes_received"]
        self.bytes_sent, self.bytes_received = sent, received
        self.peak_rss_bytes = event["peak_rss_bytes"]
        self.loop_lag_p99_seconds = event["loop_lag_p99_seconds"]
        if self.sampled is None:
            self.sampled = (now, sent, received)
        elif (elapsed := now - self.sampled[0]) >= RATE_SECONDS:
            self.send_rate, self.receive_rate = (
                (sent - self.sampled[1]) / elapsed,
                (received - self.sampled[2]) / elapsed,
            )
            self.sampled = (now, sent, received)


@dataclass(slots=True)
class RoundProgress:
    """One round: what each peer reported of it, and who sends to whom, in the order in which that became known."""

    number: int
    losses: dict[str, float] = field(default_factory=dict)
    accuracies: dict[str, float] = field(default_factory=dict)
    pairs: dict[tuple[str, str], None] = field(default_factory=dict)
    ended_at: float = 0.0
    seconds: float | None = None
    bytes_sent: int = 0
    bytes_per_second: float = 0.0

    @property
    def loss(self) -> float | None:
        """The mean of the peers' training losses."""
        return fmean(self.losses.values()) if self.losses else None

    @property
    def accuracy(self) -> float | None:
        """That of the group's model on the held-out data; it is the same for all peers."""
        return fmean(self.accuracies.values()) if self.accuracies else None


class Progress:
    """The state of a training; `feed` it every event, in any order of the peers."""

    def __init__(self, expected: int = 0, rounds: int = 0) -> None:
        self.expected = expected
        self.rounds = rounds
        self.task = ""
        self.addresses: list[str] = []
        self.peers: dict[str, PeerProgress] = {}
        self.members: dict[str, None] = {}
        self.closed: list[RoundProgress] = []
        """The rounds that all peers have reported, in order."""
        self._open: dict[int, RoundProgress] = {}
        self.began_at: float | None = None

    @property
    def round(self) -> int:
        """The last round of which anything is known."""
        return max([0, *self._open, *(done.number for done in self.closed[-1:])])

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Who sends to whom in the latest round of which that is known."""
        known = [found for found in [*self.closed[-1:], *self._open.values()] if found.pairs]
        return list(max(known, key=lambda found: found.number).pairs) if known else []

    @property
    def bytes_sent(self) -> int:
        return sum(peer.bytes_sent for peer in self.peers.values())

    @property
    def bytes_per_second(self) -> float:
        return sum(peer.send_rate for peer in self.peers.values() if not peer.is_over)

    def seconds_left(self, now: float) -> float | None:
        """How long the remaining rounds will take if they are like the last ones; None as long as nobody can tell."""
        if not self.closed or not self.rounds:
            return None
        last = [done.seconds for done in self.closed[-LAST_ROUNDS:] if done.seconds is not None]
        left = self.rounds - self.closed[-1].number
        if not last or left <= 0:
            return 0.0 if left <= 0 else None
        return max(0.0, fmean(last) * left - (now - self.closed[-1].ended_at))

    def feed(self, event: Event) -> None:
        """Take in one event. Unknown ones are no fault: a protocol may report what this doesn't show."""
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event, self._peer(event["peer"]))
        self._close_rounds(event["time"])

    def _peer(self, name: str) -> PeerProgress:
        return self.peers.setdefault(name, PeerProgress(name))

    def _round(self, number: int) -> RoundProgress:
        return self._open.setdefault(number, RoundProgress(number))

    # ----------------------------------------------------------------------------------------------- of the command line

    def _on_open(self, event: Event, peer: PeerProgress) -> None:
        self.addresses = list(event["addresses"])
        self.task, self.expected = event["task"], event["parts"]
        peer.state = "waiting"
        self.members[peer.name] = None

    def _on_waiting(self, event: Event, peer: PeerProgress) -> None:
        peer.state, peer.reason = "joining", event["reason"]

    def _on_ready(self, event: Event, peer: PeerProgress) -> None:
        peer.state, peer.reason = "ready", ""
        peer.part = f"{event['part'] + 1}/{event['parts']}"
        self.task, self.rounds = event["task"], event["rounds"]
        self.expected = self.expected or event["parts"]
        self.began_at = event["time"]

    def _on_sample(self, event: Event, peer: PeerProgress) -> None:
        peer.sample(event)

    def _on_done(self, event: Event, peer: PeerProgress) -> None:
        peer.state = "done"
        if "bytes_sent" in event:
            peer.sample(event)

    def _on_failed(self, event: Event, peer: PeerProgress) -> None:
        peer.state, peer.reason = "failed", event["error"]

    def _on_stopped(self, event: Event, peer: PeerProgress) -> None:
        peer.state = "stopped"

    def _on_exited(self, event: Event, peer: PeerProgress) -> None:
        peer.state = "failed"
        peer.reason = peer.reason or f"its process ended with status {event['status']}"

    # --------------------------------------------------------------------------------------------------- of the machines

    def _on_round(self, event: Event, peer: PeerProgress) -> None:
        number = event["round"]
        peer.state, peer.round = "training", number
        peer.loss, peer.accuracy = event.get("loss"), event.get("accuracy")
        if "bytes_sent" in event:
            peer.sample(event)
        if number <= (self.closed[-1].number if self.closed else 0):
            return
        found = self._round(number)
        found.ended_at = event["time"]
        if peer.loss is not None:
            found.losses[peer.name] = peer.loss
        if peer.accuracy is not None:
            found.accuracies[peer.name] = peer.accuracy

    def _on_joined(self, event: Event, peer: PeerProgress) -> None:
        self.members[event["member"]] = None

    def _on_left(self, event: Event, peer: PeerProgress) -> None:
        self.members.pop(event["member"], None)

    def _on_pair(self, event: Event, peer: PeerProgress) -> None:
        number = event["round"]
        if number > (self.closed[-1].number if self.closed else 0):
            self._round(number).pairs[event["sender"], event["receiver"]] = None

    def _close_rounds(self, now: float) -> None:
        """A round is closed when every peer that can has reported it, or somebody a later one."""
        alive = {peer.name for peer in self.peers.values() if not peer.is_over and peer.state != "starting"}
        for number in sorted(self._open):
            found = self._open[number]
            overtaken = any(later > number and self._open[later].ended_at for later in self._open)
            everybody = alive <= {peer.name for peer in self.peers.values() if peer.round >= number}
            if not (found.ended_at and (everybody or overtaken)):
                continue
            before = self.closed[-1] if self.closed else None
            began = before.ended_at if before else self.began_at
            found.seconds = found.ended_at - began if began is not None else None
            sent = self.bytes_sent
            found.bytes_sent = sent - sum(done.bytes_sent for done in self.closed)
            found.bytes_per_second = found.bytes_sent / found.seconds if found.seconds else 0.0
            self.closed.append(self._open.pop(number))
