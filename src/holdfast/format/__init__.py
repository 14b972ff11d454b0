"""The format as pure functions: names, layouts, digests and records. No I/O; see docs/format.md."""
