"""Vote between the ranks on each attempt to restore, and end the wait for a rank that has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import msgspec

from holdfast.errors import FencedError, HoldfastError, ProcessLostError
from holdfast.format.json_codec import decode
from holdfast.format.names import CheckpointId
from holdfast.host.wire.protocol import Notice
from holdfast.trainer.ranks.rendezvous import Rendezvous, json_text
from holdfast.trainer.restore.restore_exchange import RestoreExchange
from holdfast.trainer.restore.restoring import Rounds

VOTE_SECS = 3600.0
"""How long the ranks wait for the slowest one, which may read from slow storage."""

NAME = "restore"
MEETING = "meet before a restore"


class Ballot(msgspec.Struct, frozen=True, array_like=True):
    """One rank's vote.

    Attributes:
        good: Whether the rank could read the checkpoint, or has none left.
        id: The checkpoint it tried; None if none is left.
    """

    good: bool
    id: CheckpointId | None


class RestoreVerdict(msgspec.Struct, frozen=True, array_like=True):
    """The result of a vote.

    Attributes:
        good: Whether all ranks read the same checkpoint.
        limit: Only steps below this one remain if not.
    """

    good: bool
    limit: int


class Votes:
    """One rank's votes. The watcher's thread sets `_trouble`; the waiting thread reads it."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._trouble: HoldfastError | None = None
        self._lost: Callable[[], HoldfastError | None] | None = None
        self.rounds = Rounds(
            vote=self._vote,
            meet=self._meet,
            rank=rendezvous.rank,
            count=rendezvous.count,
            propagating_errors=self._propagating_errors,
        )

    @property
    def trouble(self) -> HoldfastError | None:
        """The error that ended another rank or fenced all of them; None if there is none."""
        return self._trouble or (self._lost() if self._lost is not None else None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice within the block that a rank ended with its host. All ranks enter it together."""
        with self._rendezvous.watching_ranks() as self._lost:
            try:
                yield
            finally:
                self._lost = None

    def read_together(self, exchange: RestoreExchange) -> None:
        """Let each round agree on what the ranks read together."""
        self.rounds.join, self.rounds.end_round = exchange.join, exchange.end_round

    def on_notice(self, notice: Notice, group: str) -> None:
        """End the wait if the agent reports that a rank of `group` has ended, on any host."""
        if notice.data != group:
            return
        if notice.kind == "fenced":
            self._trouble = FencedError(notice.reason)
        elif notice.kind == "gone" and self._trouble is None:
            self._trouble = ProcessLostError(notice.reason)

    def _propagating_errors(self) -> AbstractContextManager[object]:
        return self._rendezvous.propagating_errors(NAME)

    def _meet(self) -> None:
        self._rendezvous.decide(MEETING, "", lambda values: "", VOTE_SECS, lambda: self.trouble)

    def _vote(self, good: bool, found: CheckpointId | None) -> tuple[bool, int]:
        ballot = Ballot(good, found)
        answer = self._rendezvous.decide(
            NAME, json_text(ballot), _judged, VOTE_SECS, lambda: self.trouble
        )
        decided = decode(answer, RestoreVerdict)
        return decided.good, decided.limit


def verdict(ballots: Sequence[Ballot]) -> RestoreVerdict:
    """Return the verdict on the ballots of all ranks.

    It is good if all ranks read the same checkpoint. If all tried the same one and one failed, they
    continue below its step. If they tried different ones, they continue at the lowest of these.
    """
    chosen = {ballot.id for ballot in ballots}
    steps = [-1 if ballot.id is None else ballot.id.step for ballot in ballots]
    if len(chosen) == 1:
        return RestoreVerdict(all(ballot.good for ballot in ballots), steps[0])
    return RestoreVerdict(False, min(steps) + 1)


def _judged(values: list[str]) -> str:
    return json_text(verdict([decode(value, Ballot) for value in values]))
