"""Imports modules, and forks a program for each line on stdin: `MODULE,… PROGRAM ARGUMENT…`.

It is the least that a restart from a fork costs. PROGRAM is a module.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import sys


def main() -> None:
    """Serves until stdin ends."""
    modules, program = sys.argv[1:3]
    for name in modules.split(","):
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
