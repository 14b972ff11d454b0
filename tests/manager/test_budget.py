"""A budget spaces the saves by what the trainers say that one costs; time mostly stands still."""

from __future__ import annotations

import time
from pathlib import Path

import holdfast
from holdfast.agent import control_block
from holdfast.agent.state import Policies
from holdfast.policy.save_decision_policy import ContinuousCheckpointingPolicy
from tests.hosts import Host, events
from tests.trust.in_process import InProcessHost, StepClock, in_process_host


def is_wanted(host: InProcessHost) -> bool:
    """Whether the agent, acting once more, wants a durable checkpoint."""
    host.settle()
    return host.state.control.cells[control_block.TARGET_DURABLE] != control_block.NEVER


def test_the_agent_waits_until_the_cost_is_known_and_then_for_its_share(tmp_path: Path) -> None:
    clock = StepClock()
    with in_process_host(tmp_path, clock=clock) as host:
        host.start_agent()
        trainer = host.attach(count=2)
        policy = ContinuousCheckpointingPolicy(max_overhead=0.1)
        host.state.durable_policies = Policies(save=policy)
        values = host.state.control.cells
        group = host.state.group
        assert group is not None
        seats = [member.seat for member in group.present]
        assert is_wanted(host)
        for seat in seats:
            values[control_block.step_cell(seat)] = 0
        host.save(trainer, 0)
        clock.sleep(1000)
        assert not is_wanted(host)
        # The rank that it costs most decides.
        values[control_block.cost_cell(seats[0])] = int(0.2e9)
        values[control_block.cost_cell(seats[1])] = int(200e9)
        clock.sleep(999)
        assert not is_wanted(host)
        clock.sleep(2)
        assert is_wanted(host)


def test_a_new_trainer_has_no_cost_yet(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        host.attach()
        (member,) = host.state.group.present if host.state.group else []
        assert (
            host.state.control.cells[control_block.cost_cell(member.seat)] == control_block.NO_COST
        )


def test_saves_that_are_over_before_the_next_step_are_not_the_last_ones(
    one_host: Host, tmp_path: Path
) -> None:
    policy = ContinuousCheckpointingPolicy(max_overhead=0.9)
    saved = []
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=policy) as manager:
        for step in range(3000):
            if manager.save(step, {"n": step}):
                saved.append(step)
                manager.wait_until_finished()
            if len(saved) == 4:
                break
            time.sleep(0.01)
    assert len(saved) == 4


def test_ram_that_is_saved_at_every_step_does_not_hide_what_a_durable_one_costs(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with holdfast.CheckpointManager(
        run,
        save_decision_policy=ContinuousCheckpointingPolicy(max_overhead=0.9),
        ram=holdfast.RamTier(save_decision_policy=ContinuousCheckpointingPolicy()),
    ) as manager:
        for step in range(3000):
            manager.save(step, {"n": step})
            if len(events(run, "committed")) == 4:
                break
            time.sleep(0.01)
        assert len(events(run, "committed")) == 4
