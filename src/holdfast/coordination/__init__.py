"""Coordination of the hosts of a run: state machines without I/O, see docs/protocol.md."""
