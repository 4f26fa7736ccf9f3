"""Check the types (mypy) and the import contracts (import-linter) of the whole package.

In the checkout, `transports` and `protocols` stand beside `p2pml` and only the installed package joins them. Tools that
read files would see a third of it and be content. So both run in a tree of symbolic links that has the package's real
shape, and the number of files that mypy says it checked must be the number that there are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "pyproject.toml"
TREE = ROOT / ".typecheck"
BESIDE = ("transports", "protocols")


def build_tree() -> int:
    """Make the tree of links anew; returns how many Python files the package has."""
    shutil.rmtree(TREE, ignore_errors=True)
    package = TREE / "p2pml"
    package.mkdir(parents=True)
    for entry in (ROOT / "p2pml").iterdir():
        if entry.suffix == ".py" or entry.name == "py.typed" or (entry.is_dir() and entry.name != "__pycache__"):
            (package / entry.name).symlink_to(entry)
    for name in BESIDE:
        (package / name).symlink_to(ROOT / name)
    return sum(len(list((ROOT / name).rglob("*.py"))) for name in ("p2pml", *BESIDE))


def run(tool: str, *arguments: str) -> tuple[int, str]:
    """Run a tool of this environment in the tree; returns its exit status and what it printed."""
    command = [str(Path(sys.executable).parent / tool), *arguments]
    environment = {**os.environ, "MYPYPATH": str(TREE), "NO_COLOR": "1"}
    done = subprocess.run(
        command, cwd=TREE, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.returncode, done.stdout


def check_types(files: int) -> str | None:
    """Check the package, then the programs around it; returns what is wrong."""
    options = ("--config-file", str(CONFIG), "--cache-dir", str(ROOT / ".mypy_cache"))
    status, output = run("mypy", *options, "-p", "p2pml")
    checked = re.search(r"no issues found in (\d+) source files?", output)
    if status or checked is None:
        return output
    if int(checked[1]) != files:
        return f"mypy checked {checked[1]} of the package's {files} files: is a folder without an __init__.py?"
    programs = [str(path) for name in ("examples", "tools") for path in sorted((ROOT / name).glob("*.py"))]
    status, output = run("mypy", *options, *programs)
    return output if status else None


def check_imports() -> str | None:
    """Check the import contracts of pyproject.toml; returns what is wrong."""
    status, output = run("lint-imports", "--no-logo", "--no-cache", str(CONFIG))
    return output if status else None


def main() -> int:
    """Run both checks and print what they found."""
    files = build_tree()
    faults = [fault for fault in (check_types(files), check_imports()) if fault]
    print("\n".join(faults) or f"types and imports of {files} files: fine")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
