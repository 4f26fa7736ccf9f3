"""Print how long the core takes to import: processor seconds, the best of some new interpreters.

    python tools/import_time.py
"""

from __future__ import annotations

import subprocess
import sys

CORE = "import p2pml.host, p2pml.node, p2pml.statemachine, p2pml.transports.tcp"
RUNS = 10


def measure(statement: str) -> float:
    """Processor seconds that a statement takes in a new interpreter."""
    code = f"import time; start = time.process_time(); {statement}; print(time.process_time() - start)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    core, loop = (min(measure(statement) for _ in range(RUNS)) for statement in (CORE, "import asyncio"))
    print(f"the core: {core * 1e3:.0f} ms, of which asyncio: {loop * 1e3:.0f} ms")
