from __future__ import annotations

import subprocess
import sys

import pytest


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, timeout=50)
    return done.stdout


def test_the_package_alone_does_not_import_torch() -> None:
    run("import sys, p2pml.protocols.training; assert 'torch' not in sys.modules and 'numpy' not in sys.modules")


@pytest.mark.parametrize("module", ["task", "trainer", "tensors", "checkpoint", "data", "models", "shipped", "loading"])
def test_without_torch_each_module_says_how_to_install_it(module: str) -> None:
    said = run(
        "import sys; sys.modules['torch'] = None\n"
        "from p2pml.errors import MissingExtra\n"
        f"try: import p2pml.protocols.training.{module}\n"
        "except MissingExtra as error: print(error)"
    )
    assert "needs torch" in said
    assert "pip install 'p2pml[torch]'" in said


def test_without_safetensors_checkpoints_say_how_to_install_it() -> None:
    said = run(
        "import sys; sys.modules['safetensors'] = None\n"
        "from p2pml.errors import MissingExtra\n"
        "try: import p2pml.protocols.training.checkpoint\n"
        "except MissingExtra as error: print(error)"
    )
    assert "checkpoints needs safetensors" in said
