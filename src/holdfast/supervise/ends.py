"""Classify how the command has ended, from its exit code, its trainers' reports and what was seen.

Pure. A preemption is announced by a signal: to `holdfast run`, which forwards it, or to any trainer
of the job, on whatever host; the trainer's report then says so. An exception that only follows from
the end of another process is no cause of its own. See docs/decisions/0051 and docs/decisions/0057.
"""

from __future__ import annotations

import enum
import errno
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from holdfast.trainer.process.end_report import (
    TrainerEnd,
    TrainerError,
    follows_lost_process,
)

NOTICES = frozenset((signal.SIGUSR1, signal.SIGUSR2))
"""Signals that announce a preemption for some launchers and have another purpose elsewhere."""
NOTICED_SECS = 1.0
"""How long after its end a trainer may see that another one has ended."""
MEMORY_KINDS = frozenset(("MemoryError", "OutOfMemoryError"))
DISK_KINDS = frozenset(("StorageError", "SaveFailedError"))
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_DEVICE_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|CUDA out of memory")
_NAN = re.compile(r"\bnans?\b|\bnon-?finite\b|\bnot finite\b", re.IGNORECASE)
_NAN_CLASS = re.compile(r"(^|[a-z_])(NaN|Nan|NAN)([A-Z_]|$)")
_NAN_KINDS = frozenset(("RuntimeError", "ValueError", "AssertionError", "ArithmeticError"))
"""Exceptions whose message may say that a number is not finite."""


class EndCause(enum.Enum):
    """Why the command has ended. The values are the names of the budgets."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    """It was stopped before its end and must be started again later."""
    STOPPED = "stopped"
    """A forwarded signal that is no preemption, such as Ctrl-C, has ended it."""
    LOST = "lost"
    """Another host, or processes there, were lost."""
    KILLED = "killed"
    """A signal that nobody sent through `holdfast run` has ended a process."""
    MEMORY = "memory"
    """No memory was left, on the host or on a device."""
    NAN = "nan"
    DISK = "disk"
    """Storage was full or failed."""
    HANG = "hang"
    """No step was made for too long, so that `holdfast run` has ended it."""
    ERROR = "error"
    """An exception of the program, or an exit code without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of one end.

    Attributes:
        code: The command's exit code; 128 + N if signal N ended it.
        received: The signals that were forwarded to it.
        ends: The reports of its trainers that have closed their managers.
        errors: The exceptions that its trainers have reported, in the order of their times.
        lost_ranks: The ranks whose processes have ended without a report and are not the command's
            own process, with their process ids.
        lost_host: A host of the job that was lost meanwhile, or whose processes were; empty: none.
        oom_kills: How many processes of this cgroup the kernel has killed for want of memory.
        hang: Why it was ended as one that hangs; empty: it was not.
        hang_step: The step after which it hung; None: none was made.
        stacks: The file with the stacks of that hang; empty: none.
    """

    code: int
    received: Collection[int] = ()
    ends: Sequence[TrainerEnd] = ()
    errors: Sequence[TrainerError] = ()
    lost_ranks: Sequence[tuple[int, int]] = ()
    lost_host: str = ""
    oom_kills: int = 0
    hang: str = ""
    hang_step: int | None = None
    stacks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end of the command.

    Attributes:
        code: Its exit code.
        cause: Its class.
        reason: What is known of it, in words.
        error: The exception that is the cause; None: none is.
        step: The last step before it, if the cause belongs to a step; None: it does not, or there
            was none.
        lost_host: The other host that was lost; empty: none.
        is_told_to: A forwarded signal was to end it.
        stacks: As in `Evidence`.
    """

    code: int
    cause: EndCause
    reason: str
    error: TrainerError | None = None
    step: int | None = None
    lost_host: str = ""
    is_told_to: bool = False
    stacks: str = ""

    @property
    def may_follow(self) -> bool:
        """Whether the loss of another host may be the cause, which is noticed later."""
        if self.cause is EndCause.KILLED:
            # JAX aborts the processes of a job that has lost one.
            return self.code - 128 == signal.SIGABRT
        is_plain = self.cause is EndCause.ERROR and self.error is None
        return is_plain or self.cause is EndCause.LOST

    @property
    def is_refused(self) -> bool:
        """Whether another start has the run, such as a job that this one replaces and that ends.

        A start that has made a step has had a run, and opened it again beside itself.
        """
        is_busy = self.error is not None and "RunBusyError" in self.error.kinds
        return is_busy and self.step is None

    @property
    def repeats_as(self) -> tuple[str, int] | None:
        """What is the same if the same step fails in the same way again; None: nothing is."""
        if self.step is None:
            return None
        if self.cause is EndCause.HANG:
            return "hang", self.step
        if self.error is None or self.cause is EndCause.DISK:
            return None
        return f"{self.error.kinds[0]} {self.error.place}", self.step


def classify(evidence: Evidence) -> End:
    """Return the class of an end, with what is known of it."""
    code, received, ends = evidence.code, evidence.received, evidence.ends
    by_signal = code - 128 if code - 128 in received else 0
    is_told_to = bool(by_signal) or any(number not in NOTICES for number in received)

    def ended(cause: EndCause, reason: str) -> End:
        return End(code=code, cause=cause, reason=reason, is_told_to=is_told_to)

    if code == 0 and any(end.is_finished for end in ends):
        return ended(EndCause.FINISHED, "finished")
    if signal.SIGTERM in received:
        return ended(EndCause.PREEMPTED, "SIGTERM was forwarded")
    if evidence.hang:
        hang = ended(EndCause.HANG, evidence.hang)
        return replace(hang, step=evidence.hang_step, stacks=evidence.stacks)
    if any(end.is_preempted and not _has_failed_before(end, evidence) for end in ends):
        return ended(EndCause.PREEMPTED, "a trainer had a notice")
    if by_signal in NOTICES:
        return ended(EndCause.PREEMPTED, f"{signal_text(by_signal)} was forwarded")
    if code == 0:
        return ended(EndCause.FINISHED, "exit code 0")
    if is_told_to:
        names = [*dict.fromkeys(map(signal_text, received))]
        was = "was" if len(names) == 1 else "were"
        return ended(EndCause.STOPPED, f"{' and '.join(names)} {was} forwarded")
    return _failure(evidence)


def _has_failed_before(end: TrainerEnd, evidence: Evidence) -> bool:
    """Return whether a rank here had failed when a trainer was told that it is preempted.

    torchrun ends the other workers by SIGTERM once one has failed.
    """
    if end.announced_secs is None:
        return False
    limit_secs = end.announced_secs + NOTICED_SECS
    if evidence.lost_ranks and end.lost_secs is not None and end.lost_secs <= limit_secs:
        return True
    return any(error.time_secs <= end.announced_secs for error in _own_errors(evidence))


def _own_errors(evidence: Evidence) -> list[TrainerError]:
    """Return the exceptions that do not only follow from the end of another process.

    A save to which a lost rank had to contribute fails too.
    """
    own = [error for error in evidence.errors if not follows_lost_process(error)]
    if evidence.lost_ranks:
        own = [error for error in own if {*error.kinds} & {*DISK_KINDS} != {"SaveFailedError"}]
    return own


def _failure(evidence: Evidence) -> End:
    """Return the class of an end that nobody has announced."""
    code = evidence.code
    if evidence.oom_kills:
        reason = "out of memory: the kernel has killed a process of this cgroup"
        return End(code=code, cause=EndCause.MEMORY, reason=reason, step=_last_step(evidence))
    error = next(iter(_own_errors(evidence)), None)
    if error is not None:
        place = f" ({error.place})" if error.place else ""
        reason = f"rank {error.rank}: {error.text}{place}"
        cause = cause_of_error(error)
        return End(code=code, cause=cause, reason=reason, error=error, step=error.last_step)
    if evidence.lost_host:
        reason = f"processes of host {evidence.lost_host} were lost"
        host = evidence.lost_host
        return End(code=code, cause=EndCause.LOST, reason=reason, lost_host=host)
    if code - 128 in signal.valid_signals():
        return End(code=code, cause=EndCause.KILLED, reason=f"ended by {signal_text(code - 128)}")
    if evidence.lost_ranks:
        rank, pid = evidence.lost_ranks[0]
        reason = f"the process of rank {rank} ({pid}) has ended without an exception"
        return End(code=code, cause=EndCause.KILLED, reason=reason)
    if evidence.errors:
        reason = f"a process elsewhere was lost ({evidence.errors[0].text})"
        return End(code=code, cause=EndCause.LOST, reason=reason)
    return End(code=code, cause=EndCause.ERROR, reason="no exception was reported")


def cause_of_error(error: TrainerError) -> EndCause:
    """Return the class of an exception."""
    kinds = set(error.kinds)
    if kinds & MEMORY_KINDS or _DEVICE_MEMORY.search(error.text):
        return EndCause.MEMORY
    if kinds & DISK_KINDS or error.errno in FULL_DISK:
        return EndCause.DISK
    message = error.text.partition(": ")[2]
    is_of_nan = _NAN_CLASS.search(error.kinds[0]) or (kinds & _NAN_KINDS and _NAN.search(message))
    if "FloatingPointError" in kinds or is_of_nan:
        return EndCause.NAN
    return EndCause.ERROR


def _last_step(evidence: Evidence) -> int | None:
    steps = [error.last_step for error in evidence.errors if error.last_step is not None]
    return min(steps, default=None)


def signal_text(number: int) -> str:
    """Return the name of a signal."""
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
