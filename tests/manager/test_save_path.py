"""How many source files one save enters, from the call to the sealed record."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import holdfast
from holdfast import save_decision_policy
from holdfast.agent.protocol import Sealed
from holdfast.format.names import CheckpointId
from holdfast.manager.progress import Progress
from holdfast.manager.saver import Saver
from tests.hosts import Host, wait_until

ROOT = Path(holdfast.__file__).parent
PATH = ("adapt", "engine", "manager")
"""The folders that implement a save. The others serve it: formats, stores, the agent's client."""
FILES_MAX = 15
ALL_FILES_MAX = 34


def jax_state(step: int) -> dict[str, Any]:
    return {"w": jnp.full(1000, step), "b": [jnp.full(3, step)], "n": step}


def numpy_state(step: int) -> dict[str, Any]:
    return {"w": np.full(1000, step), "b": [np.full(3, step)], "n": step}


@contextmanager
def counting(entered: dict[str, Counter[str]]) -> Iterator[None]:
    """Count the entries into each source file, by thread, on this thread and those started here."""
    threading.setprofile(lambda *found: note(entered, *found))
    try:
        yield
    finally:
        threading.setprofile(None)


def note(entered: dict[str, Counter[str]], frame: FrameType, event: str, found: object) -> None:
    path = Path(frame.f_code.co_filename)
    if event == "call" and path.is_relative_to(ROOT):
        by_thread = entered.setdefault(threading.current_thread().name, Counter())
        by_thread[str(path.relative_to(ROOT))] += 1


@pytest.mark.parametrize("state", [jax_state, numpy_state])
def test_a_save_is_followed_in_few_files(
    one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: Callable[[int], Any]
) -> None:
    entered: dict[str, Counter[str]] = {}
    counts: dict[str, Counter[str]] = {}
    seal = Progress.seal

    def sealing(self: Progress, checkpoint: CheckpointId, message: Sealed) -> None:
        seal(self, checkpoint, message)
        # What the thread does next is for the next save.
        counts.update({name: Counter(files) for name, files in list(entered.items())})

    monkeypatch.setattr(Progress, "seal", sealing)
    policy = save_decision_policy.FixedIntervalPolicy(1)
    framework = state.__name__.removesuffix("_state")
    with (
        counting(entered),
        holdfast.CheckpointManager(
            tmp_path / "run", save_decision_policy=policy, framework=framework
        ) as saving,
    ):
        saving.resume(state(0))
        for step in range(3):
            # From the second save on the structure is planned; the first ones are not counted.
            wait_until(lambda: saving._saver._slots.has_ready)
            if step == 2:
                # To prepare the slot of the next save is no part of this one.
                monkeypatch.setattr(Saver, "_prepare", lambda self, request: None)
                wait_until(lambda: not saving._saver._patience.for_preparing())
            made = state(step)
            entered.clear()
            counts.clear()
            sys.setprofile(lambda *found: note(entered, *found))
            saving.save(step, made)
            sys.setprofile(None)
            saving.wait_until_finished()
    assert {"MainThread", "holdfast-save"} <= counts.keys()
    files = {
        file
        for name, entries in counts.items()
        if name in ("MainThread", "holdfast-save")
        for file in entries
    }
    own = sorted(file for file in files if file.startswith(PATH))
    print(f"{framework}: {len(own)} files of {', '.join(PATH)}; {len(files)} in all: {own}")
    assert len(own) <= FILES_MAX, own
    assert len(files) <= ALL_FILES_MAX, sorted(files)
