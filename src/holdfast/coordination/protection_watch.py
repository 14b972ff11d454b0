"""Find out that nothing has been protected for a while although saves wait for it.

The leader of an attempt owns the watch. It reports once, until a checkpoint is protected again.
"""

from __future__ import annotations

from holdfast.coordination.checkpoint_table import CheckpointTable
from holdfast.coordination.effects import ProtectionLate
from holdfast.coordination.settings import Settings
from holdfast.coordination.turn import Turn


class ProtectionWatch:
    """The watch of one leader, which checks it every half heartbeat."""

    def __init__(self, settings: Settings, table: CheckpointTable) -> None:
        self._settings = settings
        self._table = table
        self._since_secs: float | None = None
        self._has_reported = False

    def protected(self) -> None:
        """Note that a checkpoint of the attempt is protected or committed."""
        self._since_secs, self._has_reported = None, False

    def check(self, turn: Turn) -> None:
        """Report saves of the attempt that have waited for `unprotected_secs`."""
        waiting = [
            entry.id.step
            for entry in self._table.entries.values()
            if entry.id.attempt == self._table.attempt
            and not (entry.was_protected or entry.is_committed or entry.dropped or entry.failure)
        ]
        if not waiting:
            self._since_secs = None
        elif self._since_secs is None:
            self._since_secs = turn.now_secs
        elif not self._has_reported:
            waited_secs = turn.now_secs - self._since_secs
            if waited_secs >= self._settings.unprotected_secs:
                self._has_reported = True
                turn.act(ProtectionLate(min(waiting), max(waiting), waited_secs))
