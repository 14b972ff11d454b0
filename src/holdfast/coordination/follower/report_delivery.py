"""Sends a host's reports: when they have changed, and again until they are acknowledged."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.coordination.follower.election import Election
from holdfast.coordination.follower.rank_group import RankGroup
from holdfast.coordination.messages import NO_STEP, HostState, Report
from holdfast.coordination.turn import AgentIdentity, Channel, Turn
from holdfast.format.names import AttemptId


class ReportDelivery:
    """The reports of one host on their way to its leader, and to starts.

    Args:
        identity: the host's agent.
        election: the leader that the host follows.
    """

    def __init__(self, identity: AgentIdentity, election: Election) -> None:
        self._identity = identity
        self._settings = identity.settings
        self._election = election
        self._to_leader = Channel()
        self._seq = 0
        self._acked = (0, 0, 0)
        """The orders that the last report has acknowledged."""

    def acknowledged(self, version: int) -> None:
        """Note the report that the leader has applied."""
        channel = self._to_leader
        channel.acked = max(channel.acked, min(version, channel.version))

    def next_at_secs(self) -> float:
        """Return when the next report to the leader is due; infinity without one."""
        if self._election.leader is None:
            return float("inf")
        return self._due_at_secs(self._election.leader, self._to_leader)

    def run_due(
        self,
        turn: Turn,
        attempt: AttemptId,
        starts: Iterable[RankGroup],
        make_state: Callable[[RankGroup | None], HostState] | None,
    ) -> None:
        """Report to the leader and to starts, if the state is new or the report is due.

        Args:
            turn: the turn.
            attempt: the newest attempt known here.
            starts: the groups whose attempt has not begun.
            make_state: makes the state for the leader, or for the start of a group; None: nothing
                has changed.
        """
        to_leader = self._election.leader, self._to_leader, None
        for host, channel, group in (to_leader, *((g.leader, g.hello, g) for g in starts)):
            if host is None:
                continue
            is_new = make_state is not None and channel.put(make_state(group))
            if (
                is_new
                or (group is None and self._is_ack_due())
                or turn.now_secs >= self._due_at_secs(host, channel)
            ):
                channel.sent_at_secs = turn.now_secs
                turn.send(host, self._report(turn, attempt, channel))

    def answer(self, turn: Turn, starter: str, attempt: AttemptId, state: HostState) -> None:
        """Report to a start once."""
        channel = Channel()
        channel.put(state)
        turn.send(starter, self._report(turn, attempt, channel))

    def _due_at_secs(self, host: str, channel: Channel) -> float:
        """Return when to report again. A leader hears itself half as often: no message is lost."""
        due_at_secs = channel.due_at_secs(self._settings)
        if host == self._identity.host and channel.acked >= channel.version:
            due_at_secs += self._settings.heartbeat_secs
        return due_at_secs

    def _is_ack_due(self) -> bool:
        """Return whether the leader's last orders have not been acknowledged yet."""
        election = self._election
        followed = election.term, election.incarnation, election.ack
        return followed != self._acked and election.incarnation > 0

    def _report(self, turn: Turn, attempt: AttemptId, channel: Channel) -> Report:
        self._seq += 1
        election = self._election
        assert isinstance(channel.content, HostState)
        is_hello = channel is not self._to_leader
        if not is_hello:
            self._acked = election.term, election.incarnation, election.ack
        return Report(
            run=self._identity.run,
            attempt=attempt,
            incarnation=self._identity.incarnation,
            seq=self._seq,
            version=channel.version,
            term=election.term,
            leader_incarnation=election.incarnation,
            ack=election.ack,
            # The published steps belong to the present attempt, not to the one that will begin.
            published=NO_STEP if is_hello else turn.published.highest,
            is_hello=is_hello,
            state=channel.content,
            save_cost_secs=None if is_hello else turn.published.save_cost_secs,
        )
