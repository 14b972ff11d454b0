"""A trainer that forks children, for `test_forks`. Arguments: directory, what to do."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np

import holdfast
from holdfast import errors, save_decision_policy

CALLS = {
    "save": lambda manager: manager.save(100, {"w": np.zeros(3)}),
    "resume": lambda manager: manager.resume({"w": np.zeros(3)}),
    "restore": lambda manager: manager.restore(),
    "latest_step": lambda manager: manager.latest_step(),
    "all_steps": lambda manager: manager.all_steps(),
    "delete": lambda manager: manager.delete(0),
    "metadata": lambda manager: manager.metadata(0),
    "wait_until_finished": lambda manager: manager.wait_until_finished(),
    "close": lambda manager: manager.close(),
}


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def opened(run: str) -> holdfast.CheckpointManager:
    manager = holdfast.CheckpointManager(
        run,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(1),
        ram=holdfast.RamTier(linger_secs=30),
    )
    start, state = manager.resume({"w": np.zeros(100_000)})
    for step in range(start, start + 3):
        assert manager.save(step, {"w": state["w"] + step})
        manager.wait_until_finished(30)
    deadline = time.monotonic() + 30
    while not manager._parts.position.saver._slots.has_ready and time.monotonic() < deadline:
        time.sleep(0.01)
    return manager


def terminate(manager: holdfast.CheckpointManager) -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    process.terminate()
    process.join(60)
    say(code=process.exitcode)
    time.sleep(0.3)
    assert manager.save(50, {"w": np.ones(100_000)})
    say(preempted=manager.reached_preemption(50))


def exit_child(manager: holdfast.CheckpointManager) -> None:
    """Say what a child would do at its end; JAX itself does not survive `sys.exit` in one."""
    own = manager._parts.lifetime._at_exit
    pid = os.fork()
    if pid == 0:
        os._exit(4 if own.alive else 3)
    _, status = os.waitpid(pid, 0)
    say(code=os.waitstatus_to_exitcode(status), alive=own.alive)


def call(manager: holdfast.CheckpointManager) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = {}
        for name, one in CALLS.items():
            try:
                one(manager)
                found[name] = "no error"
            except errors.InvalidArgumentError as error:
                found[name] = str(error)
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    say(parent=os.getpid(), calls=json.loads(os.read(reading, 1 << 16)))
    assert manager.save(60, {"w": np.ones(100_000)})
    manager.wait_until_finished(30)
    say(latest=manager.latest_step())


def open_again(manager: holdfast.CheckpointManager) -> None:
    """Open the live run in a child, and leave the parent's `with` there."""
    reading, writing = os.pipe()
    log = logging.getLogger("holdfast")
    with manager:
        pid = os.fork()
        if pid != 0:
            os.waitpid(pid, 0)
            say(**json.loads(os.read(reading, 1 << 16)))
            assert manager.save(60, {"w": np.ones(100_000)})
            manager.wait_until_finished(30)
            say(latest=manager.latest_step())
            return
        logged: list[str] = []
        log.handle = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
        began = time.monotonic()
        try:
            holdfast.CheckpointManager(sys.argv[1])
            found = "no error"
        except errors.HoldfastError as error:
            found = f"{type(error).__name__}: {error}"
        secs = time.monotonic() - began
        try:
            manager.__exit__(SystemExit, SystemExit(0), None)
        finally:
            os.write(writing, json.dumps({"found": found, "secs": secs, "logged": logged}).encode())
            os._exit(0)


def outlive(manager: holdfast.CheckpointManager) -> None:
    """Leave a child behind, and die by SIGKILL."""
    pid = os.fork()
    if pid == 0:
        held = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        mapped = Path("/proc/self/maps").read_text()
        folder = str(manager._session.place.folder)
        say(
            child=os.getpid(),
            held=[path for path in held if path.startswith(folder)],
            written=[line for line in mapped.splitlines() if "rw-s" in line and folder in line],
        )
        time.sleep(60)
        os._exit(0)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def count(manager: holdfast.CheckpointManager) -> None:
    slots = manager._session.place.ram_folder / "slots"
    say(slots=len(list(slots.iterdir())))


def main() -> None:
    warnings.filterwarnings("ignore", message=".*fork.*")
    manager = opened(sys.argv[1])
    for todo in sys.argv[2:]:
        {
            "terminate": terminate,
            "exit": exit_child,
            "call": call,
            "open": open_again,
            "outlive": outlive,
            "count": count,
        }[todo](manager)
    manager.close()


if __name__ == "__main__":
    main()
