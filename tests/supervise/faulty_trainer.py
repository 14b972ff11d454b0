"""A training that fails in a chosen way. Arguments: directory, options as JSON.

Options: `steps`; `sleep`, seconds a step; `faults`, a list of [start, step, kind, delay]: in that
start of the command (None: in each) the kind of fault occurs before the step is saved, once all
earlier saves are whole, and after so many seconds if there is a number; at step -1 before the
manager is opened. `every`, the interval of saves in RAM. `slow`, seconds of single steps by their
number, and `slow_kind`, what they do.
It prints `step N` after each step, and adds each fault and its time to a file beside the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import holdfast
from holdfast import save_decision_policy


class OutOfMemoryError(RuntimeError):
    """As PyTorch names that of a device."""


def fail(error: Exception) -> None:
    raise error


def kill(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(10)


def read_no_page() -> None:
    """SIGBUS: the file of a mapping is cut."""
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 16)
        pages = mmap.mmap(file.fileno(), 1 << 16)
        file.truncate(0)
        pages.read(1)


def use_up_memory() -> None:
    """Until the kernel kills a process of this cgroup, which has a limit."""
    held = []
    while True:
        held.append(b"x" * (16 << 20))


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1) + 1


def write_to_full_disk() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def log_of_negative() -> None:
    with np.errstate(invalid="raise"):
        np.log(np.array(-1.0))


def fill_disk(directory: str) -> None:
    """Until the next start there is no room on the run's file system, which is the test's own."""
    with contextlib.suppress(OSError), filler(directory).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


def filler(directory: str) -> Path:
    return Path(directory).parent / "filler"


def notice() -> None:
    """What the agents of a job's other hosts do with a preemption there."""
    os.kill(os.getpid(), signal.SIGTERM)


def notice_supervisor(number: int) -> None:
    os.kill(os.getppid(), number)
    time.sleep(20)


def wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hold_interpreter() -> None:
    # A call that no signal interrupts.
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def wait_for_loader() -> None:
    reader, _ = os.pipe()
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert worker.pid
    os.read(reader, 1)


def wait_in(manager: holdfast.CheckpointManager, section: str) -> None:
    with manager.waiting(section):
        threading.Event().wait()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def in_a_library() -> None:
    json.loads("{")


def faults(manager: holdfast.CheckpointManager, directory: str) -> dict[str, Callable[[], object]]:
    """The kinds of faults, by name."""
    return {
        "exception": lambda: fail(ValueError("bad batch")),
        "exception of a library": in_a_library,
        "exception from another": lambda: fail(KeyError("missing")),
        "deep recursion": recurse,
        "FloatingPointError": log_of_negative,
        "own NaN check": lambda: fail(RuntimeError("loss is NaN")),
        "MemoryError": lambda: np.empty(1 << 60, np.uint8),
        "host memory": use_up_memory,
        "device memory": lambda: fail(OutOfMemoryError("CUDA out of memory")),
        "full disk": write_to_full_disk,
        "failed save": lambda: fill_disk(directory),
        "storage": lambda: fail(holdfast.errors.StorageError("write: EIO")),
        "peer closed": lambda: fail(RuntimeError("Connection closed by peer [10.0.0.2]:31")),
        "SIGKILL": lambda: kill(signal.SIGKILL),
        "SIGSEGV": lambda: ctypes.string_at(0),
        "SIGABRT": os.abort,
        "SIGBUS": read_no_page,
        "exit code": lambda: os._exit(3),
        "sys.exit": lambda: sys.exit(4),
        "notice": notice,
        "SIGTERM to all": lambda: notice_supervisor(signal.SIGTERM),
        "Ctrl-C": lambda: notice_supervisor(signal.SIGINT),
        "lock": wait_for_lock,
        "interpreter lock": hold_interpreter,
        "loader's worker": wait_for_loader,
        "data": lambda: wait_in(manager, "data"),
        "evaluation": lambda: wait_in(manager, "evaluation"),
        "stopped": stop,
    }


def due(
    directory: str, options: dict, step: int, before: Callable[[], object] = lambda: None
) -> Iterator[str]:
    """The faults that are due now, each at its moment, and after `before`."""
    start = int(os.environ.get("HOLDFAST_RESTART_COUNT", "0"))
    for of_start, of_step, kind, *delay_secs in options.get("faults", ()):
        if of_start in (None, start) and of_step == step:
            before()
            time.sleep(sum(delay_secs))
            with Path(f"{directory}.faults").open("a") as file:
                file.write(json.dumps([kind, time.monotonic()]) + "\n")
            yield kind


def make_slow_step(manager: holdfast.CheckpointManager, secs: float, kind: str) -> None:
    """A step that takes so long: it sleeps, waits for data, evaluates, or computes."""
    until_secs = time.monotonic() + secs
    if kind == "compute":
        while time.monotonic() < until_secs:
            np.ones(1 << 20).sum()
        return
    with contextlib.nullcontext() if kind == "sleep" else manager.waiting(kind):
        time.sleep(secs)


def main() -> None:
    directory, options = sys.argv[1], json.loads(sys.argv[2])
    # The faults are the test's own: nobody needs their stacks.
    faulthandler.disable()
    filler(directory).unlink(missing_ok=True)
    for kind in due(directory, options, -1):
        fail(ImportError(kind))
    slow, slow_kind = options.get("slow", {}), options.get("slow_kind", "sleep")
    ram = holdfast.RamTier(
        linger_secs=30,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(options.get("every", 1)),
    )
    state = {"w": np.zeros(16)}
    with holdfast.CheckpointManager(
        directory,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(10**6),
        ram=ram,
        framework="numpy",
    ) as manager:
        kinds = faults(manager, directory)
        first, state = manager.resume(state)
        for step in range(first, options["steps"]):
            state["w"] += 1
            for kind in due(directory, options, step, manager.wait_until_finished):
                kinds[kind]()
                if kind == "failed save":
                    manager.save(step, state, force=True)
                    manager.wait_until_finished()
            if str(step) in slow:
                make_slow_step(manager, slow[str(step)], slow_kind)
            manager.save(step, state)
            print("step", step, flush=True)
            time.sleep(options.get("sleep", 0.02))
            if manager.reached_preemption(step):
                break
        else:
            manager.finish(options["steps"] - 1, state)


if __name__ == "__main__":
    main()
