"""``python -m p2pml.cli``: the same as the command `p2pml`."""

import sys

from p2pml.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
