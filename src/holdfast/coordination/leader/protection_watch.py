"""Whether saves of the attempt become protected: while replicas are on their way, and too late."""

from __future__ import annotations

from holdfast.coordination.effects import ProtectionLate
from holdfast.coordination.leader.checkpoint_table import CheckpointTable
from holdfast.coordination.settings import Settings
from holdfast.coordination.turn import Turn
from holdfast.format.names import CheckpointId


class ProtectionWatch:
    """Watches the saves of one leader's attempt.

    Attributes:
        is_replicating: replicas of the newest complete checkpoint are on their way. After
            `lost_secs` they no longer count, so that a peer that cannot be reached does not delay
            the next checkpoint for longer.
    """

    def __init__(self, settings: Settings, table: CheckpointTable) -> None:
        self._settings = settings
        self._table = table
        self.is_replicating = False
        self._replicating: CheckpointId | None = None
        self._replicating_since_secs = 0.0
        self._unprotected_since_secs: float | None = None
        self._has_reported = False

    def protected(self) -> None:
        """Note that a checkpoint of the attempt is protected or committed."""
        self._unprotected_since_secs, self._has_reported = None, False

    def check_replicas(self, turn: Turn) -> None:
        """Update whether replicas are on their way."""
        newest = self._table.newest_complete()
        exposed = None
        if (
            newest is not None
            and newest.id.attempt == self._table.attempt
            and self._table.required > 0
            and newest.id != self._table.floor
            and not newest.was_protected
        ):
            exposed = newest.id
        if exposed != self._replicating:
            self._replicating, self._replicating_since_secs = exposed, turn.now_secs
        waited_secs = turn.now_secs - self._replicating_since_secs
        self.is_replicating = exposed is not None and waited_secs < self._settings.lost_secs

    def check_lateness(self, turn: Turn) -> None:
        """Report, once per outage, saves that have waited for `unprotected_secs`."""
        waiting = [
            entry.id.step
            for entry in self._table.entries.values()
            if entry.id.attempt == self._table.attempt
            and not (entry.was_protected or entry.is_committed or entry.dropped or entry.failure)
        ]
        if not waiting:
            self._unprotected_since_secs = None
        elif self._unprotected_since_secs is None:
            self._unprotected_since_secs = turn.now_secs
        elif not self._has_reported:
            waited_secs = turn.now_secs - self._unprotected_since_secs
            if waited_secs >= self._settings.unprotected_secs:
                self._has_reported = True
                turn.act(ProtectionLate(min(waiting), max(waiting), waited_secs))
