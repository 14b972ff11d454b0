"""A training that fails in a chosen way. Arguments: directory, options as JSON.

Options: `steps`; `sleep`, seconds a step; `faults`, a list of [start, step, kind]: in that start of
the command (None: in each) the kind of fault occurs before the step is saved, once all earlier
saves are whole; `every`, the interval of saves in RAM.
It prints `step N` after each step.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

import holdfast
from holdfast import save_decision_policy


class OutOfMemoryError(RuntimeError):
    """As PyTorch names that of a device."""


def fail(error: Exception) -> None:
    raise error


def kill(number: int) -> None:
    # A fault of the test's own, whose stacks nobody needs.
    faulthandler.disable()
    os.kill(os.getpid(), number)
    time.sleep(10)


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


def wait_in_data(manager: holdfast.CheckpointManager) -> None:
    with manager.waiting("data"):
        threading.Event().wait()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def in_a_library() -> None:
    json.loads("{")


def faults(manager: holdfast.CheckpointManager) -> dict[str, Callable[[], object]]:
    """The kinds of faults, by name."""
    return {
        "exception": lambda: fail(ValueError("bad batch")),
        "exception of a library": in_a_library,
        "exception from another": lambda: fail(KeyError("missing")),
        "FloatingPointError": lambda: fail(FloatingPointError("invalid value (nan)")),
        "own NaN check": lambda: fail(RuntimeError("loss is NaN")),
        "MemoryError": lambda: fail(MemoryError()),
        "device memory": lambda: fail(OutOfMemoryError("CUDA out of memory")),
        "full disk": lambda: fail(OSError(errno.ENOSPC, "No space left on device", "/data/log")),
        "failed save": lambda: fail(holdfast.errors.SaveFailedError(3, "step 3 was not saved")),
        "storage": lambda: fail(holdfast.errors.StorageError("write: EIO")),
        "peer closed": lambda: fail(RuntimeError("Connection closed by peer [10.0.0.2]:31")),
        "SIGKILL": lambda: kill(signal.SIGKILL),
        "SIGSEGV": lambda: kill(signal.SIGSEGV),
        "SIGABRT": lambda: kill(signal.SIGABRT),
        "exit code": lambda: os._exit(3),
        "sys.exit": lambda: sys.exit(4),
        "notice": notice,
        "SIGTERM to all": lambda: notice_supervisor(signal.SIGTERM),
        "Ctrl-C": lambda: notice_supervisor(signal.SIGINT),
        "lock": wait_for_lock,
        "interpreter lock": hold_interpreter,
        "loader's worker": wait_for_loader,
        "data": lambda: wait_in_data(manager),
        "stopped": stop,
    }


def due(options: dict, step: int) -> Iterator[str]:
    start = int(os.environ.get("HOLDFAST_RESTART_COUNT", "0"))
    for of_start, of_step, kind in options.get("faults", ()):
        if of_start in (None, start) and of_step == step:
            yield kind


def main() -> None:
    directory, options = sys.argv[1], json.loads(sys.argv[2])
    for kind in due(options, -1):
        fail(ImportError(kind))
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
        kinds = faults(manager)
        first, state = manager.resume(state)
        for step in range(first, options["steps"]):
            state["w"] += 1
            for kind in due(options, step):
                manager.wait_until_finished()
                kinds[kind]()
            manager.save(step, state)
            print("step", step, flush=True)
            time.sleep(options.get("sleep", 0.02))
            if manager.reached_preemption(step):
                break
        else:
            manager.finish(options["steps"] - 1, state)


if __name__ == "__main__":
    main()
