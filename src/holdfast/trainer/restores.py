"""Read a state of the run for a manager: the newest one that can be read, or that of a step."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.adapt.contract import RestoreRequest
from holdfast.engine.reading.restore import RestoreTally
from holdfast.engine.reading.view import newest_first
from holdfast.format.names import STEP_MAX
from holdfast.trainer.position import Position
from holdfast.trainer.process.progress_bar import progress_bar, restoring_state
from holdfast.trainer.restore.restore_votes import Votes
from holdfast.trainer.restore.restoring import RestoredState, Restorer
from holdfast.trainer.save.overhead import OverheadMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class Restores:
    """Make one process's restores. Owned by the training thread."""

    position: Position
    votes: Votes
    restorer: Restorer
    meter: OverheadMeter | None
    is_first: bool
    """Whether this process shows the progress."""

    def read(
        self, step: int | None, request: RestoreRequest, *, step_max: int = STEP_MAX
    ) -> RestoredState | None:
        """Read the state of `step`, or of the newest checkpoint; the run is not moved.

        Args:
            step: The step; None: the newest one up to `step_max`.
            request: What of it to read.
            step_max: The last step whose checkpoint is read.

        Returns:
            The state; None if the run has no such checkpoint.

        Raises:
            HoldfastError: As `CheckpointManager.restore`.
        """
        self.position.settle()
        views, tallies = self.position.views, list[RestoreTally]()
        with (
            self.votes.watching(),
            progress_bar("restoring", lambda: restoring_state(tallies), is_on=self.is_first),
        ):
            restored: RestoredState | None
            if step is not None:
                restored = self.restorer.step(views.load, step, request, tallies.append)
            else:
                look = newest_first(views.load_newest, views.load)
                if step_max < STEP_MAX:
                    # The listing of the newest ones may lack what is older.
                    look = views.load
                restored = self.restorer.newest(look, request, tallies.append, step_max=step_max)
        if self.meter is not None:
            self.meter.paused()
        return restored
