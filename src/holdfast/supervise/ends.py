"""Classify how the command has ended, from its exit code, its trainers' reports and the signals.

Pure. A preemption is announced by a signal: to `holdfast run`, which forwards it, or to any trainer
of the job, on whatever host; the trainer's report then says so. See
docs/decisions/0051.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection, Sequence

from holdfast.trainer.process.end_report import TrainerEnd

NOTICES = frozenset((signal.SIGUSR1, signal.SIGUSR2))
"""Signals that announce a preemption for some launchers and have another purpose elsewhere."""


class EndCause(enum.Enum):
    """Why the command has ended."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    """It was stopped before its end and must be started again later."""
    STOPPED = "stopped"
    """A forwarded signal that is no preemption, such as Ctrl-C, has ended it."""
    FAILED = "failed"


def cause_of(code: int, reports: Sequence[TrainerEnd], received: Collection[int]) -> EndCause:
    """Return why the command has ended.

    Args:
        code: Its exit code; 128 + N if signal N ended it.
        reports: The reports of its trainers that have closed their managers.
        received: The signals that were forwarded to it.
    """
    if code == 0 and any(report.is_finished for report in reports):
        return EndCause.FINISHED
    is_announced = signal.SIGTERM in received or any(report.is_preempted for report in reports)
    if is_announced or code - 128 in NOTICES.intersection(received):
        return EndCause.PREEMPTED
    if code == 0:
        return EndCause.FINISHED
    return EndCause.STOPPED if received else EndCause.FAILED
