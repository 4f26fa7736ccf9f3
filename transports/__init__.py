"""The transports: how bytes travel. Each is one file that passes tests/conformance."""

if __name__ != "p2pml.transports":
    raise ImportError("import this package as p2pml.transports, not as transports: a second copy would have classes of its own")
