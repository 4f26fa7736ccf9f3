"""What tests may rely on of `tests.driver`: its messages, credit and memory are those of a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from p2pml import statemachine as sm
from p2pml.errors import MachineFailed
from p2pml.statemachine import Received, Send
from p2pml.wire.options import ChannelOptions
from tests.driver import Cluster, MemoryReused, Stuck
from tests.unit.sketches.puppet import SEEDS, Note, Puppet, notes, pair

# --------------------------------------------------------------------------------------------- messages and credit


def test_a_channel_keeps_its_order_and_channels_overtake_each_other() -> None:
    first = set()
    for seed in range(20):
        cluster, _, b = pair(seed)
        cluster.command("a", "do", notes(4, "one") + notes(9, "two"))
        cluster.run()
        assert b.numbers("one") == [0, 1, 2, 3]
        assert b.numbers("two") == list(range(9))
        first.add(next(event.channel for event in b.events if isinstance(event, Received)))
    assert first == {"one", "two"}


@given(seed=SEEDS)
def test_every_tagged_send_is_sent_and_delivered_once_and_in_order(seed: int) -> None:
    cluster, a, _ = pair(seed)
    cluster.command("a", "do", notes(4, "one"))
    cluster.run()
    tags = [("one", number) for number in range(4)]
    assert [event.tag for event in a.all(sm.Sent)] == tags
    assert [event.tag for event in a.all(sm.Delivered)] == tags
    assert not a.all(sm.SendFailed)


def test_a_machine_that_overruns_its_queue_fails() -> None:
    cluster, _, b = pair(0, tolerant=True)
    cluster.command("a", "do", notes(5, "one"))
    cluster.run()
    with pytest.raises(MachineFailed, match="more than 4 messages wait for b on 'one'"):
        cluster.result("a")
    assert cluster.alive == ["b"]
    assert "its machine failed" in b.all(sm.PeerLeft)[0].reason


def test_a_manual_channel_moves_by_grants_only() -> None:
    cluster, a, b = pair(1)
    cluster.command("a", "do", notes(3, "manual"))
    cluster.run()
    assert b.numbers("manual") == []
    for expected in ([0], [0, 1, 2]):
        cluster.command("b", "do", sm.Grant("a", "manual", len(expected)))
        cluster.run()
        assert b.numbers("manual") == expected
    cluster.command("b", "do", [sm.Grant("a", "manual"), sm.Grant("nobody", "manual")])
    cluster.run()
    assert len(a.all(sm.CreditGranted)) == 2  # the last grant came where there was credit left
    cluster.command("a", "do", notes(3, "manual"))
    with pytest.raises(Stuck, match="a -> b on 'manual': 1 wait, credit 0"):
        cluster.run(until=lambda: len(b.numbers("manual")) == 6)


def test_a_grant_on_a_channel_that_is_not_manual_is_an_error() -> None:
    cluster, _, _ = pair(1)
    cluster.command("a", "do", sm.Grant("b", "one"))
    with pytest.raises(MachineFailed, match="channel 'one' of puppet is not manual"):
        cluster.run()


def test_what_may_be_dropped_is_dropped_without_credit_and_only_then() -> None:
    cluster, a, b = pair(2)
    cluster.command("a", "do", notes(1, "manual", or_drop=True))
    cluster.run()
    assert a.all(sm.SendFailed) == [sm.SendFailed("b", ("manual", 0), "no credit")]
    cluster.command("b", "do", sm.Grant("a", "manual"))
    cluster.run()
    assert a.all(sm.CreditGranted) == [sm.CreditGranted("b", "manual")]
    cluster.command("a", "do", notes(3, "manual", or_drop=True))
    cluster.run()
    assert b.numbers("manual") == [0]
    assert len(a.all(sm.SendFailed)) == 3


def test_a_newer_message_takes_the_place_of_the_waiting_one_with_its_key() -> None:
    cluster, a, b = pair(3)
    other = Send("b", Note(100), "manual", supersedes="other")
    cluster.command("a", "do", [other, *notes(3, "manual", supersedes="key"), Send("b", Note(9), "manual")])
    cluster.command("b", "do", sm.Grant("a", "manual", 9))
    cluster.run()
    assert b.numbers("manual") == [100, 2, 9]
    assert [(event.tag[1], event.reason) for event in a.all(sm.SendFailed)] == [
        (0, "superseded by a newer message"),
        (1, "superseded by a newer message"),
    ]


def test_who_is_not_here_gets_nothing_and_an_unknown_channel_is_an_error() -> None:
    cluster, a, _ = pair(4, links=[])
    cluster.command("a", "do", [Send("b", Note(1), "one", tag=1), Send("b", Note(1), "one")])
    cluster.run()
    assert a.all(sm.SendFailed) == [sm.SendFailed("b", 1, "the peer is not here")]
    cluster, a, b = pair(4, links=[])
    cluster.command("a", "do", Send("b", Note(1), "one", tag=1))
    cluster.link("a", "b")  # but a is not told of it before it sends
    cluster.run()
    assert sm.SendFailed("b", 1, "the peer is not here") in a.events
    assert not b.all(Received)
    for effect in (Send("b", Note(1), "three"), sm.Grant("b", "three")):
        cluster = Cluster({"a": Puppet()}, 4)
        cluster.command("a", "do", effect)
        with pytest.raises(MachineFailed, match="puppet has no channel 'three'"):
            cluster.run()


# ---------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("memory", ["early", "late", "checked"])
def test_a_tensor_that_changes_before_it_was_sent_is_found(memory: Any) -> None:
    cluster, _, b = pair(5, memory=memory)
    tensor = np.arange(4.0)
    cluster.command("a", "do", Send("b", Note(1, tensor), "manual"))
    cluster.command("b", "do", sm.Grant("a", "manual"))
    cluster.run(until=lambda: not cluster._peers["a"].pending)
    tensor[:] = 7
    if memory == "checked":
        with pytest.raises(MemoryReused, match="a tensor of Note"):
            cluster.run()
        return
    cluster.run()
    expected = 7.0 if memory == "late" else 3.0
    assert b.all(Received)[0].message.tensor.numpy()[3] == expected


def test_what_arrives_is_in_the_memory_of_the_receiver_or_in_its_place() -> None:
    placed = []
    for seed in range(20):
        cluster, _, b = pair(seed)
        tensor = np.arange(8, dtype=np.uint8)
        cluster.command("a", "do", Send("b", Note(1, tensor), "one"))
        cluster.run()
        arrived = b.all(Received)[0].message.tensor
        assert arrived.data == tensor.data
        arrived.data[0] = 99
        assert tensor[0] == 0
        placed.append(b.buffer[0] == 99)
    assert {True, False} == set(placed)


def test_large_messages_are_always_placed_and_a_place_may_refuse() -> None:
    Large = type("Large", (Puppet,), {"name": "puppet", "channels": {"one": ChannelOptions(eager=0)}})
    for seed in range(10):
        a, b = Puppet(), Large()
        cluster = Cluster({"a": a, "b": b}, seed)
        cluster.run()
        tensor = np.arange(8, dtype=np.uint8)
        cluster.command("a", "do", [Send("b", Note(number, tensor), "one", tag=number) for number in (1, -1, 2)])
        cluster.run()
        assert bytes(b.buffer) == tensor.tobytes()
        assert b.numbers("one") == [1, 2]
        assert a.all(sm.SendFailed) == [sm.SendFailed("b", -1, "refused: no negative notes")]


def test_without_the_wire_messages_are_the_same_objects() -> None:
    cluster, _, b = pair(6, wire=False)
    sent = Note(1)
    cluster.command("a", "do", Send("b", sent, "one"))
    cluster.run()
    assert b.all(Received)[0].message is sent


# ----------------------------------------------------------------------------------------------------- determinism

ROOT = Path(__file__).parents[3]
_STORY = """
from tests.unit.sketches.puppet import *
cluster, a, b = pair(20)
cluster.command("a", "do", notes(4, "one") + notes(9, "two"))
cluster.run()
print(cluster.story())
"""


def test_a_seed_is_one_order_whatever_the_hash_seed() -> None:
    stories = [
        subprocess.run(
            [sys.executable, "-c", _STORY],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert stories[0] == stories[1]
    assert "Received" in stories[0]
