"""Follow where the run stands, check the order of its steps, and move it to another checkpoint.

Invariant: only `go_on_from`, `start_again` and `branch_at` move the run; the later checkpoints then
become an abandoned branch. See docs/decisions/0021.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from holdfast.errors import StepExistsError
from holdfast.host.wire.control_block import NO_STEP
from holdfast.observe.events.schema import SHOWN_MAX, StateRead, StateRestored
from holdfast.trainer.arguments import raise_step_order
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.opening.run_views import RunViews
from holdfast.trainer.restore.restoring import RestoredState
from holdfast.trainer.save.progress import Progress
from holdfast.trainer.save.save_schedule import SaveSchedule
from holdfast.trainer.save.saver import Saver

SETTLE_SECS = 600.0
"""How long a restore waits until the saves in progress have ended."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of one process in its run. Owned by the training thread."""

    session: AgentSession
    steps: SaveSchedule
    progress: Progress
    saver: Saver
    views: RunViews

    def note_read(self, restored: RestoredState) -> None:
        """Record a restore that does not move the run."""
        self.steps.read = restored.id.step
        self._report(StateRead, restored)

    def go_on_from(self, restored: RestoredState, by: Literal["resume", "rewind"]) -> None:
        """Move the run to the restored checkpoint: a new attempt, unless it is the newest one.

        A step that was saved after it and was deleted, or failed, needs a new attempt as well:
        within an attempt a step names one checkpoint only.
        """
        checkpoint = restored.id
        # Published first, so that targets that the agent sets from now on are above this step.
        self.session.place.publish_position(checkpoint.step)
        self.saver.reuse_nothing()
        if not restored.is_newest or self.steps.has_accepted_after(checkpoint.step):
            self.session.branch(checkpoint)
        # Last, because an exception before this must leave the training's position unchanged.
        self.steps.went_back(checkpoint.step)
        self._report(partial(StateRestored, by=by), restored)

    def start_again(self) -> None:
        """Set the position before the first step: the run has no checkpoint to continue from."""
        self.session.place.publish_position(NO_STEP)
        self.saver.reuse_nothing()
        if self.steps.has_accepted_after(NO_STEP):
            self.session.branch(None)
        self.steps.went_back(NO_STEP)

    def check_order(self, step: int, *, force: bool) -> int:
        """Check that `step` may be saved now; with `force`, begin a branch if that is needed.

        Returns:
            The step.

        Raises:
            StepExistsError: The step is already saved.
            StepOrderError: The step is before the run's last one, also with `force`.
        """
        steps = self.steps
        if step > steps.last:
            return step
        if steps.is_asked_again(step, self.progress.raised_at):
            # The previous call raised the failure of an earlier save, and the caller repeats it.
            return step
        saved = {c.step for c in self.views.load().timeline}
        newest = self.newest_step()
        # The checkpoint that the run continues from may have been deleted since.
        if force and step == max(newest, steps.floor):
            self.branch_at(step)
            return step
        # After a restore that did not move the run, an overwrite is probably not intended, so the
        # message does not propose it.
        is_overwrite_unlikely = steps.read is not None and step != steps.last
        if force or is_overwrite_unlikely or not (step in saved or step == newest):
            raise_step_order("save", step, max(steps.last, newest), steps.read)
        hint = ", or pass force=True to overwrite it" if step == newest else ""
        raise StepExistsError(f"save step {step}: it is already saved; save a later one{hint}")

    def newest_step(self) -> int:
        """Return the newest step that is saved, or whose save was accepted; -1 without one.

        Saving an older one again would abandon this one.
        """
        steps = {c.step for c in self.views.load().timeline}
        return max(steps | self.steps.accepted, default=-1)

    def branch_at(self, step: int) -> None:
        """Begin a branch of the run in which `step` can be saved again."""
        self.settle()
        origin = max((c for c in self.views.load().timeline if c.step <= step), default=None)
        self.session.branch(origin)
        self.steps.went_back(step)

    def settle(self) -> None:
        """Wait until the saves in progress have ended, so that a restore finds them."""
        self.session.finish_branch()
        if not self.progress.wait_finished(SETTLE_SECS):
            log.warning(
                "not all saves in progress have ended: %s", self.progress.newest_parts_text()
            )

    def _report(
        self, kind: Callable[..., StateRead | StateRestored], restored: RestoredState
    ) -> None:
        report = restored.report
        self.session.report_event(
            kind(
                step=report.step,
                attempt=report.attempt,
                rank=self.session.rank,
                sources=report.sources,
                secs=report.seconds,
                skipped=report.skipped[:SHOWN_MAX],
                passed_over=report.passed_over[:SHOWN_MAX],
            )
        )
