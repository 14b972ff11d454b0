"""How the ranks vote on a try to restore, and what ends the waiting for a rank that is gone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import msgspec

from holdfast.agent.protocol import Notice
from holdfast.errors import FencedError, HoldfastError, ProcessLostError
from holdfast.format.json_codec import decode
from holdfast.format.names import CheckpointId
from holdfast.job.rendezvous import Rendezvous, json_text
from holdfast.manager.restoring import Rounds

VOTE_SECS = 3600.0
"""How long the ranks wait for the slowest one, which may read from slow storage."""

NAME = "restore"
MEETING = "meet before a restore"


class Ballot(msgspec.Struct, frozen=True, array_like=True):
    """One rank's vote: what it took, None where nothing is left, and whether it could read it."""

    good: bool
    id: tuple[int, int] | None


class RestoreVerdict(msgspec.Struct, frozen=True, array_like=True):
    """Whether all ranks restored that checkpoint; if not, only steps below `limit` remain."""

    good: bool
    limit: int


class Votes:
    """One rank's votes. `_trouble` is set by the watcher's thread, once, and read while waiting."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._trouble: HoldfastError | None = None
        self.rounds = Rounds(
            vote=self._vote,
            meet=self._meet,
            rank=rendezvous.rank,
            count=rendezvous.count,
            telling=self._telling,
        )

    @property
    def trouble(self) -> HoldfastError | None:
        """What ended another rank, or fenced them all; None while nothing has."""
        return self._trouble

    def on_notice(self, notice: Notice, group: str) -> None:
        """Ends the waiting where the agent tells that a rank of `group` is gone, on any host."""
        if notice.data != group:
            return
        if notice.kind == "fenced":
            self._trouble = FencedError(notice.reason)
        elif notice.kind == "gone" and self._trouble is None:
            self._trouble = ProcessLostError(notice.reason)

    def _telling(self) -> AbstractContextManager[object]:
        return self._rendezvous.propagating_errors(NAME)

    def _meet(self) -> None:
        self._rendezvous.decide(MEETING, "", lambda values: "", VOTE_SECS, lambda: self._trouble)

    def _vote(self, good: bool, found: CheckpointId | None) -> tuple[bool, int]:
        ballot = Ballot(good, (found.step, found.attempt) if found else None)
        answer = self._rendezvous.decide(
            NAME, json_text(ballot), _judged, VOTE_SECS, lambda: self._trouble
        )
        said = decode(answer, RestoreVerdict)
        return said.good, said.limit


def verdict(ballots: Sequence[Ballot]) -> RestoreVerdict:
    """Good if all restored the same; else all go on below it, or to the lowest that one chose."""
    chosen = {ballot.id for ballot in ballots}
    steps = [-1 if ballot.id is None else ballot.id[0] for ballot in ballots]
    if len(chosen) == 1:
        return RestoreVerdict(all(ballot.good for ballot in ballots), steps[0])
    return RestoreVerdict(False, min(steps) + 1)


def _judged(values: list[str]) -> str:
    return json_text(verdict([decode(value, Ballot) for value in values]))
