"""Read checkpoints for the training thread, and move the run back to one of them.

Invariant: reading does not affect the run or its next save. Only `go_on_from` and `branch_at` move
the run; the later checkpoints then become an abandoned branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.adapt.contract import Framework, RestoreRequest
from holdfast.clock import Clock
from holdfast.engine.lifecycle.catalog import Listing
from holdfast.engine.reading.restore import RestoreTally
from holdfast.engine.reading.view import View, newest_first
from holdfast.errors import StepExistsError
from holdfast.format.names import CheckpointId
from holdfast.host.wire.control_block import NO_STEP
from holdfast.observe.events.schema import SHOWN_MAX, StateRead, StateRestored
from holdfast.quantities import size_text
from holdfast.trainer.arguments import raise_step_order
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.process.progress_bar import BarState, progress_bar
from holdfast.trainer.restore.restore_votes import Votes
from holdfast.trainer.restore.restoring import RestoredState, restore_newest, restore_step
from holdfast.trainer.save.overhead import OverheadMeter
from holdfast.trainer.save.progress import Progress
from holdfast.trainer.save.save_schedule import SaveSchedule
from holdfast.trainer.save.saver import Saver

SETTLE_SECS = 600.0
"""How long a restore waits until the saves in progress have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorer:
    """Restore states and move the run. Owned by the training thread.

    Attributes:
        look: Lists what can be read now.
        look_at_newest: Lists the newest checkpoints of that, with few requests.
        look_here: Lists what this host's RAM and the run's own storage have.
        list_ram: Lists what this host's RAM has of one checkpoint.
    """

    framework: Framework
    votes: Votes
    session: AgentSession
    steps: SaveSchedule
    saver: Saver
    progress: Progress
    meter: OverheadMeter | None
    clock: Clock
    look: Callable[[], View]
    look_at_newest: Callable[[], View]
    look_here: Callable[[], View]
    list_ram: Callable[[CheckpointId], Listing]

    def read(self, step: int | None, request: RestoreRequest) -> RestoredState | None:
        """Restore the checkpoint of `step`, or the newest if `step` is None.

        Every rank must call it.

        Returns:
            The state and its report; None if the run has no checkpoint.

        Raises:
            HoldfastError: As `restore_step` and `restore_newest`.
        """
        self.settle()
        rounds = self.votes.rounds
        looks = (self.framework, request, rounds, self.clock)
        tallies: list[RestoreTally] = []
        with (
            self.votes.watching(),
            progress_bar("restoring", lambda: _bar_state(tallies), is_on=rounds.rank == 0),
        ):
            if step is None:
                look = newest_first(self.look_at_newest, self.look)
                restored = restore_newest(look, *looks, tallies.append)
            else:
                restored = restore_step(self.look, step, *looks, tallies.append)
        if self.meter is not None:
            self.meter.paused()
        return restored

    def note_read(self, restored: RestoredState) -> None:
        """Record a restore that does not move the run."""
        self.steps.read = restored.id.step
        self._report(StateRead, restored)

    def go_on_from(self, restored: RestoredState) -> None:
        """Move the run to the restored checkpoint: a new attempt, unless it is the newest one.

        A step that was saved after it and was deleted, or failed, needs a new attempt as well:
        within an attempt a step names one checkpoint only.
        """
        found = restored.id
        # Published first, so that targets that the agent sets from now on are above this step.
        place = self.session.place
        place.control.cells[place.step_cell] = found.step
        self.saver.reuse_nothing()
        if not restored.is_newest or self.steps.has_accepted_after(found.step):
            self.session.branch(found)
        # Last, because an exception before this must leave the training's position unchanged.
        self.steps.went_back(found.step)
        self._report(StateRestored, restored)

    def start_again(self) -> None:
        """Set the position before the first step: the run has no checkpoint to continue from."""
        place = self.session.place
        place.control.cells[place.step_cell] = NO_STEP
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
        saved = {c.step for c in self.look().timeline}
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
        steps = {c.step for c in self.look().timeline}
        return max(steps | self.steps.accepted, default=-1)

    def branch_at(self, step: int) -> None:
        """Begin a branch of the run in which `step` can be saved again."""
        self.settle()
        origin = max((c for c in self.look().timeline if c.step <= step), default=None)
        self.session.branch(origin)
        self.steps.went_back(step)

    def settle(self) -> None:
        """Wait until the saves in progress have ended, so that a restore finds them."""
        self.session.finish_branch()
        self.progress.wait(lambda sealed, finished: finished, SETTLE_SECS)

    def _report(self, kind: type[StateRead | StateRestored], restored: RestoredState) -> None:
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


def _bar_state(tallies: Sequence[RestoreTally]) -> BarState | None:
    """Return how far the newest try of a restore is; None before it reads."""
    if not tallies or not tallies[-1].wanted_bytes:
        return None
    tally = tallies[-1]
    with tally.lock:
        read_bytes = sum(tally.bytes_by_tier.values())
    text = f"{size_text(read_bytes)} of {size_text(tally.wanted_bytes)}"
    return BarState(read_bytes / tally.wanted_bytes, text)
