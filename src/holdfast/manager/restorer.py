"""Reads checkpoints for the training thread, and moves the run back to one of them.

Reading changes nothing of the run: the next save goes on as if it had not been. Only `go_on_from`
moves the run, and later checkpoints become an abandoned branch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.adapt.contract import Framework, RestoreRequest
from holdfast.clock import Clock
from holdfast.engine.reading.view import View
from holdfast.errors import StepExistsError
from holdfast.manager.agent_session import AgentSession
from holdfast.manager.arguments import raise_step_order
from holdfast.manager.overhead import OverheadMeter
from holdfast.manager.progress import Progress
from holdfast.manager.restore_votes import Votes
from holdfast.manager.restoring import RestoredState, event_of, restore_newest, restore_step
from holdfast.manager.save_schedule import SaveSchedule
from holdfast.manager.saver import Saver

SETTLE_SECS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorer:
    """Owned by the training thread. `look` lists what can be read now."""

    framework: Framework
    votes: Votes
    session: AgentSession
    steps: SaveSchedule
    saver: Saver
    progress: Progress
    meter: OverheadMeter | None
    clock: Clock
    look: Callable[[], View]

    def read(self, step: int | None, request: RestoreRequest) -> RestoredState | None:
        """Restore the checkpoint of `step`, else the newest; None where nothing was ever saved.

        Every rank has to call it. The errors are those of `restore_step` and `restore_newest`.
        """
        self.settle()
        rounds = self.votes.rounds
        if step is None:
            restored = restore_newest(self.look, self.framework, request, rounds, self.clock)
        else:
            restored = restore_step(self.look, step, self.framework, request, rounds, self.clock)
        if self.meter is not None:
            self.meter.paused()
        return restored

    def note_read(self, restored: RestoredState) -> None:
        """Note a restore after which the run goes on as before."""
        self.steps.read = restored.id.step
        self._report("read", restored)

    def go_on_from(self, restored: RestoredState) -> None:
        """Move the run to what was restored: a new attempt, unless that is its newest one."""
        found = restored.id
        # Published first: targets that the agent sets from here on lie above this step.
        place = self.session.place
        place.control.cells[place.step_cell] = found.step
        self.saver.forget()
        timeline = self.look().timeline
        if timeline and timeline[-1] != found:
            self.session.branch((found.step, found.attempt))
        # Only now: an exception before this leaves the run where it was.
        self.steps.went_back(found.step)
        self._report("restored", restored)

    def check_order(self, step: int, *, force: bool) -> int:
        """Check that `step` may be saved now; with `force`, begin a branch where that is needed.

        Raises:
            StepExistsError, StepOrderError: it may not.
        """
        steps = self.steps
        if step > steps.last:
            return step
        if steps.is_asked_again(step, self.progress.raised_at):
            # The call before raised an earlier save's failure, and this step is given again.
            return step
        is_known = step in steps.accepted or any(c.step == step for c in self.look().timeline)
        if is_known and force:
            self.branch_at(step)
            return step
        # After a mere restore an overwrite is hardly what is wanted, so it is not proposed.
        if not is_known or (steps.read is not None and step != steps.last):
            raise_step_order(step, steps.last, steps.read)
        raise StepExistsError(
            f"save step {step}: it is saved already; save a later one, or pass force=True to "
            "overwrite it"
        )

    def branch_at(self, step: int) -> None:
        """Begin a branch of the run in which `step` is saved anew."""
        self.settle()
        origin = max((c for c in self.look().timeline if c.step <= step), default=None)
        self.session.branch((origin.step, origin.attempt) if origin is not None else None)
        self.steps.went_back(step)

    def settle(self) -> None:
        """Wait until what is on its way has arrived, so that a restore sees it."""
        self.session.finish_branch()
        self.progress.wait(lambda sealed, finished: finished, SETTLE_SECS)

    def _report(self, event: str, restored: RestoredState) -> None:
        self.session.report_event(event, rank=self.session.rank, **event_of(restored.report))
