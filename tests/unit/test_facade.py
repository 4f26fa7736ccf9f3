"""`import p2pml` knows its names, and loads what is behind one when it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import p2pml


def test_every_name_is_there_and_is_that_of_its_module() -> None:
    for name, home in p2pml._HOME.items():
        p2pml.__dict__.pop(name, None)
        assert getattr(p2pml, name) is getattr(importlib.import_module(home), name)
        assert name in p2pml.__dict__  # found without a detour from now on
    assert set(p2pml.__all__) == {*p2pml._HOME, "__version__"}
    assert set(p2pml.__all__) <= set(dir(p2pml))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'p2pml' has no attribute 'Nodes'"):
        p2pml.Nodes  # noqa: B018


def test_a_name_loads_no_more_than_it_needs() -> None:
    program = "import sys, p2pml; p2pml.StateMachine; print('p2pml.node' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=50, check=True)
    assert done.stdout == "False False\n"
