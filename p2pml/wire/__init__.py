"""Bytes to messages and back, without I/O: framing, codec, compression, credits, session."""
