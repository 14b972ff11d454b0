"""What people type: `holdfast ls`, `show`, `verify`, `save`, `status`, `stop`, `run`, `demo`.

Every command that prints takes `--json`: then its stdout is one JSON document and nothing else.
Errors, progress and warnings go to stderr. No command imports JAX or PyTorch, but for the demo.
"""
