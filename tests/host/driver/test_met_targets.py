"""Whether ranks have met or missed a target that was set while they went on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.coordination.inputs import TargetWritten, Wish
from holdfast.coordination.messages import TargetKind
from holdfast.format.names import NO_ATTEMPT
from holdfast.host.driver.attached_trainers import (
    AttachedTrainers,
    JobSettings,
    NoticeBoard,
    TrainerGroup,
)
from holdfast.host.wire.control_block import (
    NO_STEP,
    TARGET_DURABLE,
    TARGET_PREEMPTION,
    TARGET_RAM,
    create_cells,
    met_cell,
    met_value,
    reset_seat,
    step_cell,
)
from holdfast.host.wire.group_record import TrainerProcess
from tests.trust.in_process import in_process_host

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
        # Whether it has read the target is not known: it may save it all the same.
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


def test_one_rank_that_missed_it_is_enough(trainers: AttachedTrainers) -> None:
    met = met_value(TARGET, [TARGET_PREEMPTION])
    published(trainers, 0, TARGET, met)
    published(trainers, 1, TARGET)
    assert trainers.look_at_target(TargetKind.PREEMPTION, TARGET).is_missed
    published(trainers, 1, TARGET, met)
    assert not trainers.look_at_target(TargetKind.PREEMPTION, TARGET).is_missed


def test_the_only_rank_meets_it_at_a_later_step_too(tmp_path: Path) -> None:
    alone = attached(tmp_path, 1)
    published(alone, 0, TARGET + 5, met_value(TARGET + 1, [TARGET_DURABLE]))
    assert not alone.look_at_target(TargetKind.DURABLE, TARGET).is_missed
    assert alone.look_at_target(TargetKind.RAM, TARGET).is_missed
    published(alone, 0, TARGET + 5, met_value(TARGET - 1, [TARGET_DURABLE]))
    assert alone.look_at_target(TargetKind.DURABLE, TARGET).is_missed


def test_no_rank_has_met_or_missed_anything_at_first(trainers: AttachedTrainers) -> None:
    published(trainers, 0, TARGET, met_value(TARGET, [TARGET_DURABLE]))
    reset_seat(trainers.control.cells, 3)
    looked = trainers.look_at_target(TargetKind.DURABLE, 0)
    assert (looked.highest, looked.is_missed) == (NO_STEP, False)


def test_an_agent_that_is_late_does_other_work_between_two_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        host.attach()
        trainers, driver = host.agent.trainers, host.agent.driver
        cells, seat = trainers.control.cells, next(iter(trainers.present)).seat
        look, proposed = trainers.look_at_target, list[int]()

        def look_late(kind: TargetKind, step: int) -> TargetWritten:
            proposed.append(step)
            if len(proposed) < 4:
                cells[step_cell(seat)] = step
            return look(kind, step)

        monkeypatch.setattr(trainers, "look_at_target", look_late)
        driver.submit(Wish(TargetKind.DURABLE))
        assert proposed == [0]
        host.settle()
        assert proposed == [0, 1, 2, 3]
        assert cells[TARGET_DURABLE] == 3
