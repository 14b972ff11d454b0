"""Which end of an agent `holdfast stop` reports as a loss."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.cli.stop import _check_nothing_lost
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import AttemptStart, begin_attempt
from holdfast.errors import SaveFailedError
from holdfast.format.names import AttemptId, CheckpointId
from holdfast.host.wire.protocol import AgentStatus, HeldStatus
from tests.attempts import attempt_id
from tests.trust.in_process import RUN_ID, in_process_host


def ended(run: Path, *held: tuple[AttemptId, int]) -> AgentStatus:
    """An agent that held these checkpoints, complete and not committed, as attempt and step."""
    return AgentStatus(
        run=str(run),
        run_id=RUN_ID,
        host="host-a",
        pid=1,
        attempt=1,
        folder="",
        ram_bytes=0,
        trainers=(),
        held=tuple(
            HeldStatus(
                step=step,
                attempt=attempt.number,
                attempt_token=attempt.token,
                parts_in_ram=1,
                part_count=1,
                complete=True,
                committed=False,
                durable_due=True,
                failed=None,
            )
            for attempt, step in held
        ),
        pending=0,
        leaves_in_secs=None,
        peer_address=None,
        pulled_bytes=0,
        waits_for="",
    )


def test_only_a_newest_checkpoint_of_the_timeline_that_is_not_durable_is_lost(
    tmp_path: Path,
) -> None:
    clock = SystemClock()
    with in_process_host(tmp_path) as host:
        host.start_agent()
        trainer = host.attach()
        host.save(trainer, 10)
        host.settle()
        _check_nothing_lost(ended(host.run), clock)
        first = trainer.attempt
        _check_nothing_lost(ended(host.run, (first, 5), (first, 10)), clock)
        with pytest.raises(SaveFailedError, match=r"step 20 \(attempt 1\) was not made durable"):
            _check_nothing_lost(ended(host.run, (first, 10), (first, 20)), clock)
        # Another host's attempt has gone on from step 10.
        origin = CheckpointId(10, first)
        start = AttemptStart(
            run_id=RUN_ID, origin=origin, host="host-b", pid=1, time=host.clock.now()
        )
        assert begin_attempt(host.agent.run.durable, attempt_id(2), start) is not None
        _check_nothing_lost(ended(host.run, (first, 20)), clock)
        shutil.rmtree(host.run)
        _check_nothing_lost(ended(host.run, (first, 20)), clock)
