"""Reports of sealed parts that are repeated, so that each accepted save comes to an end.

The agent answers a repeated report with how the save ended, or takes the part into its care if RAM
still holds it; where it does not, the save has failed.
"""

from __future__ import annotations

import msgspec

from holdfast.agent import protocol
from holdfast.errors import FencedError
from holdfast.format.names import CheckpointId
from holdfast.manager.agent_session import AgentSession
from holdfast.manager.progress import Progress


def report_all(session: AgentSession, progress: Progress) -> None:
    """Report to a new agent each part that is sealed and whose save has not ended."""
    for sealed in progress.sealed_again():
        if _report(session, sealed):
            progress.reported(CheckpointId(*sealed.id))


def report_unknown(session: AgentSession, progress: Progress, checkpoint: CheckpointId) -> None:
    """Report a part that the agent does not know any more, if its save has not ended meanwhile."""
    sealed = progress.sealed_part(checkpoint)
    if sealed is None:
        # It was for RAM alone, which was recycled by an agent that is gone: a newer one is there.
        progress.finish(checkpoint)
    elif not _report(session, sealed):
        progress.fail(checkpoint, "the agent does not know it any more; a newer attempt has begun")


def _report(session: AgentSession, sealed: protocol.Sealed) -> bool:
    """Report one part again; whether it is of the run's present attempt."""
    try:
        session.call("sealed", msgspec.structs.replace(sealed, again=True), protocol.Empty)
    except FencedError:
        return False
    return True
