"""Make the last step of a run durable: collect what each rank has of it, and decide for all ranks.

Invariants:
- All ranks carry out the same plan. If one rank did something else, the parts would never form a
  checkpoint.
- What the training has saved since it began, or went back, is known without the storage, which may
  fail or hang at just this moment. The remote tier is never asked.

See docs/decisions/0004.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import msgspec

from holdfast.engine.reading.view import View
from holdfast.errors import InvalidArgumentError
from holdfast.format.json_codec import decode
from holdfast.format.names import CheckpointId
from holdfast.host.wire.protocol import Empty, PartTier, Sealed
from holdfast.trainer.arguments import raise_step_order
from holdfast.trainer.position import Position
from holdfast.trainer.ranks.rendezvous import Rendezvous, json_text
from holdfast.trainer.restore.restore_votes import Votes

FINISH_SECS = 3600.0
"""How long the ranks wait for the slowest one, which may be several steps behind."""

SEAL_SECS = 600.0
"""How long to wait until all accepted saves are sealed."""

FINISH = "finish the run"
RAM, DURABLE = "ram", "durable"


class Having(Enum):
    """What a rank has of the last step, in ascending order."""

    NOTHING = 0
    IN_RAM = 1
    """A part that is sealed in RAM, or is being written there, and is not due to become durable."""
    DURABLE = 2
    """A part that is durable or is becoming durable."""


class FinishPlan(Enum):
    """What all ranks do."""

    NOTHING = 0
    MAKE_DURABLE = 1
    """Request the agent to make the part in RAM durable."""
    SAVE = 2
    SAVE_AGAIN = 3
    """Overwrite what some of the ranks have, as a branch of the run."""


def having_of(
    checkpoint: CheckpointId, rank: int, view: View, *, is_accepted: bool, is_due: bool
) -> Having:
    """Return what this rank has of the last step.

    Args:
        checkpoint: The last step, in the current attempt.
        rank: This rank.
        view: The checkpoints that can be read now.
        is_accepted: A save of the step was accepted in this attempt; it is sealed unless it failed.
        is_due: That save is becoming durable.
    """
    durable = view.listings[DURABLE]
    on_timeline = [c for c in view.timeline if c.step == checkpoint.step]
    if is_due or any(c in durable and durable[c].is_committed for c in on_timeline):
        return Having.DURABLE
    in_ram = view.listings.get(RAM, {}).get(checkpoint)
    if is_accepted and in_ram is not None and rank in in_ram.parts:
        return Having.IN_RAM
    return Having.NOTHING


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """The last step as one rank was given it, what this rank has of it, and its newest step."""

    step: int
    having: Having
    newest: int


def plan_of(endings: Sequence[Ending]) -> FinishPlan:
    """Return what all ranks do; `endings` is in the order of ranks.

    Raises:
        InvalidArgumentError: The ranks were given different steps.
        StepOrderError: To save the step would abandon the checkpoint of a later one.
    """
    for rank, ending in enumerate(endings):
        if ending.step != endings[0].step:
            raise InvalidArgumentError(
                f"finish step {endings[0].step}: expected the same step on every rank, found "
                f"{ending.step} on rank {rank}"
            )
    havings = {ending.having for ending in endings}
    if havings == {Having.DURABLE}:
        return FinishPlan.NOTHING
    if Having.NOTHING not in havings:
        return FinishPlan.MAKE_DURABLE
    step, newest = endings[0].step, max(ending.newest for ending in endings)
    if newest > step:
        raise_step_order("finish", step, newest, None)
    return FinishPlan.SAVE if havings == {Having.NOTHING} else FinishPlan.SAVE_AGAIN


class Agreed(msgspec.Struct, frozen=True):
    """The answer of rank 0."""

    plan: FinishPlan


def agreed_plan(rendezvous: Rendezvous, votes: Votes, ending: Ending) -> FinishPlan:
    """Return what all ranks do, after each has reported what it has.

    Raises:
        InvalidArgumentError, StepOrderError: As `plan_of`.
        ProcessLostError: Another rank has ended, or did not join within `FINISH_SECS`.
    """

    def judged(values: list[str]) -> str:
        return json_text(Agreed(plan_of([decode(value, Ending) for value in values])))

    with votes.watching():
        answer = rendezvous.decide(
            FINISH, json_text(ending), judged, FINISH_SECS, lambda: votes.trouble
        )
    return decode(answer, Agreed).plan


class Finisher:
    """Make the last step of a run durable. Owned by the training thread."""

    def __init__(self, rendezvous: Rendezvous, votes: Votes, position: Position) -> None:
        self._rendezvous = rendezvous
        self._votes = votes
        self._position = position
        self._ended_at: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether `finish` was called for the last step, and the run was not preempted before."""
        return self._ended_at is not None and self._position.steps.last <= self._ended_at

    def finish(self, step: int, save: Callable[[int], bool]) -> bool:
        """Make `step` durable.

        Args:
            step: The last step.
            save: Saves a step whatever the policies decide, and returns whether it was accepted.

        Returns:
            Whether this call makes it durable: it was neither durable nor becoming durable before.
        """
        position = self._position
        if position.steps.is_preempted_before(step):
            return False
        self._ended_at = step
        position.progress.wait(lambda sealed, finished: sealed, SEAL_SECS)
        checkpoint = CheckpointId(step, position.session.place.attempt)
        with self._rendezvous.propagating_errors(FINISH):
            having = self._having(checkpoint)
            # Beyond the floor the timeline has what was accepted, and nothing else.
            newest = max(position.steps.accepted | {position.steps.floor})
            ending = Ending(step, having, newest)
        match agreed_plan(self._rendezvous, self._votes, ending):
            case FinishPlan.NOTHING:
                return False
            case FinishPlan.MAKE_DURABLE:
                if having is Having.IN_RAM:
                    self._make_durable(checkpoint)
                return True
            case FinishPlan.SAVE:
                position.check_order(step, force=True)
            case FinishPlan.SAVE_AGAIN:
                position.branch_at(step)
        return self._save(step, save)

    def _having(self, checkpoint: CheckpointId) -> Having:
        """Return what this rank has of the last step."""
        position, rank = self._position, self._position.session.rank
        is_accepted = checkpoint.step in position.steps.accepted
        is_due = position.progress.is_becoming_durable(checkpoint)
        if is_due or position.progress.is_committed(checkpoint):
            return Having.DURABLE
        if position.progress.is_undurable(checkpoint):
            # Its agents have given it up, and do not report that again: it is saved anew.
            return Having.NOTHING
        if checkpoint.step > position.steps.floor:
            if not is_accepted:
                return Having.NOTHING
            if rank in position.views.list_ram(checkpoint).parts:
                return Having.IN_RAM
        view = position.views.load_here()
        return having_of(checkpoint, rank, view, is_accepted=is_accepted, is_due=is_due)

    def close(self, *, warns: bool) -> None:
        """Warn that the last step was not saved, if `warns` and no preemption chose another."""
        if self._position.session.is_closed:
            # An earlier `close` was interrupted after it had warned; the cells may be unmapped.
            return
        steps = self._position.steps
        if warns and steps.stop.at is None and self._position.session.rank == 0:
            steps.warn_unfinished()

    def _save(self, step: int, save: Callable[[int], bool]) -> bool:
        place = self._position.session.place
        self._position.steps.last = place.control.cells[place.step_cell] = step
        return save(step)

    def _make_durable(self, checkpoint: CheckpointId) -> None:
        """Request the agent to make this rank's part in RAM durable."""
        session, progress = self._position.session, self._position.progress
        sealed = Sealed(
            rank=session.rank,
            id=checkpoint,
            part_count=self._rendezvous.count,
            tier=PartTier.RAM,
            durable=True,
            again=True,
        )
        progress.accept(checkpoint, durable=True, by_step=True)
        progress.seal(checkpoint, sealed)
        session.call("sealed", sealed, Empty)
        progress.reported(checkpoint)
