"""What the reports and the agents' status say of one start of the command."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.host.wire.protocol import AgentStatus, HeldStatus
from holdfast.supervise.attempt_watch import AttemptWatch, CheckpointProgress
from holdfast.trainer.process.end_report import TrainerEnd, TrainerOpened, trainer_error


def opened(rank: int, pid: int, time_secs: float, attempt: int = 1) -> TrainerOpened:
    return TrainerOpened(
        run="run",
        run_id="r",
        host="host-a",
        attempt=attempt,
        rank=rank,
        pid=pid,
        time_secs=time_secs,
    )


def write(folder: Path, report: msgspec.Struct, kind: str, pid: int, number: int = 0) -> None:
    content = msgspec.json.decode(msgspec.json.encode(report)) | {"pid": pid}
    (folder / f"{pid}-{number}.{kind}.json").write_bytes(msgspec.json.encode(content))


def error(folder: Path, pid: int, time_secs: float, rank: int = 0) -> None:
    report = trainer_error(ValueError("bad"), rank=rank, last_step=3, time_secs=time_secs)
    write(folder, report, "error", pid)


def test_a_rank_without_a_report_is_lost_unless_it_is_the_command_itself(tmp_path: Path) -> None:
    watch = AttemptWatch(tmp_path)
    for rank, pid in enumerate((50, 51, 52)):
        write(tmp_path, opened(rank, pid, 1.0), "open", pid)
    end = TrainerEnd(run="run", rank=1, pid=51, last_step=3, is_preempted=False, is_finished=False)
    write(tmp_path, end, "end", 51)
    evidence = watch.evidence(1, [], 50)
    assert evidence.lost_ranks == [(2, 52)]
    assert [report.rank for report in evidence.ends] == [1]


def test_reports_before_a_later_start_of_the_same_rank_are_no_cause(tmp_path: Path) -> None:
    watch = AttemptWatch(tmp_path)
    # A launcher has started rank 0 again, and rank 1 has opened its manager again.
    write(tmp_path, opened(0, 50, 1.0), "open", 50)
    error(tmp_path, 50, 2.0)
    write(tmp_path, opened(0, 60, 3.0), "open", 60)
    write(tmp_path, opened(1, 70, 1.0), "open", 70)
    error(tmp_path, 70, 2.0, rank=1)
    write(tmp_path, opened(1, 70, 3.0), "open", 70, number=1)
    assert not watch.evidence(1, [], 9).errors
    error(tmp_path, 60, 4.0)
    # One that could not open its manager.
    error(tmp_path, 80, 5.0)
    assert [report.pid for report in watch.evidence(1, [], 9).errors] == [60, 80]


def status(*held: tuple[int, int], complete: bool = True) -> AgentStatus:
    checkpoints = tuple(
        HeldStatus(
            step=step,
            attempt=attempt,
            attempt_token="t",
            complete=complete,
            parts_in_ram=1,
            part_count=1,
            committed=False,
            durable_due=False,
            failed=None,
        )
        for attempt, step in held
    )
    return AgentStatus(
        run="run",
        run_id="r",
        host="host-a",
        pid=1,
        attempt=1,
        folder="",
        ram_bytes=0,
        trainers=(),
        held=checkpoints,
        pending=0,
        leaves_in_secs=None,
    )


def test_progress_is_a_newer_complete_checkpoint_of_the_same_start() -> None:
    progress = CheckpointProgress()
    progress.note([], [])
    assert progress.take() is None
    # That of an earlier command is no progress of this one.
    progress.note([opened(0, 50, 1.0, attempt=4)], [status((3, 7))])
    assert progress.take() is False
    progress.note([opened(0, 51, 2.0, attempt=5)], [status((3, 7), (5, 8), complete=False)])
    assert progress.take() is False
    progress.note([opened(0, 52, 3.0, attempt=6)], [status((3, 7), (6, 8))])
    assert progress.take() is True
    # The same step again, and a start that opens nothing.
    progress.note([opened(0, 53, 4.0, attempt=7)], [status((7, 8))])
    assert progress.take() is False
    progress.note([], [status((7, 8))])
    assert progress.take() is False
