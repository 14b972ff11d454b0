"""Nothing of a manager acts, or is held, in a process that was forked from the manager's."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.host.tiers.slot_allocator import SLOTS_PER_PART
from tests.hosts import Host, finished

TRAINER = Path(__file__).with_name("forking_trainer.py")


def lines(text: str) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in text.splitlines())


def test_a_forked_child_that_is_terminated_dies_and_is_no_preemption(
    one_host: Host, tmp_path: Path
) -> None:
    ended, saved = lines(
        finished(one_host.start(TRAINER, tmp_path / "run", "terminate", stem="numpy"))
    )
    assert ended == {"code": -signal.SIGTERM}
    assert saved == {"preempted": False}


def test_a_forked_child_that_exits_waits_for_no_save(one_host: Host, tmp_path: Path) -> None:
    (ended,) = lines(finished(one_host.start(TRAINER, tmp_path / "run", "exit", stem="numpy")))
    assert ended == {"code": 3, "alive": True}


def test_each_call_in_a_forked_child_tells_that_it_was_forked(
    one_host: Host, tmp_path: Path
) -> None:
    called, saved = lines(finished(one_host.start(TRAINER, tmp_path / "run", "call", stem="numpy")))
    expected = f"this process was forked from process {called['parent']}"
    assert all(expected in told for told in called["calls"].values()), called
    assert saved == {"latest": 60}


def test_a_forked_child_that_opens_the_run_is_refused_at_once(
    one_host: Host, tmp_path: Path
) -> None:
    opened, saved = lines(finished(one_host.start(TRAINER, tmp_path / "run", "open", stem="numpy")))
    assert opened["found"].startswith("RunBusyError: "), opened
    # A manager that waits for threads that only the parent has would take 30 s.
    assert opened["secs"] < 15
    assert opened["logged"] == []
    assert saved == {"latest": 60}


def test_a_child_that_outlives_a_killed_trainer_holds_no_slot(
    one_host: Host, tmp_path: Path
) -> None:
    children = []
    try:
        for _ in range(3):
            # The child keeps the pipes open, so their ends do not come.
            trainer = one_host.start(TRAINER, tmp_path / "run", "outlive", stem="numpy")
            found = json.loads(trainer.stdout.readline())
            children.append(found["child"])
            assert found["held"] == found["written"] == []
            trainer.wait(240)
            assert trainer.returncode == -signal.SIGKILL
        (counted,) = lines(
            finished(one_host.start(TRAINER, tmp_path / "run", "count", stem="numpy"))
        )
        assert counted["slots"] <= SLOTS_PER_PART
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
