"""Where the ranks of a leader's attempt live, by their hosts' reports, and which have ended."""

from __future__ import annotations

from holdfast.coordination.leader.host_view import HostView
from holdfast.coordination.leadership import Leadership
from holdfast.coordination.messages import NO_STEP, Ended, Held, HostState
from holdfast.coordination.rank_runs import ranks_in, runs_of
from holdfast.coordination.settings import ENDED_MAX
from holdfast.format.names import CheckpointId


class RankCensus:
    """Counts the ranks of one attempt.

    Attributes:
        views: all hosts that have reported or may lead, by name.
        hosts: those with ranks. A silent host counts: its ranks still train, and have to meet the
            targets.
        is_changed: what all hosts are to know has changed since the leader reset this.
    """

    def __init__(self, leadership: Leadership) -> None:
        self._group = leadership.group
        self._rank_count = leadership.rank_count
        self.views = {host: HostView(host, is_lost=True) for host in leadership.successors}
        self.hosts: frozenset[str] = frozenset()
        self.is_changed = False
        self._living_count = 0
        self._left_count = 0
        self._broken: set[str] = set()
        self._ended: dict[tuple[str, bool], Ended] = {}

    @property
    def is_whole(self) -> bool:
        """Whether all ranks live, so that a checkpoint can become complete."""
        return self._living_count == self._rank_count and not self._broken

    @property
    def is_broken(self) -> bool:
        """Whether a rank that was there has ended or its host is lost."""
        return bool(self._broken)

    @property
    def is_closed(self) -> bool:
        """Whether all ranks have detached, so that none was lost."""
        return self._left_count == self._rank_count

    @property
    def ended(self) -> tuple[Ended, ...]:
        """The ranks that have ended, by host."""
        return tuple(self._ended.values())

    @property
    def save_cost_secs(self) -> float | None:
        """The training time that a save costs the slowest rank; None while none is known."""
        present = (self.views[host] for host in self.hosts if not self.views[host].is_lost)
        costs = [view.save_cost_secs for view in present]
        return max((cost for cost in costs if cost is not None), default=None)

    @property
    def highest_step(self) -> int:
        """The highest step that a rank has published."""
        return max((self.views[host].published for host in self.hosts), default=NO_STEP)

    def with_ranks(self) -> list[HostView]:
        """Return the hosts on which ranks live."""
        return [view for view in self.views.values() if view.ranks]

    def known_ranks(self) -> dict[str, set[int]]:
        """Return the ranks that ever lived on each of the hosts that live now."""
        return {h: v.known_ranks for h, v in self.views.items() if not v.is_lost and v.known_ranks}

    def take_state(self, view: HostView, state: HostState) -> dict[CheckpointId, Held]:
        """Apply the state that a host has reported.

        Returns:
            What the host held before.
        """
        self._living_count -= len(view.ranks)
        before = view.take_state(state, self._group)
        self._living_count += len(view.ranks)
        self._note_ended(view, state)
        if view.known_ranks - view.ranks or (state.group == self._group and state.is_broken):
            self._broken.add(view.host)
        else:
            self._broken.discard(view.host)
        if bool(view.ranks) != (view.host in self.hosts):
            self.hosts = frozenset(
                v.host for v in self.views.values() if v.ranks or (v.is_lost and v.known_ranks)
            )
        return before

    def lose(self, view: HostView) -> None:
        """Count the ranks of a silent host as lost, until it reports them."""
        if view.ranks:
            self._broken.add(view.host)
        self.forget(view)

    def forget(self, view: HostView) -> None:
        """Stop counting a host and its RAM. Its ranks may still live."""
        self._living_count -= len(view.ranks)
        view.held, view.ranks = {}, frozenset()
        view.state = None
        view.is_lost = True
        self.is_changed = True

    def _note_ended(self, view: HostView, state: HostState) -> None:
        """Record the ranks of a host that have ended, to report them to all other hosts."""
        if state.group == self._group:
            left = view.left.union(ranks_in(state.left))
            self._left_count += len(left) - len(view.left)
            self.is_changed |= self.is_closed and len(left) > len(view.left)
            view.left = left
            view.known_ranks.update(ranks_in(state.lost))
        # A restarted agent that finds no rank alive does not report its ranks as ended, so they
        # are found from the ranks that this host had before.
        lost = view.known_ranks - view.ranks - view.left
        for is_lost, ranks in ((False, view.left), (True, lost)):
            key = view.host, is_lost
            ended = Ended(view.host, runs_of(ranks), is_lost)
            is_new = bool(ranks) and self._ended.get(key) != ended
            if is_new and (key in self._ended or len(self._ended) < ENDED_MAX):
                self._ended[key] = ended
                self.is_changed = True
