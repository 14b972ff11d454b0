"""The command line: `holdfast ls`, `show`, `verify`, `save`, `status`, `stop`, `run`, `demo`.

Invariants:
- Every command that prints results accepts `--json`: its stdout is then exactly one JSON document.
- Errors, progress and warnings are written to stderr.
- No command except `demo` imports JAX or PyTorch.
"""
