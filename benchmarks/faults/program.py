"""A training under trial: `python -m benchmarks.faults.program LIBRARY PLACE save|restore`.

`save` saves steps 1 and 2 and waits for them; then it asks before the last save, and after it, and
goes on with the line that it reads: `go`, or `exit` for an end without a wait.
"""

from __future__ import annotations

import json
import sys

from benchmarks.faults.libraries import LAST, LIBRARIES, state_of, step_of


def main() -> None:
    """Run the program."""
    name, place, task = sys.argv[1:]
    library = LIBRARIES[name](place)
    if task == "restore":
        arrays = library.restore()
        found = None if arrays is None else step_of(arrays) or "wrong"
        print(json.dumps({"found": found}), flush=True)
        return
    for step in range(1, LAST):
        library.save(step, state_of(step))
        library.wait()
    last = state_of(LAST)
    _ask("before")
    library.save(LAST, last)
    if _ask("after") == "exit":
        sys.exit(0)
    library.finish()


def _ask(moment: str) -> str:
    print(moment, flush=True)
    return sys.stdin.readline().strip()


if __name__ == "__main__":
    main()
