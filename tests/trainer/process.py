"""One of several processes of a job that shares a host; of JAX or PyTorch, on the CPU.

Arguments: coordinator's address, count, rank, directory, what to do as JSON. Prints JSON lines.

Nothing in a step waits for the other processes, so that they may drift apart.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator

import numpy as np

import holdfast
from holdfast import preservation_policy, save_decision_policy
from holdfast.errors import HoldfastError, SaveFailedError
from tests.adapt.stand_in_device import StandInDevice

if json.loads(sys.argv[5]).get("framework") == "torch":
    import torch_states as states
else:
    import jax_states as states

WITH_POSITION = json.loads(sys.argv[5]).get("position", True)
# MiB of an array that every process has, or a share of; after how many steps it changes, if so.
BIG_MIB = json.loads(sys.argv[5]).get("big_mib", 0)
IS_BIG_SHARDED = json.loads(sys.argv[5]).get("big_sharded", False)
IS_SHARDED = json.loads(sys.argv[5]).get("sharded", True)
BIG_EVERY = json.loads(sys.argv[5]).get("big_every", 1)
IS_FROZEN = json.loads(sys.argv[5]).get("frozen", False)
# One rank's arrays may stand on a device that stands still when it is told to.
DEVICE = StandInDevice()

# What a save takes on this rank's training thread, beside what it really takes.
SAVE_SECS = json.loads(sys.argv[5]).get("save_secs", {}).get(sys.argv[3], 0)


class Position:
    """Each process's own place in its data."""

    def __init__(self, value: int) -> None:
        self.value = value

    def get_state(self) -> dict[str, int]:
        time.sleep(SAVE_SECS)
        return {"value": self.value}

    def set_state(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def state_at(step: int, rank: int) -> dict:
    rows = np.arange(48 * 50, dtype=np.float32).reshape(48, 50) + step
    state = {
        "sharded": states.array(rows, is_sharded=True),
        "replicated": states.array(rows * 2, is_sharded=False),
        "local": states.scalar(step),
        "host": np.arange(5) + step,
        "step": step,
    }
    if not IS_SHARDED:
        del state["sharded"]
    if BIG_MIB:
        state["big"] = big_at(0 if IS_FROZEN else step // BIG_EVERY * BIG_EVERY)
    if WITH_POSITION:
        state["position"] = Position(1000 * rank + step)
    return state


@functools.lru_cache(1)
def big_at(step: int):
    values = np.arange(BIG_MIB << 18, dtype=np.float32).reshape(BIG_MIB, 512, 512) - step
    return states.array(values, is_sharded=IS_BIG_SHARDED)


def right(state: dict, step: int, rank: int) -> bool:
    expected = state_at(step, rank)
    return (
        all(
            states.are_equal(state[name], expected[name])
            for name in expected.keys() & {"sharded", "replicated", "big"}
        )
        and float(state["local"]) == step
        and np.array_equal(state["host"], expected["host"])
        and (not WITH_POSITION or state["position"].value == expected["position"].value)
        and state["step"] == step
    )


def say(**line) -> None:
    print(json.dumps(line), flush=True)


def ram_tier(todo: dict) -> holdfast.RamTier | None:
    if not todo.get("ram", True):
        return None
    interval = todo.get("ram_interval")
    return holdfast.RamTier(
        # Importing PyTorch takes each rank of the next job seconds.
        linger_secs=todo.get("linger", 120 if todo.get("framework") == "torch" else 30),
        copies=todo.get("copies", 2),
        save_decision_policy=(
            save_decision_policy.FixedIntervalPolicy(interval) if interval else None
        ),
    )


def network_of(todo: dict, rank: int) -> holdfast.HostNetwork:
    domain = todo["domains"][rank] if "domains" in todo else None
    return holdfast.HostNetwork(failure_domain=domain)


def train(manager: holdfast.CheckpointManager, steps: range, rank: int, todo: dict) -> list[int]:
    """The steps that this rank has saved; it says on the way what it was asked to say."""
    saved = []
    doomed = todo.get("delete_once")
    for step in steps:
        time.sleep(pause_secs(todo, step, rank))
        if todo.get("lockstep"):
            states.await_others(step)
        if todo.get("signal_at") == step and rank == todo.get("signal_rank", 0):
            os.kill(os.getpid(), signal.SIGTERM)
        if [rank, step] == todo.get("hold"):
            DEVICE.let_run(0)
        if doomed and os.path.exists(doomed):
            doomed = None
            delete(manager, saved[0])
        if todo.get("restore_at") == step:
            manager.restore(like=state_at(-1, rank))
            report = manager.last_restore
            say(read=report.step, passed_over=report.passed_over)
            break
        with failures_said(todo, step):
            if manager.save(step, passed_state(todo, step, rank)):
                saved.append(step)
        if todo.get("settle"):
            manager.wait_until_finished()
        if todo.get("tell"):
            say(step=step, at_secs=time.monotonic())
        if [rank, step] == todo.get("hold"):
            while not DEVICE.is_queued():
                time.sleep(0.001)
            say(held=step)
        if step == todo.get("stand_at"):
            say(stands=step)
            signal.pause()
        if manager.reached_preemption(step):
            say(left=step)
            break
    return saved


def passed_state(todo: dict, step: int, rank: int) -> dict:
    """What this rank passes to `save`; the rank that `forgets` makes no iterator."""
    state = state_at(step, rank)
    if todo.get("forgets") == rank:
        del state["position"]
    return state


def pause_secs(todo: dict, step: int, rank: int) -> float:
    """How long a step takes; `pauses` tells of each rank before which it stands for how many."""
    pauses = todo["pauses"][rank] if "pauses" in todo else {}
    return todo.get("sleep", 0.002) * pauses.get(str(step), 1)


@contextlib.contextmanager
def failures_said(todo: dict, step: int | None) -> Iterator[None]:
    """Says which saves have failed, where the job `goes_on` then."""
    try:
        yield
    except SaveFailedError as error:
        if not todo.get("goes_on"):
            raise
        say(failed=error.steps, at_step=step, message=str(error))


def delete(manager: holdfast.CheckpointManager, step: int) -> None:
    try:
        manager.delete(step)
        say(deleted=step)
    except HoldfastError as error:
        say(not_deleted=step, why=type(error).__name__, message=str(error))


def break_off() -> None:
    """Ends at once: another rank may have ended already, and JAX's own end would wait for it."""
    sys.stdout.flush()
    os._exit(0)


def remote_tier(todo: dict) -> holdfast.RemoteTier | None:
    """The remote tier, which gets every checkpoint that is committed."""
    if "remote" not in todo:
        return None
    policy = save_decision_policy.FixedIntervalPolicy(1)
    return holdfast.RemoteTier(todo["remote"], save_decision_policy=policy)


def main() -> None:
    address, count, rank, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    todo = json.loads(sys.argv[5])
    heartbeat_secs = todo.get("heartbeat_secs", 100)
    states.start(address, count, rank, heartbeat_secs)
    budget = todo.get("max_overhead")
    policy = save_decision_policy.ContinuousCheckpointingPolicy(max_overhead=budget)
    if "interval" in todo:
        policy = save_decision_policy.FixedIntervalPolicy(todo["interval"])
    if "gate" in todo:
        say(waits=True)
        while not os.path.exists(todo["gate"]):
            time.sleep(0.001)
    with (
        DEVICE.serving() if todo.get("hold", [-1])[0] == rank else contextlib.nullcontext(),
        holdfast.CheckpointManager(
            directory,
            save_decision_policy=policy,
            preservation_policy=preservation_policy.LatestN(100),
            ram=ram_tier(todo),
            network=network_of(todo, rank),
            takeover=todo.get("takeover", False),
            remote=remote_tier(todo),
        ) as manager,
    ):
        if todo.get("absent") == rank:
            say(absent=os.getpid())
            signal.pause()
        like = state_at(-1, rank)
        if todo.get("other_like") == rank:
            like["another"] = states.scalar(0)
        say(resuming=True)
        left_out = "position" if todo.get("values") else None
        start, state = manager.resume(like, step=todo.get("back_to"), partial=left_out)
        report = manager.last_restore
        say(
            start=start,
            right=start == 0 or right(state, start - 1, rank),
            passed_over=report.passed_over if report else (),
        )
        if "look_at" in todo:
            looked = manager.restore(todo["look_at"], like=state_at(-1, rank))
            say(looked=right(looked, todo["look_at"], rank))
        if start and todo.get("values"):
            say(values=manager.process_values(start - 1), left_out=report.left_out)
        saved = train(manager, range(start, start + todo["steps"]), rank, todo)
        say(trained=True)
        if "finish" in todo:
            say(finished=manager.finish(todo["finish"], state_at(todo["finish"], rank)))
        if todo.get("stay"):
            signal.pause()
        if todo.get("only_closes"):
            say(saved=saved)
            with failures_said(todo, None):
                manager.close()
            say(closed=True)
            break_off()
        with failures_said(todo, None):
            manager.wait_until_finished()
        if todo.get("delete_on") == rank:
            say(deletes=True)
            while not os.path.exists(todo.get("delete_when", directory)):
                time.sleep(0.01)
            manager.delete(todo["delete"])
        say(saved=saved, steps=manager.all_steps())
        if todo.get("dies") and rank == count - 1:
            # Without closing its manager, so that all agents linger.
            states.shut_down()
            os._exit(0)
    states.shut_down()


if __name__ == "__main__":
    try:
        main()
    except HoldfastError as error:
        traceback.print_exc()
        say(error=type(error).__name__, message=str(error))
        # JAX's own end would wait for the other processes.
        os._exit(3)
