"""A trainer that opens a run in a bucket together with another one.

Arguments: the URL, the file at which both begin, and the file at which it ends. Prints JSON lines.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

import holdfast
from holdfast.errors import HoldfastError


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.001)


def main(url: str, gate: str, end: str) -> None:
    say(waits=os.getpid())
    wait_for(gate)
    try:
        with holdfast.CheckpointManager(url) as manager:
            step, _ = manager.resume({"w": np.zeros(10)})
            manager.save(step, {"w": np.full(10, float(os.getpid()))}, force=True)
            manager.wait_until_finished()
            say(outcome="saved", saved=step)
            wait_for(end)
            manager.save(step + 1, {"w": np.full(10, float(os.getpid()))}, force=True)
    except HoldfastError as error:
        say(outcome="error", error=type(error).__name__, message=str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
