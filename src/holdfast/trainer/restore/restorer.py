"""Restore a state for the training thread, together with the other ranks; nothing is changed."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.adapt.contract import Framework, RestoreRequest
from holdfast.clock import Clock
from holdfast.engine.reading.view import newest_first
from holdfast.trainer.opening.run_views import RunViews
from holdfast.trainer.restore.restore_votes import Votes
from holdfast.trainer.restore.restoring import (
    OnBegun,
    RestoredState,
    restore_newest,
    restore_step,
)


@dataclass(frozen=True, slots=True)
class Restorer:
    """Restore states in one process of a job. Owned by the training thread."""

    framework: Framework
    votes: Votes
    views: RunViews
    clock: Clock

    def read(
        self, step: int | None, request: RestoreRequest, on_begun: OnBegun
    ) -> RestoredState | None:
        """Restore the checkpoint of `step`, or the newest if `step` is None.

        Every rank must call it, with its saves sealed.

        Returns:
            The state and its report; None if the run has no checkpoint.

        Raises:
            HoldfastError: As `restore_step` and `restore_newest`.
        """
        framework, votes, views = self.framework, self.votes, self.views
        with votes.watching():
            if step is not None:
                return restore_step(
                    views.load, step, framework, request, votes, self.clock, on_begun
                )
            look = newest_first(views.load_newest, views.load)
            return restore_newest(look, framework, request, votes, self.clock, on_begun)
