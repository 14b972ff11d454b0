"""A leader's view of one host: its last report, and the orders that were sent to it."""

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
        incarnation, seq, version: the numbers of the last report.
        state: the last reported state; None while the host is lost or has not reported.
        ranks: the ranks of the present group that live there.
        known_ranks: the ranks that ever lived there in this attempt.
        left: the ranks that detached there.
        hello_at_secs: when it last reported ranks that wait for this leader's orders.
        offers: the ranks whose parts the host's own ranks copy.
        is_following: it has received orders of this leader, so its target states answer these.
        is_reply_due: it needs an answer even if the orders have not changed.
        is_present: its last state is of the leader's attempt, and so are the steps in it.
        is_lost: it was silent for so long that its RAM counts as lost.
    """

    host: str
    incarnation: int = 0
    seq: int = 0
    version: int = 0
    state: HostState | None = None
    published: int = NO_STEP
    save_cost_secs: float | None = None
    last_report_at_secs: float = 0.0
    hello_at_secs: float = float("-inf")
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
        """Return whether a newer report than this one was accepted already.

        An agent's incarnation comes from its host's clock, which may be set back between two
        starts. After a long silence no old message can still be on its way, so then any
        incarnation is accepted.
        """
        if report.incarnation == self.incarnation:
            return report.seq <= self.seq
        return (
            report.incarnation < self.incarnation
            and now_secs - self.last_report_at_secs < lost_secs
        )

    def apply_report(self, report: Report, now_secs: float) -> None:
        """Apply the report's numbers; a new incarnation has received no orders yet."""
        if report.incarnation != self.incarnation:
            self.channel = Channel()
            self.hello_at_secs = float("-inf")
        self.incarnation, self.seq = report.incarnation, report.seq
        self.version, self.published = report.version, report.published
        self.save_cost_secs = report.save_cost_secs
        self.last_report_at_secs = now_secs

    def take_state(self, state: HostState, group: str) -> dict[CheckpointId, Held]:
        """Apply the reported state.

        Returns:
            What the host held before.
        """
        before = self.held
        self.state = state
        self.ranks = frozenset(ranks_in(state.ranks)) if state.group == group else frozenset()
        self.known_ranks |= self.ranks
        self.offers = frozenset(ranks_in(state.offers)) if self.ranks else frozenset()
        self.held = {held.id: held for held in state.held}
        return before
