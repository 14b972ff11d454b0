"""A budget spaces the saves by what the trainers say that one costs; time mostly stands still."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.host.driver.attached_trainers import Policies
from holdfast.host.wire import control_block
from holdfast.observe.events.schema import FirstStep, TrainerLost
from holdfast.policy.best_interval import best_interval_secs
from holdfast.policy.save_decision_policy import ContinuousCheckpointingPolicy
from tests.hosts import Host, await_events, events, wait_until
from tests.observe.events.written import written
from tests.trust.in_process import InProcessHost, StepClock, in_process_host


def is_wanted(host: InProcessHost) -> bool:
    """Whether the agent, acting once more, wants a durable checkpoint."""
    host.settle()
    return host.agent.trainers.control.cells[control_block.TARGET_DURABLE] != control_block.NEVER


def intervals(run: Path, count: int) -> list[dict]:
    """The intervals that were chosen, once there are so many."""
    chosen = await_events(run, "interval_chosen", count=count)
    assert len(chosen) == count
    return chosen


def test_the_agent_waits_until_the_cost_is_known_and_then_for_its_share(tmp_path: Path) -> None:
    clock = StepClock()
    with in_process_host(tmp_path, clock=clock) as host:
        host.start_agent()
        trainer = host.attach(count=2)
        policy = ContinuousCheckpointingPolicy(max_overhead=0.1)
        host.agent.trainers.job.durable = Policies(save=policy)
        values = host.agent.trainers.control.cells
        group = host.agent.trainers.group
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


def test_the_minimum_interval_is_between_two_saves(tmp_path: Path) -> None:
    clock = StepClock()
    with in_process_host(tmp_path, clock=clock) as host:
        host.start_agent()
        trainer = host.attach()
        policy = ContinuousCheckpointingPolicy(minimum_interval_secs=100)
        host.agent.trainers.job.durable = Policies(save=policy)
        for step in range(3):
            assert is_wanted(host)
            host.save(trainer, step)
            clock.sleep(99)
            assert not is_wanted(host)
            clock.sleep(2)


def test_for_the_best_goodput_it_waits_as_costs_and_failures_advise(tmp_path: Path) -> None:
    clock = StepClock()
    with in_process_host(tmp_path, clock=clock) as host:
        host.start_agent()
        trainer = host.attach()
        policy = ContinuousCheckpointingPolicy(goodput="auto", max_overhead=0.1)
        host.agent.trainers.job.durable = Policies(save=policy)
        values = host.agent.trainers.control.cells
        (member,) = host.agent.trainers.group.present if host.agent.trainers.group else []
        host.agent.metering.failures.hours, host.agent.metering.failures.counts = (
            88.0,
            {"process": 19, "host": 0},
        )
        rate = (19.5 + 0.5) / 100 / 3600
        assert is_wanted(host)
        values[control_block.step_cell(member.seat)] = 0
        host.save(trainer, 0)
        clock.sleep(100_000)
        assert not is_wanted(host)
        # A failure in five hours, and 0.05 s for a checkpoint: 42 s (Daly).
        values[control_block.cost_cell(member.seat)] = int(0.05e9)
        assert is_wanted(host)
        (chosen,) = intervals(host.run, 1)
        best = best_interval_secs(0.05, rate)
        assert best == pytest.approx(42, abs=1)
        assert chosen["interval_secs"] == pytest.approx(best, rel=1e-5)
        assert chosen["failures_per_hour"] == pytest.approx(0.2)
        assert (chosen["tier"], chosen["cost_secs"]) == ("durable", 0.05)
        # Of short steps: a cost is at least a hundredth of one.
        values[control_block.step_cell(member.seat)] = 1000
        host.save(trainer, 1000)
        clock.sleep(best - 1)
        assert not is_wanted(host)
        # Many failures shorten it: what is advised is applied while the run goes on.
        host.agent.metering.failures.counts["process"] = 1900
        assert is_wanted(host)
        newest = intervals(host.run, 2)[-1]
        assert newest["interval_secs"] == pytest.approx(best / 10, rel=0.1)
        # The budget bounds it: a checkpoint that costs 10 s is taken every 100 s at most.
        values[control_block.step_cell(member.seat)] = 2000
        host.save(trainer, 2000)
        values[control_block.cost_cell(member.seat)] = int(10e9)
        clock.sleep(99)
        assert not is_wanted(host)
        assert intervals(host.run, 3)[-1]["interval_secs"] == pytest.approx(100.0)
        clock.sleep(2)
        assert is_wanted(host)


def test_a_cost_of_a_minute_lengthens_the_interval_by_a_checkpoint_at_a_time(
    tmp_path: Path,
) -> None:
    clock = StepClock()
    with in_process_host(tmp_path, clock=clock) as host:
        host.start_agent()
        trainer = host.attach()
        policy = ContinuousCheckpointingPolicy(minimum_interval_secs=2, goodput="auto")
        host.agent.trainers.job.durable = Policies(save=policy)
        values = host.agent.trainers.control.cells
        (member,) = host.agent.trainers.group.present if host.agent.trainers.group else []
        assert is_wanted(host)
        for number, expected in enumerate((60, 120, 240, 480)):
            values[control_block.step_cell(member.seat)] = number * 1000
            host.save(trainer, number * 1000)
            values[control_block.cost_cell(member.seat)] = int(62e9)
            clock.sleep(expected - 1)
            assert not is_wanted(host)
            clock.sleep(2)
            assert is_wanted(host)
        lengths = [chosen["interval_secs"] for chosen in intervals(host.run, 4)]
        assert lengths == [60, 120, 240, 480]
        notices = asyncio.run(host.agent.trainers.notices.after(0)).notices
        (notice,) = [one for one in notices if one.kind == "information"]
        assert notice.reason.startswith(
            "checkpoints in the durable tier are now 480.0 s apart, 60.0 s before: one costs 62 s"
        )


def test_a_training_that_saves_for_the_best_goodput_chooses_an_interval(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run, ram=None):
        pass
    wait_until(lambda: not one_host.agents())
    # Earlier attempts of the run have failed often, so that the best interval is short.
    for attempt in range(2, 41):
        lost = TrainerLost(rank=0, pid=1, last_step=9)
        written(
            run,
            *(FirstStep(rank=0, step=0), lost),
            host=one_host.name,
            attempt=attempt,
        )
    with holdfast.CheckpointManager(
        run,
        save_decision_policy=ContinuousCheckpointingPolicy(goodput="auto", max_overhead=0.5),
    ) as manager:
        for step in range(3000):
            manager.save(step, {"n": step})
            if events(run, "interval_chosen"):
                break
            time.sleep(0.01)
    chosen = events(run, "interval_chosen")[-1]
    # 39 failures, and the priors, in hardly more than the twelve hours of the prior.
    assert chosen["failures_per_hour"] == pytest.approx(40 / 12, rel=0.05)
    assert await_events(run, "committed", count=1)


def test_a_new_trainer_has_no_cost_yet(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        host.attach()
        (member,) = host.agent.trainers.group.present if host.agent.trainers.group else []
        assert (
            host.agent.trainers.control.cells[control_block.cost_cell(member.seat)]
            == control_block.NO_COST
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
            if len(events(run, "committed")) >= 4:
                break
            time.sleep(0.01)
        assert len(events(run, "committed")) >= 4
