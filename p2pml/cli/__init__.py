"""The `p2pml` command."""
