"""The hosts of a run agree: state machines without I/O, see docs/protocol.md."""
