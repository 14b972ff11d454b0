"""Saves over an older state, and dies at the nth call that touches the disk, for each n in turn.

Arguments: directory, `once` or `over`. It prints for each n the value that `load` gives afterwards,
`none` where there is nothing, and at last `done`. No framework is imported, so that it may fork.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np

import holdfast

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.link", "os.rmdir", "ctypes.dlsym")


def state(value: int) -> dict[str, object]:
    return {"w": np.full(1000, value), "n": value}


def die_at(number: int) -> None:
    left = [number]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS:
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)

    sys.addaudithook(hook)


def found(directory: Path) -> str:
    try:
        loaded = holdfast.load(directory)
    except holdfast.errors.NotARunError:
        return "none"
    assert (loaded["w"] == loaded["n"]).all()
    return str(loaded["n"])


def main(directory: Path, over: bool) -> None:
    holdfast.save(directory.with_name("warm"), state(0))
    for number in range(1, 1000):
        shutil.rmtree(directory, ignore_errors=True)
        if over:
            holdfast.save(directory, state(1))
        pid = os.fork()
        if pid == 0:
            die_at(number)
            holdfast.save(directory, state(2), overwrite=over)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(found(directory), flush=True)
        if status == 0:
            print("done", flush=True)
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "over")
