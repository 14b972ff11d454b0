"""An agent that this trainer cannot join after its own has ended: one of another version."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest

import holdfast
from holdfast import errors, save_decision_policy
from tests.hosts import Host

WAIT_SECS = 240.0


def save(manager: holdfast.CheckpointManager, step: int) -> None:
    manager.save(step, {"w": np.arange(10)}, force=True)
    manager.wait_until_finished(WAIT_SECS)


def test_saves_fail_with_the_version_and_nothing_waits_where_a_newer_agent_is_there(
    one_host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, every_step = tmp_path / "run", save_decision_policy.FixedIntervalPolicy(1)

    def manager() -> holdfast.CheckpointManager:
        return holdfast.CheckpointManager(run, save_decision_policy=every_step, framework="numpy")

    saving = manager()
    save(saving, 0)
    session = saving._session
    # As for a trainer whose installation is updated under it: the next agent speaks otherwise.
    session._attach = msgspec.structs.replace(session._attach, protocol=10**6)
    one_host.kill_agent()
    for step in (1, 2, 3):
        with pytest.raises(errors.SaveFailedError, match=f"step {step}.*protocol"):
            save(saving, step)
    saving.close()
    warned = [r for r in caplog.records if "no agent for" in r.message and r.levelno > logging.INFO]
    assert len(warned) <= 1
    with manager() as again:
        assert again.resume({"w": np.zeros(10, np.int64)})[0] == 1
        save(again, 1)
