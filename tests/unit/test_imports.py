"""The core is light: quick to import, and content without what is heavy or optional."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEAVY = ("torch", "numpy", "aiohttp", "rich", "matplotlib", "safetensors")


def modules_in(folder: str, name: str) -> list[str]:
    """The dotted names of all modules in a folder of the repository, which is installed as `name`."""
    root = ROOT / folder
    return sorted(
        ".".join([name, *file.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
        for file in root.rglob("*.py")
    )


CORE = [name for name in modules_in("p2pml", "p2pml") if not name.startswith("p2pml.cli")]
TRANSPORTS = modules_in("transports", "p2pml.transports")


def run(code: str, *, without: tuple[str, ...] = ()) -> str:
    """What `code` prints in a new interpreter in which the packages `without` are not installed."""
    absent = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {without}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
    done = subprocess.run(
        [sys.executable, "-c", absent + code], cwd=ROOT, text=True, capture_output=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def imports(modules: list[str]) -> str:
    return "".join(f"import {module}\n" for module in modules)


@pytest.mark.parametrize("modules", [["p2pml"], CORE, TRANSPORTS], ids=["p2pml", "core", "transports"])
def test_imports_without_anything_heavy(modules: list[str]) -> None:
    run(imports(modules), without=HEAVY)


def test_absence_is_real() -> None:
    """The means of the tests here: a package said to be absent cannot be imported."""
    with pytest.raises(AssertionError, match="No module named 'numpy'"):
        run("import numpy", without=("numpy",))


def test_runs_without_uvloop() -> None:
    """Two ends of a TCP pipe on asyncio's own loop, where uvloop does not exist."""
    code = f"""
{imports(CORE + TRANSPORTS)}
import asyncio
from p2pml.address import Address
from p2pml.transport import transport_for

class End(asyncio.BufferedProtocol):
    def __init__(self):
        self.made = asyncio.get_running_loop().create_future()
        self.got, self.memory = asyncio.get_running_loop().create_future(), memoryview(bytearray(64))
    def connection_made(self, pipe):
        self.made.set_result(pipe)
    def get_buffer(self, hint):
        return self.memory
    def buffer_updated(self, count):
        self.got.set_result(bytes(self.memory[:count]))

async def main():
    accepted = []
    def accept():
        accepted.append(End())
        return accepted[-1]
    tcp = transport_for(Address.parse("tcp://127.0.0.1:0"))
    listener = await tcp.listen(Address.parse("tcp://127.0.0.1:0"), accept)
    end = await tcp.dial(listener.addresses[0], End)
    (await end.made).write(b"hello")
    while not accepted:
        await asyncio.sleep(0)
    print((await accepted[0].got).decode())
    for pipe in (await end.made, await accepted[0].made):
        pipe.close()
    await listener.close()

asyncio.run(main())
"""
    assert run(code, without=("uvloop",)) == "hello"


def test_training_without_torch_says_what_to_install() -> None:
    code = """
from p2pml.errors import MissingExtra
try:
    import p2pml.protocols.training.trainer
except MissingExtra as error:
    print(error)
"""
    message = "training needs torch, which is not installed: pip install 'p2pml[torch]'"
    assert run(code, without=("torch",)) == message
