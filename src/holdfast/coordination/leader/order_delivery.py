"""Sends a leader's orders to each host: when they have changed, and again until it has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from holdfast.coordination.follower.election import term_above
from holdfast.coordination.leader.host_view import HostView
from holdfast.coordination.leadership import Leadership
from holdfast.coordination.messages import Command, Orders, Report
from holdfast.coordination.turn import AgentIdentity, Turn


class OrderDelivery:
    """The orders of one leader on their way to the hosts.

    Args:
        identity: the leader's agent.
        leadership: the attempt that it leads.
        views: all hosts that have reported or may lead, by name.

    Attributes:
        leadership: the attempt, with the present term and the present successors.
    """

    def __init__(
        self, identity: AgentIdentity, leadership: Leadership, views: Mapping[str, HostView]
    ) -> None:
        self._identity = identity
        self._settings = identity.settings
        self.leadership = leadership
        self._views = views
        self._seq = 0
        self._dirty: set[str] = set()
        """The hosts whose orders may have changed since they were sent."""
        self._retry_at_secs = float("inf")
        """When to send orders again that are not acknowledged."""

    @property
    def next_at_secs(self) -> float:
        """When to look for orders to send again."""
        return self._retry_at_secs

    def mark(self, hosts: Collection[str]) -> None:
        """Note that the orders of `hosts` may have changed."""
        self._dirty.update(hosts)

    def mark_all(self) -> None:
        """Note that the orders of all hosts may have changed."""
        self._dirty.update(self._views)

    def outbid(self, term: int) -> None:
        """Take a term above `term`, if that is not below the present one.

        Another leader has or had `term`, or a host expects a leader of it. All hosts get new
        orders, and their earlier answers do not count.
        """
        host, successors = self._identity.host, self.leadership.successors
        if term >= self.leadership.term and host in successors:
            self.leadership = replace(self.leadership, term=term_above(successors, host, term))
            self.mark_all()
            self._retry_at_secs = 0.0
            for view in self._views.values():
                view.is_following, view.is_reply_due = False, True
                view.channel.acked = 0

    def acknowledge(self, view: HostView, report: Report) -> bool:
        """Note the orders that a host has applied.

        Returns:
            Whether it follows these orders, not those of another leader or of an earlier term.
        """
        followed = report.term, report.leader_incarnation
        is_following = followed == (self.leadership.term, self._identity.incarnation)
        if is_following:
            view.channel.acked = max(view.channel.acked, report.ack)
        return is_following

    def answer(self, turn: Turn, view: HostView, *, is_new: bool) -> None:
        """Schedule an answer to a host's report, if it `is_new` or a heartbeat is due."""
        if is_new or turn.now_secs >= view.channel.due_at_secs(self._settings):
            view.is_reply_due = True
            self._dirty.add(view.host)

    def run_due(
        self, turn: Turn, make_commands: Callable[[], Callable[[HostView], Command]]
    ) -> None:
        """Send again what is not acknowledged, and what has changed.

        Args:
            turn: the turn.
            make_commands: returns what makes the command of each host. It is asked only where
                orders may have changed.
        """
        if turn.now_secs >= self._retry_at_secs:
            self._retry_at_secs = float("inf")
            for view in self._views.values():
                if view.channel.acked < view.channel.version:
                    # Also while a host is lost: it may come back with the orders still open.
                    self._retry_soon(turn)
                    is_due = turn.now_secs >= view.channel.due_at_secs(self._settings)
                    if is_due and not view.is_lost:
                        self._send(turn, view)
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, set()
        command_of = make_commands()
        # Sort: the order of a set of strings differs between processes, and runs of one seed must
        # send the same messages.
        for host in sorted(dirty):
            view = self._views[host]
            if view.is_lost:
                continue
            is_new = view.channel.put(command_of(view))
            if is_new or view.is_reply_due:
                self._send(turn, view)

    def send(self, turn: Turn, view: HostView, command: Command) -> None:
        """Send `command` to a host now, also while it is lost."""
        view.channel.put(command)
        self._send(turn, view)

    def _send(self, turn: Turn, view: HostView) -> None:
        view.channel.sent_at_secs = turn.now_secs
        view.is_reply_due = False
        turn.send(view.host, self._orders(view))
        if view.channel.acked < view.channel.version:
            self._retry_soon(turn)

    def _retry_soon(self, turn: Turn) -> None:
        """Look after the retry time for orders that were sent and are not acknowledged."""
        retry_at_secs = turn.now_secs + self._settings.retry_secs
        self._retry_at_secs = min(self._retry_at_secs, retry_at_secs)

    def _orders(self, view: HostView) -> Orders:
        self._seq += 1
        assert isinstance(view.channel.content, Command)
        leadership = self.leadership
        return Orders(
            run=self._identity.run,
            attempt=leadership.attempt,
            group=leadership.group,
            term=leadership.term,
            incarnation=self._identity.incarnation,
            seq=self._seq,
            version=view.channel.version,
            ack=view.version,
            follower_incarnation=view.incarnation,
            origin=leadership.origin,
            rank_count=leadership.rank_count,
            successors=leadership.successors,
            command=view.channel.content,
        )
