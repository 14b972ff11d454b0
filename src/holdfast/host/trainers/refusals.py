"""Build the errors of refused starts.

If a job does not initialise its framework's processes, each process opens the run as rank 0 of 1.
All but the first are refused, and advice to take the run over would harm the job. See
docs/decisions/0054.
"""

from __future__ import annotations

import psutil

from holdfast.coordination.effects import GroupRefused
from holdfast.coordination.messages import REASON_CHARS_MAX, Refusal
from holdfast.errors import AgentUnavailableError, HoldfastError, RunBusyError, StorageError
from holdfast.host.driver.attached_trainers import TrainerGroup

STARTED_TOGETHER_SECS = 60.0
FORGOTTEN_JOB = (
    "if the program was started twice, stop the other one first, or open with takeover=True to "
    "fence it. If both are processes of one job, each of which opens it as its only rank, call "
    "jax.distributed.initialize() or torch.distributed.init_process_group() in all of them before "
    "the manager is made"
)


def forgotten_ranks(larger_job: str, count: int) -> str:
    """Return what to do about a start of fewer processes than their launcher has started.

    Args:
        larger_job: the launcher, and the rank that it gave the process.
        count: the number of processes that the framework has.
    """
    return (
        f"this process was started by {larger_job}, and its framework has {count}. If the live "
        "ones are others of these, call jax.distributed.initialize() or "
        "torch.distributed.init_process_group() in all of them before the manager is made, or give "
        "each a directory of its own if they are independent trainings. If they are those of "
        "another job, stop it first"
    )


def refusal_error(
    run: str, refused: GroupRefused, live: str, problem: HoldfastError | None
) -> HoldfastError:
    """Return the error for the trainers whose attempt does not begin.

    Args:
        run: the run's directory.
        refused: the coordination's refusal.
        live: the attempt that is in the way, if any, and what to do about it.
        problem: the last storage error, which is returned itself if it is the reason.
    """
    if problem is not None and str(problem)[:REASON_CHARS_MAX] == refused.reason[:REASON_CHARS_MAX]:
        return problem
    match refused.kind:
        case Refusal.BUSY:
            return RunBusyError(f"open {run}: {live}")
        case Refusal.UNRECORDED:
            return RunBusyError(f"open {run}: {refused.reason}")
        case Refusal.UNREACHED:
            return AgentUnavailableError(
                f"open {run}: the attempt did not begin: {refused.reason}; no data was discarded; "
                "check that the agents of those hosts run and reach each other, then start the "
                "job again"
            )
        case Refusal.STORAGE:
            return StorageError(f"open {run}: the attempt did not begin: {refused.reason}")


def is_like_one_job(group: TrainerGroup, other: TrainerGroup) -> bool:
    """Return whether two groups of one process each look like two ranks of one job.

    They do if they started within `STARTED_TOGETHER_SECS` of each other, and run the same command
    or have the same parent.
    """
    if group is other or group.count != 1 or other.count != 1:
        return False
    for member in group.members.values():
        for lived in other.present:
            is_together = abs(member.started - lived.started) <= STARTED_TOGETHER_SECS
            if member.pid != lived.pid and is_together and _is_alike(member.pid, lived.pid):
                return True
    return False


def _is_alike(pid: int, other_pid: int) -> bool:
    try:
        process, other_process = psutil.Process(pid), psutil.Process(other_pid)
        return (
            process.cmdline() == other_process.cmdline() or process.ppid() == other_process.ppid()
        )
    # One of them has ended, so that nothing is known about it any more.
    except psutil.Error:
        return False
