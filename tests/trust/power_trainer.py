"""Train, and record the actions outside of the disk; check the run after the cut.

Each save has a serial number, and its state follows from step and serial alone, so that restored
data identifies its save, to the bit.

`power_trainer.py train RUN JOURNAL OPTIONS` trains until it is killed. The journal is on another
file system. It has a line before each action that changes from what the run would continue
(`{"action": n, "kind": …, "newest": …, "second": …, "gone": …, "begun": time}`), and one when all
actions so far are acknowledged as durable (`{"acknowledged": n, "time": …}`).

`power_trainer.py check RUN OPTIONS` resumes, saves one step more, restores every step, and prints
one line of what it found. Options: `seed`; `ram`, whether there is a RAM tier.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import holdfast
from holdfast import preservation_policy, save_decision_policy

EVERY = 2
KEEP = 2
SIZE = 200_000


class Position:
    """A data iterator's place."""

    def __init__(self, value: int) -> None:
        self.value = value

    def get_state(self) -> dict[str, int]:
        return {"value": self.value}

    def set_state(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def state_of(step: int, serial: int) -> dict[str, Any]:
    """The one right state of a save."""
    bits = np.random.default_rng((step, serial)).integers(0, 2**32, SIZE, np.uint32)
    return {
        "w": jnp.asarray(bits),
        "odd": jnp.asarray(bits[:1001], jnp.float32),
        "key": jax.random.key(serial),
        "host": bits[:77].astype(np.int64),
        "step": step,
        "serial": serial,
        "data": Position(step * 1000 + serial),
    }


def is_right(state: dict[str, Any]) -> bool:
    """Return whether a state is that of the save that it names."""
    right = state_of(state["step"], state["serial"])
    return (
        state["data"].value == right["data"].value
        and np.array_equal(np.asarray(state["w"]), np.asarray(right["w"]))
        and np.array_equal(np.asarray(state["odd"]), np.asarray(right["odd"]))
        and np.array_equal(state["host"], right["host"])
        and np.array_equal(jax.random.key_data(state["key"]), jax.random.key_data(right["key"]))
    )


def open_manager(directory: str, keep: int, has_ram: bool) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(
        directory,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(EVERY),
        preservation_policy=preservation_policy.LatestN(keep),
        ram=holdfast.RamTier(linger_secs=30) if has_ram else None,
    )


class Training:
    """The run, and what it must be able to go on from after each action."""

    def __init__(
        self, manager: holdfast.CheckpointManager, journal: Path, chance: random.Random
    ) -> None:
        self._manager = manager
        self._journal = journal.open("a", buffering=1)
        self._chance = chance
        self._timeline: list[tuple[int, int]] = []
        self._action = 0
        self._serial = 0
        self._step = -1
        self._since = 0

    def act(self) -> None:
        """Does one thing more, whatever chance wants."""
        if self._chance.random() < 0.1:
            # Long steps: the file system writes by itself meanwhile.
            time.sleep(self._chance.uniform(0, 0.3))
        if self._since < 3:
            self.save()
            return
        action = self._chance.choice([self.save] * 2 + [self.overwrite, self.go_back, self.delete])
        action()

    def save(self) -> None:
        """Trains on to the next step that is due, saves it, and mostly waits until it is durable.

        Else the next one is under way together with it.
        """
        for _ in range(EVERY):
            self._step += 1
            is_due = self._step % EVERY == 0
            self._serial += is_due
            if is_due:
                self._begin("save", [*self._timeline, (self._step, self._serial)])
            if self._manager.save(self._step, state_of(self._step, self._serial)) != is_due:
                # Two saves were under way: the run goes on without this one.
                assert is_due
                self._begin("skip", self._timeline)
            elif is_due:
                # Older ones are preservation's to remove.
                self._timeline = [*self._timeline, (self._step, self._serial)][-KEEP:]
                self._since += 1
        if self._chance.random() < 0.7:
            self._wait()

    def overwrite(self) -> None:
        """Saves the newest step once more, with another state."""
        self._wait()
        self._serial += 1
        step, _ = self._timeline[-1]
        self._begin("overwrite", [*self._timeline[:-1], (step, self._serial)])
        assert self._manager.save(step, state_of(step, self._serial), force=True)
        self._timeline[-1] = (step, self._serial)
        self._step = step
        self._since = 0
        self._wait()

    def go_back(self) -> None:
        """Goes on from the newest checkpoint but one: what came after it is abandoned."""
        self._wait()
        self._begin("go back", self._timeline[:-1])
        step, serial = self._timeline[-2]
        after, state = self._manager.resume(state_of(0, 0), step=step)
        assert after == step + 1
        assert (state["step"], state["serial"]) == (step, serial)
        assert is_right(state)
        self._timeline.pop()
        self._step = step
        self._since = 0
        self._acknowledge()

    def delete(self) -> None:
        """Deletes one of the two newest checkpoints."""
        self._wait()
        which = self._chance.choice([-1, -2])
        left = list(self._timeline)
        step, _ = left.pop(which)
        self._begin("delete", left)
        self._manager.delete(step)
        self._timeline = left
        self._since = 0
        self._acknowledge()

    def _wait(self) -> None:
        self._manager.wait_until_finished(60)
        self._acknowledge()

    def _begin(self, kind: str, timeline: list[tuple[int, int]]) -> None:
        self._action += 1
        second = timeline[-2] if len(timeline) > 1 else None
        newest = timeline[-1] if timeline else None
        gone = [save for save in self._timeline if save not in timeline]
        self._say(
            action=self._action,
            kind=kind,
            newest=newest,
            second=second,
            gone=gone,
            begun=time.monotonic(),
        )

    def _acknowledge(self) -> None:
        self._say(acknowledged=self._action, time=time.monotonic())

    def _say(self, **line: Any) -> None:
        self._journal.write(json.dumps(line) + "\n")


def train(directory: str, journal: Path, options: dict[str, Any]) -> None:
    with open_manager(directory, KEEP, options["ram"]) as manager:
        start, _ = manager.resume(state_of(0, 0))
        assert start == 0
        training = Training(manager, journal, random.Random(options["seed"]))
        while True:
            training.act()


def check(directory: str, options: dict[str, Any]) -> None:
    with open_manager(directory, 1000, options["ram"]) as manager:
        start, state = manager.resume(state_of(0, 0))
        report = manager.last_restore
        found: dict[str, Any] = {"newest": None, "wrong": [], "told": [], "saves": []}
        if start > 0:
            found["newest"] = [start - 1, state["serial"]]
            found["told"] = [*report.skipped, *report.passed_over]
            if state["step"] != start - 1 or not is_right(state):
                found["wrong"].append(start - 1)
        steps = manager.all_steps()
        more = start + 1000
        assert manager.save(more, state_of(more, 0), force=True)
        manager.wait_until_finished(60)
        for step in [more, *reversed(steps)]:
            state = manager.restore(step, like=state_of(0, 0))
            if state["step"] != step or not is_right(state):
                found["wrong"].append(step)
            elif step != more:
                found["saves"].append([step, state["serial"]])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    what, directory, *rest = sys.argv[1:]
    if what == "train":
        train(directory, Path(rest[0]), json.loads(rest[1]))
    else:
        check(directory, json.loads(rest[0]))
