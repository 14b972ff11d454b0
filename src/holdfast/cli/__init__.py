"""The command line. Each command has a module of its name; `main` registers them all.

Invariants:
- Every command that prints results accepts `--json`: its stdout is then exactly one JSON document.
- Errors, progress and warnings are written to stderr.
- No command except `demo` imports JAX or PyTorch.
"""
