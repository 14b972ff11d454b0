"""The wall clock jumps by a day in the middle of a run, forward and back; time goes on as before.

The clocks of the trainer, its agent and of another host jump; monotonic clocks and the times of
files do not.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import preservation_policy, save_decision_policy
from holdfast.errors import RunBusyError
from tests.hosts import Host, events, finished, wait_until
from tests.said import Said
from tests.trainer.job import seen
from tests.trainer.test_skewed_clocks import set_clock, skewed
from tests.trust.figures import tell

JUMPS_HOURS = (24.0, -24.0, 0.0, -20 / 3600, 1.0)
INTERVAL_SECS = 0.3


def train(run: Path, until: Path) -> None:
    """Train until a file exists; what a trainer's process runs."""
    with holdfast.CheckpointManager(
        run,
        save_decision_policy=save_decision_policy.ContinuousCheckpointingPolicy(INTERVAL_SECS),
        preservation_policy=preservation_policy.AnyPreservationPolicy(
            [preservation_policy.LatestN(2), preservation_policy.EveryNSeconds(3600)]
        ),
    ) as manager:
        start, state = manager.resume({"w": np.zeros(1000)})
        print(f'{{"start": {start}}}', flush=True)
        step = start
        while not until.exists():
            assert (state["w"] == step).all()
            state = {"w": state["w"] + 1}
            manager.save(step, state)
            step += 1
            time.sleep(0.01)
        manager.finish(step, {"w": state["w"] + 1})


def start_run(run: Path) -> None:
    """Start the run a second time, which has to be refused; what another process runs."""
    with pytest.raises(RunBusyError):
        holdfast.CheckpointManager(run)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_clock_that_jumps_by_a_day_stops_no_saves(two_hosts: list[Host], tmp_path: Path) -> None:
    one_host = two_hosts[0]
    run, until = tmp_path / "run", tmp_path / "until"
    clocks = [skewed(host, tmp_path / host.name) for host in two_hosts]
    training = Said(one_host.start(__file__, "train", run, until))
    try:
        training.await_line("start")
        wait_until(lambda: len(seen(run, "committed")) > 3)
        pid = one_host.agent().pid
        for hours in JUMPS_HOURS:
            for clock in clocks:
                set_clock(clock, hours)
            count = len(seen(run, "committed"))
            wait_until(lambda count=count: len(seen(run, "committed")) > count + 5, 30)
            for host in two_hosts:
                finished(host.start(__file__, "start", run), 120)
            finished(one_host.start("-m", "holdfast", "report", run))
            finished(one_host.start("-m", "holdfast", "status", run))
        assert one_host.agent().pid == pid
        until.touch()
        assert training.process.wait(240) == 0, training.told()
    finally:
        training.kill()
    assert len(events(run, "attempt_started")) == 1

    with holdfast.open_run(run) as reader:
        steps = reader.all_steps()
    assert 2 <= len(steps) <= 2 + 2 + len(JUMPS_HOURS), steps
    tell(
        "wall clock jumps by a day",
        "saves go on, a second start is refused",
        f"{len(JUMPS_HOURS)} jumps, {2 * len(JUMPS_HOURS)} starts refused",
    )


if __name__ == "__main__":
    {"train": train, "start": start_run}[sys.argv[1]](*map(Path, sys.argv[2:]))
