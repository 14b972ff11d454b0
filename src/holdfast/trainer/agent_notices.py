"""Apply the notices of this host's agent, and report to an agent what it does not know.

Called on the watcher's thread; `report_again` on the thread that has joined a new agent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from holdfast.errors import FencedError
from holdfast.format.names import CheckpointId
from holdfast.host.wire import protocol
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.restore.restore_votes import Votes
from holdfast.trainer.save.progress import STOPPED_BY, Progress
from holdfast.trainer.save.replica_checks import ReplicaChecks
from holdfast.trainer.save.saver import Saver
from holdfast.trainer.save.user_policies import UserPolicyThread

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentNotices:
    """What the agent's notices act on. `show` logs a line about the whole job."""

    session: AgentSession
    progress: Progress
    votes: Votes
    saver: Saver
    checks: ReplicaChecks
    own: UserPolicyThread | None
    show: Callable[[str], None]

    def on_notice(self, notice: protocol.Notice) -> None:
        """Apply one notice."""
        group = self.session.group
        if self.own is not None:
            self.own.on_notice(notice)
        self.votes.on_notice(notice, group)
        if notice.kind == "lost" or (notice.kind == "fenced" and notice.data == group):
            self.progress.stop_saving(STOPPED_BY[notice.kind](notice.reason))
        elif notice.kind == "warning":
            log.warning("agent: %s", notice.reason)
        elif notice.kind == "information":
            self.show(f"agent: {notice.reason}")
        elif notice.kind == "unknown" and notice.id is not None:
            self._report_unknown(notice.id)
        else:
            if notice.kind in ("committed", "protected") and notice.id is not None:
                # Before the wait for the save ends, so that `close` compares the last one too.
                self.checks.ended(notice.id, is_durable=notice.kind == "committed")
            self.progress.notice(notice)
            if notice.id is not None:
                self.saver.get_ready()

    def report_again(self) -> None:
        """Report each sealed part whose save has not ended to a new agent.

        The agent answers with the end of the save, or accepts the part if RAM still holds it. If it
        does neither, the save has failed.
        """
        self.progress.forget_preservation()
        for sealed in self.progress.sealed_again():
            if self._report(sealed):
                self.progress.reported(sealed.id)

    def _report_unknown(self, checkpoint: CheckpointId) -> None:
        """Report a part that is unknown to the agent, if its save has not ended meanwhile."""
        sealed = self.progress.sealed_part(checkpoint)
        if sealed is None:
            # It was for RAM alone, and an earlier agent recycled it: a newer checkpoint exists.
            self.progress.finish(checkpoint)
        elif not self._report(sealed):
            reason = "it is unknown to the agent, and a newer attempt has begun"
            self.progress.fail_save(checkpoint, reason)

    def _report(self, sealed: protocol.Sealed) -> bool:
        """Report one part again and return whether it belongs to the run's current attempt."""
        message = msgspec.structs.replace(sealed, again=True)
        try:
            self.session.call("sealed", message, protocol.Empty)
        except FencedError:
            return False
        return True
