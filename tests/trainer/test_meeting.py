"""Ranks meet at a target, or the half checkpoint is given up; nobody waits for it for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.format.names import CheckpointId
from holdfast.host.driver.attached_trainers import Policies
from holdfast.host.wire import control_block, protocol
from holdfast.policy.save_decision_policy import ContinuousCheckpointingPolicy
from tests.trust.in_process import InProcessHost, StepClock, Trainer, in_process_host


class Ranks:
    """Two ranks of one process, and their words."""

    def __init__(self, host: InProcessHost) -> None:
        self.host = host
        host.start_agent()
        assert host.service is not None
        self.service = host.service
        self.trainer: Trainer = host.attach(count=2)
        group = host.agent.trainers.group
        assert group is not None
        self.seats = [group.members[rank].seat for rank in (0, 1)]

    def publish(self, rank: int, step: int) -> None:
        self.host.agent.trainers.control.cells[control_block.step_cell(self.seats[rank])] = step

    def take(self, rank: int, step: int) -> CheckpointId:
        """The rank has read the target, and tells the agent that it fills a slot."""
        taken = CheckpointId(step, self.trainer.attempt)
        request = protocol.FillStarted(rank=rank, id=taken)
        self.host.call(self.service.filling(request, self.trainer.process.pid))
        return taken

    def skip(self, taken: CheckpointId, rank: int) -> None:
        """The rank goes on without it."""
        request = protocol.Abandoned(rank=rank, id=taken, reason="it was busy", skipped=True)
        self.host.call(self.service.abandoned(request, self.trainer.process.pid))

    def settle(self) -> None:
        """Lets the agent look once more at who has come to the target."""
        self.host.clock.sleep(0.1)
        self.host.settle()

    def seal(self, taken: CheckpointId, rank: int) -> None:
        self.host.seal(self.trainer, taken, rank)
        self.host.tell_sealed(self.trainer, taken, rank)

    def told(self) -> list[tuple[str, CheckpointId]]:
        found = self.host.board.posted
        ends = (n for n in found if n.kind not in ("protected", "preserved"))
        return [(n.kind, n.id) for n in ends if n.id is not None]

    @property
    def target(self) -> int:
        return self.host.agent.trainers.control.cells[control_block.TARGET_DURABLE]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with in_process_host(tmp_path) as host:
        yield Ranks(host)


def test_a_target_stands_until_every_rank_has_read_it(ranks: Ranks) -> None:
    ranks.publish(0, 4)
    ranks.publish(1, 4)
    ranks.host.agent.trainers.job.durable = Policies(save=ContinuousCheckpointingPolicy())
    ranks.settle()
    assert ranks.target == 5
    # Both have come to the step, and only one of them has looked at the target yet.
    ranks.publish(0, 5)
    ranks.publish(1, 5)
    ranks.take(0, 5)
    ranks.settle()
    assert ranks.target == 5
    ranks.take(1, 5)
    ranks.settle()
    assert ranks.target == control_block.NEVER


def test_a_rank_that_went_past_a_target_has_read_it(ranks: Ranks) -> None:
    ranks.publish(0, 4)
    ranks.publish(1, 4)
    ranks.host.agent.trainers.job.durable = Policies(save=ContinuousCheckpointingPolicy())
    ranks.settle()
    ranks.publish(0, 5)
    ranks.take(0, 5)
    ranks.publish(0, 6)
    ranks.publish(1, 6)
    ranks.host.agent.trainers.job.durable = Policies()
    ranks.settle()
    assert ranks.target == control_block.NEVER


def test_what_a_rank_went_past_is_given_up_and_told(ranks: Ranks) -> None:
    ranks.publish(0, 5)
    ranks.publish(1, 5)
    half = ranks.take(0, 5)
    ranks.seal(half, 0)
    ranks.settle()
    # It may still come to save it.
    assert ranks.told() == []
    ranks.publish(1, 6)
    ranks.skip(half, 1)
    # Storage is listed once more first: the rank that left may have written its part.
    for _ in range(60):
        ranks.host.clock.sleep(1)
        ranks.settle()
        if ranks.told():
            break
    assert ranks.told() == [("dropped", half)]


def test_a_rank_that_saves_it_late_is_waited_for(ranks: Ranks) -> None:
    ranks.publish(0, 5)
    half = ranks.take(0, 5)
    ranks.seal(half, 0)
    ranks.publish(1, 5)
    ranks.take(1, 5)
    ranks.publish(1, 30)
    ranks.settle()
    ranks.seal(half, 1)
    ranks.settle()
    assert ranks.host.look().find(5) == half
    assert ranks.told() == [("committed", half)]


def test_what_a_rank_left_without_is_given_up_and_told(ranks: Ranks) -> None:
    half = ranks.take(0, 5)
    ranks.seal(half, 0)
    group = ranks.host.agent.trainers.group
    assert group is not None
    request = protocol.Detach(group=group.group, rank=1)
    ranks.host.call(ranks.service.detach(request, ranks.trainer.process.pid))
    # Storage was listed when the attempt began, and is listed again soon, not ten heartbeats later.
    for _ in range(30):
        ranks.settle()
    assert ranks.told() == [("dropped", half)]


def test_the_next_save_is_wanted_about_a_step_before_the_last_one_is_durable(
    tmp_path: Path,
) -> None:
    clock = StepClock()
    with in_process_host(tmp_path, clock=clock) as host:
        host.start_agent()
        trainer = host.attach()
        host.agent.trainers.job.durable = Policies(save=ContinuousCheckpointingPolicy())
        assert host.agent.trainers.group is not None
        seat = host.agent.trainers.group.members[0].seat
        assert host.service is not None
        decider, values = host.agent._scheduler, host.agent.trainers.control.cells

        def step_to(step: int) -> int:
            values[control_block.step_cell(seat)] = step
            decider.tick()
            return values[control_block.TARGET_DURABLE]

        # A step takes ten seconds, and one checkpoint is on its way.
        for step in range(3):
            clock.sleep(10)
            step_to(step)
        host.save(trainer, 2)
        assert host.agent.driver.view.lead.is_saving
        host.agent.metering.save_times.durable_at_secs = None
        assert step_to(2) == control_block.NEVER
        host.agent.metering.save_times.durable_at_secs = clock.monotonic() + 25
        assert step_to(2) == control_block.NEVER
        clock.sleep(14)
        assert step_to(2) == control_block.NEVER
        clock.sleep(2)
        assert step_to(2) == 3
