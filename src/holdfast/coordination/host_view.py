"""What a leader knows of one host: its last report, and what it was told."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.coordination.messages import NO_STEP, Held, HostState, Report
from holdfast.coordination.rank_runs import ranks_in
from holdfast.coordination.turn import Channel
from holdfast.format.names import CheckpointId


@dataclass(slots=True)
class HostView:
    """One host, as its leader sees it.

    Attributes:
        ranks: those of the present group that live there.
        known_ranks: those that were ever there in this attempt; `left`: in good order.
        is_following: it has heard this leader, so that what it says of targets answers this one.
        is_reply_due: it is to be answered, also where there is nothing new.
        offers: the ranks of whose parts it has copies made by its own.
        is_present: its last state is of the leader's attempt, so that its steps are of that too.
        is_lost: silent for so long that its RAM is not counted on.
    """

    host: str
    incarnation: int = 0
    seq: int = 0
    version: int = 0
    state: HostState | None = None
    published: int = NO_STEP
    save_cost_secs: float | None = None
    last_report_at_secs: float = 0.0
    is_following: bool = False
    is_present: bool = False
    is_lost: bool = False
    is_reply_due: bool = True
    ranks: frozenset[int] = frozenset()
    known_ranks: set[int] = field(default_factory=set)
    offers: frozenset[int] = frozenset()
    left: set[int] = field(default_factory=set)
    held: dict[CheckpointId, Held] = field(default_factory=dict)
    channel: Channel = field(default_factory=Channel)

    def is_stale(self, report: Report, lost_secs: float, now_secs: float) -> bool:
        """Whether the report was overtaken by one that was taken already.

        A host's clock may have been set back between two starts. After a long silence nothing old
        can be on its way any more, so that any start counts.
        """
        if report.incarnation == self.incarnation:
            return report.seq <= self.seq
        return (
            report.incarnation < self.incarnation
            and now_secs - self.last_report_at_secs < lost_secs
        )

    def apply_report(self, report: Report, now_secs: float) -> None:
        """Takes the report's numbers."""
        if report.incarnation != self.incarnation:
            self.channel = Channel()
        self.incarnation, self.seq = report.incarnation, report.seq
        self.version, self.published = report.version, report.published
        self.save_cost_secs = report.save_cost_secs
        self.last_report_at_secs = now_secs

    def take_state(self, state: HostState, group: str) -> dict[CheckpointId, Held]:
        """Takes what the host says; returns what it held before."""
        before = self.held
        self.state = state
        self.ranks = frozenset(ranks_in(state.ranks)) if state.group == group else frozenset()
        self.known_ranks |= self.ranks
        self.offers = frozenset(ranks_in(state.offers)) if self.ranks else frozenset()
        self.held = {held.id: held for held in state.held}
        return before
