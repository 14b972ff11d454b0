"""Vote between the ranks on each attempt to restore, and end the wait for a rank that has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import msgspec

from holdfast.engine.reading.exchange import Exchange
from holdfast.engine.reading.spans import Wants
from holdfast.errors import FencedError, HoldfastError, ProcessLostError
from holdfast.format.json_codec import decode
from holdfast.format.names import CheckpointId
from holdfast.host.wire.protocol import Notice
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.opening.job_context import JobContext
from holdfast.trainer.ranks.rendezvous import Rendezvous, json_text
from holdfast.trainer.restore.restore_exchange import RestoreExchange

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
    """One rank's part in the rounds of its job's restores; see `restoring.Rounds`.

    The watcher's thread sets `_trouble`; the waiting thread reads it.
    """

    is_outside = False

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rank = rendezvous.rank
        self.count = rendezvous.count
        self._rendezvous = rendezvous
        self._trouble: HoldfastError | None = None
        self._lost: Callable[[], HoldfastError | None] | None = None
        self._exchange: RestoreExchange | None = None
        self.lost_secs: float | None = None
        """When another rank was first seen to have ended, by the monotonic clock; None: none."""

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

    def read_together(self, job: JobContext, session: AgentSession) -> None:
        """Let each round agree on what the ranks read together, if they read from a bucket."""
        if job.reads_together:
            self._exchange = RestoreExchange(
                rendezvous=self._rendezvous,
                place=lambda: job.exchange_place(session, lambda: self.trouble is not None),
                group=session.group,
                trouble=lambda: self.trouble,
            )

    def on_notice(self, notice: Notice, group: str) -> None:
        """End the wait if the agent reports that a rank of `group` has ended, on any host."""
        if notice.data != group:
            return
        if notice.kind == "fenced":
            self._trouble = FencedError(notice.reason)
        elif notice.kind == "gone" and self._trouble is None:
            self.lost_secs = self._rendezvous.clock.monotonic()
            self._trouble = ProcessLostError(notice.reason)

    def propagating_errors(self) -> AbstractContextManager[object]:
        """Send an error that leaves the block to the other ranks, in place of a vote."""
        return self._rendezvous.propagating_errors(NAME)

    def meet(self) -> None:
        """Wait for all ranks."""
        self._rendezvous.decide(MEETING, "", lambda values: "", VOTE_SECS, lambda: self.trouble)

    def join(self, checkpoint: CheckpointId | None, wants: Wants) -> Exchange | None:
        """Agree with the other ranks on what they read together; see `RestoreExchange.join`."""
        return self._exchange.join(checkpoint, wants) if self._exchange is not None else None

    def vote(self, good: bool, checkpoint: CheckpointId | None) -> tuple[bool, int]:
        """Vote, and return the verdict on all votes: (good, limit)."""
        ballot = Ballot(good, checkpoint)
        answer = self._rendezvous.decide(
            NAME, json_text(ballot), _judged, VOTE_SECS, lambda: self.trouble
        )
        decided = decode(answer, RestoreVerdict)
        return decided.good, decided.limit

    def end_round(self) -> None:
        """End the round: remove what was exchanged in it."""
        if self._exchange is not None:
            self._exchange.end_round()


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
