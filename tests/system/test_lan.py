"""`p2pml start` and `p2pml join` as their users run them: separate processes, over loopback or from another network namespace."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.commands import Command, Commands, p2pml

__all__ = ["p2pml"]  # a fixture

pytestmark = pytest.mark.timeout(120)


def start(p2pml: Commands, *more: str, peers: int = 2, slow: bool = False, prefix: tuple[str, ...] = ()) -> Command:
    listen = () if "--listen" in more else ("--listen", "tcp://127.0.0.1:0")
    arguments = ("--task", p2pml.task, "--peers", str(peers), "--name", "alice", "--report", "json")
    seconds = {"TEST_BATCH_SECONDS": "0.1"} if slow else {}
    return p2pml("start", *arguments, *listen, *more, prefix=prefix, **seconds)


def join(
    p2pml: Commands, addresses: list[str], name: str, *more: str, slow: bool = False, prefix: tuple[str, ...] = ()
) -> Command:
    arguments = ("--task", p2pml.task, "--name", name, "--report", "json")
    seconds = {"TEST_BATCH_SECONDS": "0.1"} if slow else {}
    return p2pml("join", *addresses, *arguments, *more, prefix=prefix, **seconds)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_joiners_wait_for_the_group_and_all_get_the_same_model(p2pml: Commands) -> None:
    address, nobody = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    bob = join(p2pml, [nobody, address], "bob", "--part", "3/3")
    reasons = {bob.event("waiting", address=one)["reason"] for one in (nobody, address)}
    assert all("Connection refused" in reason for reason in reasons)
    alice = start(p2pml, "--listen", address, peers=3)
    assert alice.event("open")["addresses"] == [address]
    carol = join(p2pml, [address], "carol", "--json", "carol.json")
    ends = {}
    for command in (alice, bob, carol):
        assert command.finish() == 0, command.errors
        ready, done = command.all("ready")[0], command.all("done")[0]
        ends[ready["peer"]] = (ready["part"], done["rounds"], done["accuracy"], done["held_out_loss"])
    assert {name: part for name, (part, *_) in ends.items()} == {"alice": 0, "bob": 2, "carol": 1}
    assert len({end[1:] for end in ends.values()}) == 1
    assert ends["bob"][1] == 3
    assert json.loads((p2pml.folder / "carol.json").read_text())["accuracy"] == ends["carol"][2]


def test_ctrl_c_on_a_joiner_lets_the_others_finish(p2pml: Commands) -> None:
    alice = start(p2pml, "--rounds", "8", peers=3, slow=True)
    addresses = alice.event("open")["addresses"]
    bob, carol = (join(p2pml, addresses, name, slow=True) for name in ("bob", "carol"))
    bob.event("round", round=2)
    bob.process.send_signal(signal.SIGINT)
    assert bob.finish() == 130
    assert len(bob.all("stopped")) == 1
    assert alice.finish() == 0, alice.errors
    assert carol.finish() == 0, carol.errors
    assert [one["member"] for one in alice.all("left")][:1] == ["bob"]
    assert alice.all("done")[0]["rounds"] == carol.all("done")[0]["rounds"] == 8


@pytest.mark.slow
def test_ctrl_c_on_the_opener_ends_the_group_with_a_reason(p2pml: Commands) -> None:
    alice = start(p2pml, "--rounds", "50", slow=True)
    bob = join(p2pml, alice.event("open")["addresses"], "bob", slow=True)
    bob.event("round", round=2)
    alice.process.send_signal(signal.SIGINT)
    assert alice.finish() == 130
    assert bob.finish() == 1
    assert "alice" in bob.errors
    assert bob.errors.count("\n") == 1


@pytest.mark.slow
def test_a_checkpoint_is_resumed(p2pml: Commands) -> None:
    first = start(p2pml, "--rounds", "2", "--checkpoint", "model", peers=1)
    assert first.finish() == 0, first.errors
    assert json.loads((p2pml.folder / "model.json").read_text())["round"] == 2
    again = start(p2pml, "--rounds", "5", "--checkpoint", "model", "--resume", peers=1)
    assert again.finish() == 0, again.errors
    assert [one["round"] for one in again.all("round")] == [3, 4, 5]
    assert again.all("round")[0]["loss"] < first.all("round")[0]["loss"]
    assert json.loads((p2pml.folder / "model.json").read_text())["round"] == 5
    more = start(p2pml, "--rounds", "5", "--checkpoint", "model", "--resume", peers=1)
    assert more.finish() == 2
    assert "there is nothing to do" in more.errors
    absent = start(p2pml, "--checkpoint", "nothing", "--resume", peers=1)
    assert absent.finish() == 1
    assert "nothing.safetensors" in absent.errors


@pytest.mark.slow
def test_a_group_is_not_joined_under_wrong_pretences(p2pml: Commands) -> None:
    alice = start(p2pml)
    addresses = alice.event("open")["addresses"]
    other = p2pml("join", *addresses, "--task", "watch", "--name", "other", "--report", "json")
    assert other.finish() == 2
    assert f"the group trains '{p2pml.task}', not 'watch'" in other.errors
    code = p2pml("join", *addresses, "--name", "code", "--report", "json")
    assert code.finish() == 1
    assert f"join with --task {p2pml.task}" in code.errors
    namesake = join(p2pml, addresses, "alice", "--wait", "2")
    assert namesake.finish() == 1
    assert "peer id 'alice' is in use" in namesake.errors
    bob = join(p2pml, addresses, "bob")
    assert bob.finish() == 0, bob.errors
    assert alice.finish() == 0, alice.errors


@pytest.mark.slow
def test_a_port_in_use_and_a_group_that_never_comes(p2pml: Commands) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        alice = start(p2pml, "--listen", address)
        assert alice.finish() == 1
        assert f"{address}: the port is taken" in alice.errors
    bob = join(p2pml, [address], "bob", "--wait", "1")
    assert bob.finish() == 1
    assert "could not be joined within 1 s" in bob.errors
    assert "Connection refused" in bob.errors


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a cable; their addresses are 10.77.0.1 and 10.77.0.2."""
    if os.name != "posix" or shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need root and the command `ip`")
    names = tuple(f"p2pml-{os.getpid()}-{side}" for side in "ab")
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", "p2pml0", "netns", names[0], "type", "veth", "peer", "name", "p2pml0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "p2pml0")
            for device in ("p2pml0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
def test_from_one_machine_to_another(p2pml: Commands, two_machines: tuple[str, str], tmp_path: Path) -> None:
    here, there = (("ip", "netns", "exec", name) for name in two_machines)
    refused = start(p2pml, "--listen", "tcp://0.0.0.0:7700", prefix=here)
    assert refused.finish() == 2
    assert "refused without --insecure" in refused.errors
    alice = start(p2pml, "--listen", "tcp://:7700", "--insecure", peers=3, prefix=here)
    addresses = alice.event("open")["addresses"]
    assert "tcp://10.77.0.1:7700" in addresses
    others = [join(p2pml, ["tcp://10.77.0.1:7700"], name, "--insecure", prefix=there) for name in ("bob", "carol")]
    for command in (alice, *others):
        assert command.finish() == 0, command.errors
    assert len({command.all("done")[0]["accuracy"] for command in (alice, *others)}) == 1
