"""Build the errors of refused starts."""

from __future__ import annotations

from holdfast.coordination.effects import GroupRefused
from holdfast.coordination.messages import REASON_CHARS_MAX, Refusal
from holdfast.errors import AgentUnavailableError, HoldfastError, RunBusyError, StorageError


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
        case Refusal.UNREACHED:
            return AgentUnavailableError(
                f"open {run}: the attempt did not begin: {refused.reason}; no data was discarded; "
                "check that the agents of those hosts run and reach each other, then start the "
                "job again"
            )
        case Refusal.STORAGE:
            return StorageError(f"open {run}: the attempt did not begin: {refused.reason}")
