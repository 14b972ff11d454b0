import errno
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest

import holdfast
from holdfast.errors import (
    OutOfSpaceError,
    ProcessLostError,
    SaveFailedError,
    StructureMismatchError,
)
from holdfast.supervise.ends import EndCause, Evidence, cause_of_error, classify
from holdfast.trainer.process.end_report import (
    TrainerEnd,
    TrainerError,
    reported_ends,
    trainer_error,
)


def report(*, preempted: bool = False, finished: bool = False) -> TrainerEnd:
    return TrainerEnd(
        run="run", rank=0, pid=1, last_step=9, is_preempted=preempted, is_finished=finished
    )


TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
CASES = [
    (0, [], [], EndCause.FINISHED),
    (0, [report()], [], EndCause.FINISHED),
    (0, [report(finished=True)], [TERM], EndCause.FINISHED),
    # The last step was saved for the preemption and was also the training's last.
    (0, [report(finished=True, preempted=True)], [TERM], EndCause.FINISHED),
    (0, [report(preempted=True)], [], EndCause.PREEMPTED),
    (0, [report()], [TERM], EndCause.PREEMPTED),
    (0, [], [TERM], EndCause.PREEMPTED),
    (143, [], [TERM], EndCause.PREEMPTED),
    (1, [report(preempted=True), report()], [], EndCause.PREEMPTED),
    # What failed after `finish` did not finish.
    (1, [report(finished=True)], [TERM], EndCause.PREEMPTED),
    (138, [], [USR1], EndCause.PREEMPTED),
    # A program may use this signal for something else.
    (0, [report()], [USR1], EndCause.FINISHED),
    (1, [report()], [USR1], EndCause.ERROR),
    (130, [], [INT], EndCause.STOPPED),
    (1, [], [INT], EndCause.STOPPED),
    (0, [], [INT], EndCause.FINISHED),
    (137, [], [], EndCause.KILLED),
    (138, [], [], EndCause.KILLED),
    (255, [], [], EndCause.ERROR),
    (1, [report()], [], EndCause.ERROR),
]


@pytest.mark.parametrize(("code", "reports", "received", "expected"), CASES)
def test_the_cause_of_an_end(
    code: int, reports: list[TrainerEnd], received: list[int], expected: EndCause
) -> None:
    assert classify(Evidence(code=code, ends=reports, received=received)).cause is expected


@pytest.mark.parametrize(
    ("lost_secs", "lost_ranks", "error_secs", "expected"),
    [
        (99.9, ((1, 51),), None, EndCause.KILLED),
        # Seen late, on a machine that is busy.
        (100.5, ((1, 51),), None, EndCause.KILLED),
        # A rank that is killed once the time of grace is over.
        (130.0, ((1, 51),), None, EndCause.PREEMPTED),
        # It has closed its manager.
        (99.9, (), None, EndCause.PREEMPTED),
        (None, (), 99.9, EndCause.ERROR),
        (None, (), 100.2, EndCause.PREEMPTED),
    ],
)
def test_a_notice_that_follows_a_failure_is_no_preemption(
    lost_secs: float | None,
    lost_ranks: tuple[tuple[int, int], ...],
    error_secs: float | None,
    expected: EndCause,
) -> None:
    # As torchrun does: it ends the other workers by SIGTERM.
    end = msgspec.structs.replace(report(preempted=True), announced_secs=100.0, lost_secs=lost_secs)
    errors = []
    if error_secs is not None:
        error = ValueError("bad batch")
        errors.append(trainer_error(error, rank=1, last_step=9, time_secs=error_secs))
    evidence = Evidence(code=1, ends=[end], errors=errors, lost_ranks=lost_ranks)
    assert classify(evidence).cause is expected


def test_a_save_that_a_lost_rank_had_a_part_in_is_no_failure_of_storage() -> None:
    error = trainer_error(
        SaveFailedError(4, "rank 1 has ended"), rank=0, last_step=4, time_secs=1.0
    )
    evidence = Evidence(code=1, errors=[error], lost_ranks=[(1, 51)])
    assert classify(evidence).cause is EndCause.KILLED
    assert classify(Evidence(code=1, errors=[error])).cause is EndCause.DISK


def test_no_process_was_lost_where_there_is_no_other() -> None:
    error = trainer_error(
        ConnectionResetError("reset by peer"), rank=0, last_step=7, time_secs=1.0, is_alone=True
    )
    end = classify(Evidence(code=1, errors=[error]))
    assert end.cause is EndCause.ERROR
    assert end.reason.startswith("rank 0: ConnectionResetError: reset by peer")
    assert end.repeats_as is not None
    assert (
        classify(Evidence(code=1, errors=[msgspec.structs.replace(error, is_alone=False)])).cause
        is EndCause.LOST
    )


def test_an_error_of_holdfast_is_shown_at_the_programs_line_and_with_the_first_of_its_list(
    tmp_path: Path,
) -> None:
    holdfast.save(tmp_path / "run", {"w": np.zeros(3)})
    with pytest.raises(StructureMismatchError) as raised:
        holdfast.load(tmp_path / "run", like={"w": np.zeros(4)})
    error = reported(raised.value)
    assert error.place.startswith(f"{__file__}:")
    assert ": w: expected array float64[4], found array float64[3]" in error.text


class NaNLossError(Exception):
    pass


class FinanceError(Exception):
    pass


class OutOfMemoryError(RuntimeError):
    """As PyTorch names it."""


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def reported(error: Exception, rank: int = 0, last_step: int | None = 7) -> TrainerError:
    return trainer_error(error, rank=rank, last_step=last_step, time_secs=rank)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("bad batch"), EndCause.ERROR),
        (KeyError("nan"), EndCause.ERROR),
        (FinanceError("Nantes"), EndCause.ERROR),
        (FileNotFoundError(errno.ENOENT, "No such file"), EndCause.ERROR),
        (FloatingPointError("invalid value (nan) encountered in jit(step)"), EndCause.NAN),
        (ValueError("loss is NaN at step 3"), EndCause.NAN),
        (AssertionError("gradient norm is not finite"), EndCause.NAN),
        (NaNLossError("stop"), EndCause.NAN),
        (MemoryError(), EndCause.MEMORY),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate"), EndCause.MEMORY),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"), EndCause.MEMORY),
        (caused_by(RuntimeError("in a loader"), MemoryError()), EndCause.MEMORY),
        (OSError(errno.ENOSPC, "No space left on device"), EndCause.DISK),
        (SaveFailedError(3, "step 3"), EndCause.DISK),
        (OutOfSpaceError("no space left"), EndCause.DISK),
    ],
)
def test_the_class_of_an_exception(error: Exception, expected: EndCause) -> None:
    assert cause_of_error(reported(error)) is expected


CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:31")


def test_an_exception_that_follows_from_another_end_is_no_cause() -> None:
    follows = [reported(CLOSED, rank=0), reported(ProcessLostError("rank 1 ended"), rank=2)]
    own = reported(ValueError("bad"), rank=3)
    ends = {
        EndCause.ERROR: Evidence(code=1, errors=[*follows, own]),
        EndCause.LOST: Evidence(code=1, errors=follows, lost_host="host-b"),
        EndCause.KILLED: Evidence(code=1, errors=follows, lost_ranks=[(1, 77)]),
        EndCause.MEMORY: Evidence(code=1, errors=follows, oom_kills=1),
    }
    for cause, evidence in ends.items():
        assert classify(evidence).cause is cause
    assert classify(Evidence(code=1, errors=follows)).cause is EndCause.LOST
    assert classify(ends[EndCause.ERROR]).repeats_as == ("ValueError ", 7)
    assert classify(ends[EndCause.LOST]).lost_host == "host-b"


def test_a_hang_is_the_cause_of_the_signals_that_end_it_and_a_scheduler_comes_first() -> None:
    hang = {"hang": "no step for 30 s", "hang_step": 4}
    killed = classify(Evidence(code=137, ends=[report(preempted=True)], **hang))
    assert (killed.cause, killed.repeats_as) == (EndCause.HANG, ("hang", 4))
    stopped = classify(Evidence(code=137, received=[INT], **hang))
    assert (stopped.cause, stopped.is_told_to) == (EndCause.HANG, True)
    assert classify(Evidence(code=143, received=[TERM], **hang)).cause is EndCause.PREEMPTED


def test_the_place_of_an_exception_is_the_programs_own_line(tmp_path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import json\ndef step():\n    json.loads('{')\nstep()\n")
    with pytest.raises(ValueError, match="Expecting") as raised:
        exec(compile(program.read_text(), str(program), "exec"), {})
    assert reported(raised.value).place == f"{program}:3"


def test_a_report_that_was_not_written_whole_is_left_out(tmp_path) -> None:
    (tmp_path / "1-a.end.json").write_bytes(b'{"run": "ru')
    assert reported_ends(tmp_path) == []


def test_the_loss_of_another_host_is_waited_for_only_where_it_may_be_the_cause() -> None:
    may_follow = [
        Evidence(code=1),
        Evidence(code=134),
        Evidence(code=1, errors=[reported(CLOSED)]),
    ]
    cannot = [
        Evidence(code=137),
        Evidence(code=0),
        Evidence(code=1, errors=[reported(ValueError("bad"))]),
        Evidence(code=143, received=[TERM]),
    ]
    assert all(classify(evidence).may_follow for evidence in may_follow)
    assert not any(classify(evidence).may_follow for evidence in cannot)
