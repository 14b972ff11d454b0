import signal

import pytest

from holdfast.supervise.ends import EndCause, cause_of
from holdfast.trainer.process.end_report import TrainerEnd, reported_ends


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
    (130, [], [INT], EndCause.STOPPED),
    (1, [], [INT], EndCause.STOPPED),
    (0, [], [INT], EndCause.FINISHED),
    (137, [], [], EndCause.FAILED),
    (138, [], [], EndCause.FAILED),
    (1, [report()], [], EndCause.FAILED),
]


@pytest.mark.parametrize(("code", "reports", "received", "expected"), CASES)
def test_the_cause_of_an_end(
    code: int, reports: list[TrainerEnd], received: list[int], expected: EndCause
) -> None:
    assert cause_of(code, reports, received) is expected


def test_a_report_that_was_not_written_whole_is_left_out(tmp_path) -> None:
    (tmp_path / "1-a.json").write_bytes(b'{"run": "ru')
    assert [*reported_ends(tmp_path)] == []
