"""The format as pure functions: names, layouts, digests, records. No I/O. See docs/format.md."""
