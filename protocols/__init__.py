"""The training protocols, as state machines on the core."""

if __name__ != "p2pml.protocols":
    raise ImportError("import this package as p2pml.protocols, not as protocols: a second copy would have classes of its own")
