"""Imports modules, and forks a program for each line on stdin: `IMPORTS PROGRAM ARGUMENT…`.

It is the least that a restart from a fork costs. IMPORTS is a file that `holdfast run --standby`
has kept of PROGRAM, a module.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Serves until stdin ends."""
    imports, program = sys.argv[1:3]
    os.environ["TORCH_WARM_POOL"] = "0"  # which would have threads, as in a standby process
    for name in json.loads(Path(imports).read_text())["modules"]:
        # Some cannot be imported by themselves; the program finds that too.
        with contextlib.suppress(ImportError, AttributeError, RuntimeError, ValueError):
            importlib.import_module(name)
    gc.freeze()
    while sys.stdin.readline():
        pid = os.fork()
        if not pid:
            sys.argv = sys.argv[2:]
            runpy.run_module(program, run_name="__main__", alter_sys=True)
            return
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
