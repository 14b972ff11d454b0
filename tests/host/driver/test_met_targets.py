"""Whether ranks have met or missed a target that was set while they went on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.coordination.inputs import TargetWritten, Tick, Wish
from holdfast.coordination.messages import TargetKind
from holdfast.format.names import NO_ATTEMPT
from holdfast.host.driver.attached_trainers import (
    AttachedTrainers,
    JobSettings,
    NoticeBoard,
    TrainerGroup,
)
from holdfast.host.wire.control_block import (
    NEVER,
    NO_STEP,
    TARGET_DURABLE,
    TARGET_PREEMPTION,
    TARGET_RAM,
    create_cells,
    decided_cell,
    met_cell,
    met_value,
    reset_seat,
    step_cell,
)
from holdfast.host.wire.group_record import TrainerProcess
from tests.trust.in_process import InProcessHost, in_process_host

TARGET = 24


def attached(tmp_path: Path, count: int) -> AttachedTrainers:
    meter: Any = None
    job = JobSettings(linger_secs=0.0)
    made = AttachedTrainers(create_cells(tmp_path / "words"), NoticeBoard(), meter, job)
    ranks = range(count)
    members = {r: TrainerProcess(rank=r, seat=r + 3, pid=10 + r, started=0.0) for r in ranks}
    made.group = TrainerGroup("group", NO_ATTEMPT, count, "host", members=members)
    return made


@pytest.fixture
def trainers(tmp_path: Path) -> AttachedTrainers:
    return attached(tmp_path, 2)


def published(trainers: AttachedTrainers, rank: int, step: int, met: int = 0) -> None:
    cells = trainers.control.cells
    cells[step_cell(rank + 3)], cells[met_cell(rank + 3)] = step, met


@pytest.mark.parametrize(
    ("step", "met", "is_missed"),
    [
        # It will read the target.
        (TARGET - 1, 0, False),
        (TARGET, 0, True),
        (TARGET, met_value(TARGET, [TARGET_DURABLE]), False),
        (TARGET, met_value(TARGET, [TARGET_RAM, TARGET_DURABLE]), False),
        # The training went on while the agent did not.
        (TARGET + 14, met_value(TARGET, [TARGET_DURABLE]), False),
        # It saved that step for another reason, or another step for this one.
        (TARGET, met_value(TARGET, [TARGET_RAM, TARGET_PREEMPTION]), True),
        (TARGET, met_value(TARGET, []), True),
        (TARGET + 1, met_value(TARGET + 1, [TARGET_DURABLE]), True),
        (TARGET, met_value(TARGET - 1, [TARGET_DURABLE]), True),
    ],
)
def test_a_target_is_missed_by_a_rank_beyond_it_that_did_not_save_it(
    trainers: AttachedTrainers, step: int, met: int, is_missed: bool
) -> None:
    published(trainers, 0, TARGET - 3)
    published(trainers, 1, step, met)
    looked = trainers.look_at_target(TargetKind.DURABLE, TARGET)
    assert (looked.kind, looked.step) == (TargetKind.DURABLE, TARGET)
    assert looked.is_missed is is_missed
    assert looked.highest == max(step, TARGET - 3)


@pytest.mark.parametrize(
    ("step", "decided", "is_deciding"),
    [
        (TARGET - 1, TARGET - 2, False),
        (TARGET, TARGET - 1, True),
        (TARGET, TARGET, False),
        # The next step is none of this target's.
        (TARGET + 1, TARGET, False),
        # It saves or skips many steps in a row elsewhere.
        (TARGET + 9, TARGET - 1, True),
    ],
)
def test_a_rank_that_has_come_to_a_target_decides_first(
    trainers: AttachedTrainers, step: int, decided: int, is_deciding: bool
) -> None:
    published(trainers, 0, TARGET - 3)
    published(trainers, 1, step)
    trainers.control.cells[decided_cell(4)] = decided
    assert trainers.is_deciding(TARGET) is is_deciding


def test_one_rank_that_missed_it_is_enough(trainers: AttachedTrainers) -> None:
    met = met_value(TARGET, [TARGET_PREEMPTION])
    published(trainers, 0, TARGET, met)
    published(trainers, 1, TARGET)
    assert trainers.look_at_target(TargetKind.PREEMPTION, TARGET).is_missed
    published(trainers, 1, TARGET, met)
    assert not trainers.look_at_target(TargetKind.PREEMPTION, TARGET).is_missed


@pytest.mark.parametrize(
    ("step", "met", "read_from"),
    [
        (TARGET - 1, 0, TARGET),
        (TARGET, met_value(TARGET, [TARGET_DURABLE]), TARGET),
        (TARGET + 5, met_value(TARGET + 1, [TARGET_DURABLE]), TARGET),
        # It may have read the target, but its next step is the first one that certainly does.
        (TARGET, 0, TARGET + 1),
        (TARGET + 5, met_value(TARGET + 5, [TARGET_RAM]), TARGET + 6),
        (TARGET + 5, met_value(TARGET - 1, [TARGET_DURABLE]), TARGET + 6),
    ],
)
def test_the_only_rank_misses_none_and_saves_it_at_a_later_step(
    tmp_path: Path, step: int, met: int, read_from: int
) -> None:
    alone = attached(tmp_path, 1)
    published(alone, 0, step, met)
    looked = alone.look_at_target(TargetKind.DURABLE, TARGET)
    assert looked == TargetWritten(TargetKind.DURABLE, TARGET, step, False, read_from)


def test_no_rank_has_met_or_missed_anything_at_first(trainers: AttachedTrainers) -> None:
    published(trainers, 0, TARGET, met_value(TARGET, [TARGET_DURABLE]))
    reset_seat(trainers.control.cells, 3)
    looked = trainers.look_at_target(TargetKind.DURABLE, 0)
    assert (looked.highest, looked.is_missed) == (NO_STEP, False)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[InProcessHost]:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        yield host


class Looks:
    """The agent's looks at its targets; at each one the ranks have come to some step."""

    def __init__(self, host: InProcessHost, monkeypatch: pytest.MonkeyPatch) -> None:
        trainers = host.agent.trainers
        self.cells, self.at, self.steps = trainers.control.cells, list[int](), list[int]()
        self.decides = True
        self._seats = [member.seat for member in trainers.present]
        self._look = trainers.look_at_target
        monkeypatch.setattr(trainers, "look_at_target", self._look_late)

    def publish(self, step: int, met: int = 0, *, decides: bool = True) -> None:
        for seat in self._seats:
            self.cells[step_cell(seat)], self.cells[met_cell(seat)] = step, met
            if decides:
                self.cells[decided_cell(seat)] = step

    def _look_late(self, kind: TargetKind, step: int) -> TargetWritten:
        self.at.append(step)
        if self.steps:
            self.publish(self.steps.pop(0), decides=self.decides)
        return self._look(kind, step)


def test_a_late_agent_does_other_work_between_two_targets(
    host: InProcessHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.attach(count=2)
    looks = Looks(host, monkeypatch)
    looks.steps = [0, 1, 9, 9, 9]
    host.agent.driver.submit(Wish(TargetKind.DURABLE))
    assert looks.at == [0]
    host.settle()
    assert looks.at == [0, 0, 5, 5, 22]
    assert looks.cells[TARGET_DURABLE] == 22


def test_ranks_that_have_just_read_the_target_have_not_missed_it(
    host: InProcessHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.attach(count=2)
    looks = Looks(host, monkeypatch)
    looks.steps = [0]
    host.agent.driver.submit(Wish(TargetKind.DURABLE))
    looks.publish(0, met_value(0, [TARGET_DURABLE]))
    host.settle()
    assert looks.at == [0, 0]
    assert looks.cells[TARGET_DURABLE] == 0


@pytest.mark.parametrize("is_met", [True, False])
def test_ranks_that_are_held_up_before_they_decide_are_awaited(
    host: InProcessHost, monkeypatch: pytest.MonkeyPatch, is_met: bool
) -> None:
    host.attach(count=2)
    looks = Looks(host, monkeypatch)
    looks.steps, looks.decides = [0], False
    trainers, asked = host.agent.trainers, list[int]()
    is_deciding = trainers.is_deciding

    def decide_at_last(step: int) -> bool:
        asked.append(step)
        if len(asked) == 3:
            looks.publish(0, met_value(0, [TARGET_DURABLE]) if is_met else 0)
        return is_deciding(step)

    monkeypatch.setattr(trainers, "is_deciding", decide_at_last)
    host.agent.driver.submit(Wish(TargetKind.DURABLE))
    host.settle()
    assert asked == [0, 0, 0]
    assert looks.at == ([0, 0] if is_met else [0, 0, 3])
    assert looks.cells[TARGET_DURABLE] == looks.at[-1]


def test_a_target_stays_until_the_only_rank_has_read_it(
    host: InProcessHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.attach()
    looks = Looks(host, monkeypatch)
    looks.steps = [7]
    host.agent.driver.submit(Wish(TargetKind.DURABLE))
    assert looks.at == [0]
    for step in (7, 8, 9):
        assert looks.cells[TARGET_DURABLE] == 0
        looks.publish(step)
        host.agent.driver.submit(Tick())
    assert looks.cells[TARGET_DURABLE] == NEVER
