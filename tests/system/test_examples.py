"""Every example does what it says, run as a user would."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.one_loop


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=EXAMPLES, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )


async def finish(process: asyncio.subprocess.Process) -> str:
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_two_programs_exchange_tensors() -> None:
    server = await start("tensors.py", "serve", address := free_address())
    try:
        assert server.stdout is not None
        assert "listening" in (await server.stdout.readline()).decode()
        assert "server doubled 'numbers'" in await finish(await start("tensors.py", "double", address))
    finally:
        server.kill()
        await server.communicate()


async def test_gossip_ends_with_the_mean_everywhere() -> None:
    output = await finish(await start("gossip.py", "3"))
    held = [float(value) for value in re.findall(r"[\d.]+", output.split("have")[1])]
    assert len(held) == 3
    assert held == pytest.approx([1.0] * 3, abs=0.05)
    assert sum(held) == pytest.approx(3.0, abs=0.01)


def test_the_gossip_protocol_is_as_short_as_the_readme_says() -> None:
    lines = [line for line in (EXAMPLES / "gossip.py").read_text().splitlines() if line.strip()]
    assert len(lines) < 60


@pytest.mark.timeout(120)
async def test_a_torch_loop_with_three_more_lines_learns_what_one_peer_cannot_see() -> None:
    address = free_address()
    peers = [await start("torch_loop.py", role, address) for role in ("start", "join")]
    outputs = [await finish(peer) for peer in peers]
    accuracies = [float(output.rsplit(":", 1)[1]) for output in outputs]
    assert accuracies[0] == accuracies[1], "both have the group's model"
    assert accuracies[0] > 0.85, "one peer alone sees half of the spiral"


@pytest.mark.timeout(120)
async def test_training_a_task_of_ones_own_across_machines(tmp_path: Path) -> None:
    address = free_address()
    options = ["--task", "lan_training:waves", "--report", "lines"]
    first = await start("-m", "p2pml.cli", "start", "--peers", "2", "--listen", address, *options)
    second = await start("-m", "p2pml.cli", "join", address, *options)
    outputs = [await finish(peer) for peer in (first, second)]
    for output in outputs:
        rounds = re.findall(r"round (\d+)/8 .*?accuracy (\d\.\d+)", output)
        assert [int(number) for number, _ in rounds][-1] == 8, output
        assert float(rounds[-1][1]) > 0.9, output
