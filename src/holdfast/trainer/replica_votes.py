"""Let all ranks learn together that their replicas differ, and to which step they go back.

Invariants:
- The ranks vote at the steps that are multiples of one number, so all vote at the same steps,
  whatever is saved there.
- What a vote has decided is the same on all ranks, and changes nothing until the next one.

See docs/decisions/0063.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.errors import HoldfastError, StepNotFoundError
from holdfast.format.json_codec import decode
from holdfast.policy.vouching import RewindLimit, VouchedStep
from holdfast.trainer.ranks.rendezvous import Rendezvous, json_text
from holdfast.trainer.restore.restore_votes import Votes
from holdfast.trainer.save.replica_checks import ReplicaChecks

NAME = "compare replicas"
VOTE_SECS = 3600.0
"""How long the ranks wait for the slowest one."""
REWINDS_MAX = 3


class ReplicaBallot(msgspec.Struct, frozen=True, array_like=True):
    """What one rank knows of its replicas, or all of them together.

    Attributes:
        equal_until: The step up to which they were equal.
        differs_at: The first step at which one was found to differ; None: none was.
    """

    equal_until: int
    differs_at: int | None


def together(ballots: Sequence[ReplicaBallot]) -> ReplicaBallot:
    """Return what all ranks know together."""
    steps = [ballot.differs_at for ballot in ballots if ballot.differs_at is not None]
    equal_until = min(ballot.equal_until for ballot in ballots)
    return ReplicaBallot(equal_until, min(steps, default=None))


class ReplicaVotes:
    """One rank's part in the votes. Owned by the training thread.

    Args:
        rendezvous: The meeting of the ranks.
        votes: Finds ranks that have ended.
        checks: What this rank has compared.
        every_steps: The ranks vote at its multiples.
        equal: The step up to which all replicas were equal, as all ranks know.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        votes: Votes,
        checks: ReplicaChecks,
        every_steps: int,
        equal: VouchedStep,
    ) -> None:
        self._rendezvous, self._votes, self._checks = rendezvous, votes, checks
        self._every_steps, self._equal = every_steps, equal
        self._voted_at = -1
        self._limit = RewindLimit(REWINDS_MAX)
        self.differs_at: int | None = None
        """The first step at which a replica was found to differ, as all ranks know; None: none."""

    def must_go_back(self, step: int) -> bool:
        """Vote, if the ranks vote at `step`; return whether all go back now.

        Raises:
            HoldfastError: The training went on after an earlier vote that it had to go back.
            ProcessLostError: Another rank has ended, or did not vote.
        """
        if self.differs_at is not None and step > self._voted_at:
            raise HoldfastError(
                f"save step {step}: replicas differ since step {self.differs_at}, found at step "
                f"{self._voted_at}, and the training went on: expected manager.rewind(state) where "
                "manager.replicas_differ is true"
            )
        if step % self._every_steps == 0 and step != self._voted_at:
            ballot = ReplicaBallot(self._checks.equal_until, self._checks.differs_at)
            with self._votes.watching():
                answer = self._rendezvous.decide(
                    NAME, json_text(ballot), _judged, VOTE_SECS, lambda: self._votes.trouble
                )
            verdict = decode(answer, ReplicaBallot)
            self._voted_at = step
            self._equal.vouched, self.differs_at = verdict.equal_until, verdict.differs_at
        return self.differs_at is not None

    def check_end(self) -> None:
        """Check that this rank has found no difference since the last vote, as the training ends.

        Raises:
            HoldfastError: It has.
        """
        if self.differs_at is None and self._checks.differs_at is not None:
            raise HoldfastError(
                f"close: replicas differ since step {self._checks.differs_at}, found after the "
                f"last vote of the ranks; they were equal until step {self._equal.vouched}: train "
                "again from there, with resume(state, step=...); `holdfast status` names the rank "
                "that is alone"
            )

    def check_rewind(self) -> None:
        """Check that the training may go back.

        Raises:
            StepNotFoundError: It went back so often without coming further.
        """
        if self._limit.is_reached(self._equal.vouched):
            raise StepNotFoundError(
                f"rewind: the training went back {REWINDS_MAX} times because replicas differ, to "
                f"step {self._equal.vouched} and before, and they differ again; `holdfast status` "
                "names the rank that is alone: restart the job without its host, or declare what "
                "may differ with ReplicaCheck(may_differ=...)"
            )

    def note_rewind(self) -> None:
        """Note that the training goes back because of a difference; `begin` follows."""
        self._limit.note(self._equal.vouched)

    def begin(self, step: int) -> None:
        """Begin again after a restore of `step`, or before the first one: -1."""
        self._checks.begin(step)
        self._equal.vouched, self.differs_at, self._voted_at = step, None, -1


def _judged(values: list[str]) -> str:
    return json_text(together([decode(value, ReplicaBallot) for value in values]))
