"""Repeat reports of sealed parts to the agent, so that each accepted save ends.

The agent answers a repeated report with the end of the save, or accepts the part if RAM still holds
it. If it does neither, the save has failed.
"""

from __future__ import annotations

import msgspec

from holdfast.agent import protocol
from holdfast.errors import FencedError
from holdfast.format.names import CheckpointId
from holdfast.manager.agent_session import AgentSession
from holdfast.manager.progress import Progress


def report_all(session: AgentSession, progress: Progress) -> None:
    """Report each sealed part whose save has not ended to a new agent."""
    for sealed in progress.sealed_again():
        if _report(session, sealed):
            progress.reported(CheckpointId(*sealed.id))


def report_unknown(session: AgentSession, progress: Progress, checkpoint: CheckpointId) -> None:
    """Report a part that is unknown to the agent, if its save has not ended meanwhile."""
    sealed = progress.sealed_part(checkpoint)
    if sealed is None:
        # It was for RAM alone, and an earlier agent recycled it: a newer checkpoint exists.
        progress.finish(checkpoint)
    elif not _report(session, sealed):
        progress.fail(checkpoint, "it is unknown to the agent, and a newer attempt has begun")


def _report(session: AgentSession, sealed: protocol.Sealed) -> bool:
    """Report one part again and return whether it belongs to the run's current attempt."""
    try:
        session.call("sealed", msgspec.structs.replace(sealed, again=True), protocol.Empty)
    except FencedError:
        return False
    return True
