"""The leader of an attempt: on rank 0's host, and on a successor while that host is silent.

The leader knows from the hosts' reports which parts they hold, and sends each host its orders. It
keeps no state that a later leader could not get from its followers' reports.

Invariants:
- A target is proposed only while all ranks of the attempt live; all their hosts have to accept it.
- RAM is released only by a leader that has had reports of all ranks, so that it knows how many
  failure domains there are, and that has begun the attempt or seen in storage that none is newer.
  Checkpoints that were begun after all ranks had reported need no look into storage: they were
  reported to no other attempt.
- A commit is ordered only after all parts were reported durable; the store checks this again.
- A successor that leads in place of rank 0's host makes checkpoints durable and commits them. It
  releases RAM of committed checkpoints only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from holdfast.coordination.effects import HostHeard, HostSilent, Reached
from holdfast.coordination.inputs import DurableListed
from holdfast.coordination.leader.checkpoint_table import (
    CheckpointEntry,
    CheckpointTable,
    Recycling,
)
from holdfast.coordination.leader.durability import Durability
from holdfast.coordination.leader.host_view import HostView
from holdfast.coordination.leader.mirror import Mirror
from holdfast.coordination.leader.order_delivery import OrderDelivery
from holdfast.coordination.leader.protection_watch import ProtectionWatch
from holdfast.coordination.leader.rank_census import RankCensus
from holdfast.coordination.leader.replica_placement import Ring, successors_of
from holdfast.coordination.leader.save_targets import Ranks, TargetAgreement
from holdfast.coordination.leadership import Leadership
from holdfast.coordination.messages import (
    NO_STEP,
    BranchWish,
    CheckpointStatus,
    Command,
    HostState,
    Leaving,
    PullOrder,
    Report,
    TargetKind,
    WriteOrder,
)
from holdfast.coordination.rank_runs import ranks_in, runs_of
from holdfast.coordination.settings import (
    PRESERVED_MAX,
    QUIET_MAX,
    SUCCESSORS_MAX,
)
from holdfast.coordination.turn import AgentIdentity, Turn
from holdfast.format.names import CheckpointId, age_of

PASSED = "the ranks did not meet at one step"
"""The reason for dropping a checkpoint that some ranks have passed without a part."""


class Leader:
    """The leader of one attempt. `is_new`: it has begun the attempt, so it knows its timeline."""

    def __init__(self, identity: AgentIdentity, leadership: Leadership, *, is_new: bool) -> None:
        self._identity = identity
        self._settings = identity.settings
        self.census = RankCensus(leadership)
        self._delivery = OrderDelivery(identity, leadership, self.census.views)
        # A leader that has not begun the attempt itself may follow another agent or a silent
        # leader: targets may be set already, and a newer attempt may have begun.
        self._knows_targets = is_new
        self.table = CheckpointTable(
            leadership.attempt,
            leadership.limits,
            Recycling.NOTHING if leadership.is_first else Recycling.COMMITTED,
            knows_timeline=is_new,
        )
        self.targets = TargetAgreement()
        self.durability = Durability(identity.settings, self.table, self._ring)
        """The pulls, writes and commits; takes their outcomes."""
        self.mirror = Mirror(identity.host)
        """The copies to the remote tier; takes their outcomes."""
        self._protection = ProtectionWatch(identity.settings, self.table)
        self._have_hosts_changed = True
        self._placed_at_secs = float("-inf")
        """When replicas were placed on the hosts that lived then."""
        self._branch: BranchWish | None = None
        # Hosts keep reporting the branch that was refused; it must not be started again.
        self._refused_branch = False
        self._known_deleted: set[CheckpointId] = set()
        self.quiet: tuple[str, ...] = ()
        """The hosts of the attempt that have sent nothing for `quiet_secs`."""
        self._checked_at_secs: float | None = None
        self._begun_at_secs: float | None = None

    # Queries.

    @property
    def leadership(self) -> Leadership:
        """The attempt, with the present term and the present successors."""
        return self._delivery.leadership

    @property
    def term(self) -> int:
        """The term in which this leader leads."""
        return self.leadership.term

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of the attempt live, so that a checkpoint can become complete."""
        return self.census.is_whole

    @property
    def _has_been_whole(self) -> bool:
        """Whether the hosts of all ranks and their domains are known; stays true when ranks end."""
        return self.table.required > 0

    @property
    def is_broken(self) -> bool:
        """Whether a rank that was there has ended or its host is lost."""
        return self.census.is_broken

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being sealed, replicated, or made durable."""
        return self.is_sealing or bool(self.table.pending())

    @property
    def is_sealing(self) -> bool:
        """Whether a checkpoint is being sealed or replicated."""
        return self._protection.is_replicating or bool(self.table.open_entries())

    @property
    def save_cost_secs(self) -> float | None:
        """The training time that a save costs the slowest rank; None while none is known."""
        return self.census.save_cost_secs

    @property
    def wants_preserved(self) -> bool:
        """Whether to evaluate the RAM tier's policy: all checkpoints are known, its choice not."""
        is_asking = self.leadership.is_first and self._has_been_whole
        return is_asking and self.table.preserved is None

    @property
    def wanted_branch(self) -> BranchWish | None:
        """The branch that the ranks want to begin after they went back; None if there is none."""
        return self._branch

    @property
    def checkpoint_count(self) -> int:
        """The number of checkpoints that the leader tracks."""
        return len(self.table.entries)

    # Reports and storage.

    def inherit(self, turn: Turn, before: Leader) -> None:
        """Adopt the hosts' reports from the leader of the attempt that this one branches from."""
        for host, old in before.census.views.items():
            # The incarnation and the numbers carry over, so that overtaken reports stay rejected.
            if old.state is not None:
                view = self.census.views[host] = HostView(
                    host, old.incarnation, old.seq, old.version
                )
                view.last_report_at_secs = turn.now_secs
                self._take_state(view, old.state, is_present=False)
                self._delivery.mark([host])

    def preserve(self, checkpoints: frozenset[CheckpointId]) -> None:
        """Keep the RAM of `checkpoints`, of too many the newest, besides what rules require."""
        if not self._has_been_whole:
            # The policy has not seen the checkpoints of hosts that have not reported yet.
            return
        newest_first = sorted(checkpoints, key=age_of, reverse=True)
        self.table.preserved = frozenset(newest_first[:PRESERVED_MAX])
        self.table.is_changed = True

    def forget_branch(self) -> None:
        """Stop wanting the branch, whose start was refused."""
        self._branch = None
        self._refused_branch = True

    def accept_report(self, turn: Turn, sender: str, report: Report) -> None:
        """Apply a host's report, and schedule an answer if it is new or a heartbeat is due."""
        view = self.census.views.get(sender)
        if view is None:
            view = self.census.views[sender] = HostView(sender)
        elif view.is_stale(report, self._settings.lost_secs, turn.now_secs):
            return
        if report.term > self.term:
            self.outbid(report.term)
        is_new_version = report.version != view.version or report.incarnation != view.incarnation
        view.apply_report(report, turn.now_secs)
        is_following = self._delivery.acknowledge(view, report)
        if report.state.group == self.leadership.group:
            view.hello_at_secs = turn.now_secs if report.is_hello else float("-inf")
        # Until this leader's orders arrive, a host reports the ranks that wait for them apart: its
        # other report, without a group, does not say that they have ended.
        says_hello = turn.now_secs - view.hello_at_secs < self._settings.lost_secs
        is_apart = not report.state.group and says_hello
        # Applying a state compares it with all checkpoints; most reports repeat the last one.
        is_new = view.is_lost or is_following != view.is_following or view.state != report.state
        if is_new and not is_apart:
            if view.is_lost and view.known_ranks:
                turn.act(HostHeard(sender))
            view.is_lost, view.is_following = False, is_following
            self._take_state(
                view, report.state, is_present=report.attempt == self.leadership.attempt
            )
            self.mirror.take_report(turn, sender, report.state.mirrored)
        self._delivery.answer(turn, view, is_new=is_new_version)

    def outbid(self, term: int) -> None:
        """Take a term above `term`, if that is not below this leader's own."""
        self._delivery.outbid(term)

    def left(self, sender: str, message: Leaving) -> None:
        """Stop counting the RAM of a host whose agent has left."""
        view = self.census.views.get(sender)
        # A message of the host's previous agent must not remove its present one.
        if view is not None and view.incarnation == message.incarnation:
            self._forget(view)
            self.mirror.host_lost(sender)

    def listed(self, turn: Turn, item: DurableListed) -> None:
        """Apply a listing of the durable tier."""
        if item.newest_attempt == self.leadership.attempt:
            self.table.complete_timeline(item.limits)
        parts = {c: listed.ranks for c, listed in item.parts.items()}
        self.table.list_durable(item.committed, parts)
        self.durability.listed(turn)

    # Timed work.

    def run_due(self, turn: Turn) -> None:
        """Do all work that is due, and send each host its orders if they have changed."""
        if self._begun_at_secs is None:
            self._begun_at_secs = turn.now_secs
        if turn.now_secs >= self._next_check_secs(0.5):
            self._excuse_silence(turn.now_secs)
            self._checked_at_secs = turn.now_secs
            self._check_silent_hosts(turn)
        # Targets, then the assignment of writes and pulls, then the verdicts: each may change the
        # table, and the orders sent at the end contain the result of all.
        self._decide_targets(turn)
        if self._have_hosts_changed:
            # Orders that are computed before the next placement need the present hosts too.
            self.durability.forget_ring()
        if turn.now_secs >= self._place_at_secs():
            self._have_hosts_changed, self._placed_at_secs = False, turn.now_secs
            self.durability.place_replicas()
        self.durability.run_due(turn, is_whole=self.is_whole)
        self.mirror.run_due(turn, self.census.known_ranks)
        self.table.settle()
        self._protection.check_replicas(turn)
        for entry, status in self.table.status_changes:
            reason = entry.dropped or entry.failure
            if status in (CheckpointStatus.PROTECTED, CheckpointStatus.COMMITTED):
                self._protection.protected()
            turn.act(Reached(entry.id, status, entry.is_due, reason))
        self.table.status_changes.clear()
        parts = (self.table, self.census, self.targets, self.mirror)
        if any(part.is_changed for part in parts):
            self._delivery.mark_all()
            for part in parts:
                part.is_changed = False
        self._delivery.mark(self.table.changed_hosts)
        self.table.changed_hosts.clear()
        self._delivery.run_due(turn, self._commands)

    def next_at_secs(self, now_secs: float) -> float:
        """Return when `run_due` has work to do, if no input comes before."""
        storage_at_secs = min(
            self.durability.next_at_secs(now_secs), self.mirror.next_at_secs(now_secs)
        )
        at_secs = min(self._check_at_secs(), self._delivery.next_at_secs, self._place_at_secs())
        return min(at_secs, storage_at_secs)

    def _place_at_secs(self) -> float:
        """Return when to place replicas again; infinity if the hosts are the same."""
        if not self._have_hosts_changed:
            return float("inf")
        return self._placed_at_secs + self._settings.placing_secs

    def _check_at_secs(self) -> float:
        """Return when to look again for silent hosts, and for checkpoints that nobody completes."""
        # A host that leads itself alone is not silent; its reports are the occasion to look.
        is_idle = len(self.census.views) == 1 and not any(entry.is_open for entry in self.table)
        return self._next_check_secs(4.0 if is_idle else 0.5)

    def _next_check_secs(self, heartbeats: float) -> float:
        """Return when that many heartbeats have passed since the last look."""
        if self._checked_at_secs is None:
            return 0.0
        return self._checked_at_secs + heartbeats * self._settings.heartbeat_secs

    def _ring(self) -> Ring:
        """Return the hosts that live; those that had ranks of this attempt receive replicas."""
        here = {h: v for h, v in self.census.views.items() if v.state is not None and not v.is_lost}
        domains = {host: self.table.domains[host] for host in here}
        takers = {host: view.offers for host, view in here.items() if view.known_ranks}
        return Ring(domains, takers)

    def _take_state(self, view: HostView, state: HostState, *, is_present: bool) -> None:
        host = view.host
        if view.state is None or view.state.offers != state.offers:
            self._have_hosts_changed = True
        self.table.domains[host] = state.domain
        before = self.census.take_state(view, state)
        for checkpoint in state.deleted:
            self.table.delete(checkpoint)
            self.mirror.forget(checkpoint)
        self.table.apply_report(host, before, view.held)
        if not self.table.deleted.isdisjoint(before.keys() - view.held.keys()):
            # A host stopped holding a deleted checkpoint; orders to another host may confirm that.
            self.table.is_changed = True
        view.is_present = is_present
        self._drop_missed([view])
        if self.is_whole and not self._has_been_whole:
            self._note_whole()
        if view.is_following and self._knows_targets:
            for kind in state.wishes:
                self.targets.wish(kind)
            self.targets.accept_states(host, state.targets, self._ranks)
        branch = state.branch
        if branch is not None and branch.attempt == self.leadership.attempt and view.is_following:
            self._branch = branch if not self._refused_branch else None

    def _note_whole(self) -> None:
        """Note that all ranks have reported: the number of failure domains is known now."""
        rank_hosts = sorted(self.census.with_ranks(), key=lambda view: min(view.ranks))
        domains = {v.host: self.table.domains[v.host] for v in rank_hosts}
        required = min(self._settings.copies, len(set(domains.values())))
        self.table.set_required(required, self._ranks().highest)
        if self.leadership.is_first and self._identity.host in domains:
            self._delivery.leadership = replace(
                self.leadership,
                successors=successors_of(self._identity.host, domains, SUCCESSORS_MAX),
            )

    def _drop_missed(self, views: Collection[HostView]) -> None:
        """Drop the open checkpoints that ranks of `views` have passed without making their part.

        A report is compared with the open checkpoints when it arrives. A checkpoint may be reported
        later, by a host that was silent or is far behind, while the ranks that passed it have
        nothing new to report. So all views are compared again every half heartbeat.
        """
        open_entries = self.table.open_entries()
        if not open_entries:
            return
        ended: set[int] = set()
        last_steps: dict[int, int] = {}
        for view in views:
            if view.state is None or not view.is_present:
                continue
            ended |= view.known_ranks - view.ranks
            if view.state.group == self.leadership.group:
                for progress in view.state.progress:
                    last_steps.update(dict.fromkeys(ranks_in(progress.ranks), progress.step))
        # A silent host may have a replica of an ended rank's part.
        if not self._has_been_whole or (
            ended and any(v.is_lost for v in self.census.views.values())
        ):
            ended.clear()
        for entry in open_entries:
            missing = entry.missing.intersection(last_steps)
            if any(last_steps[rank] >= entry.id.step for rank in missing):
                self.table.drop(entry, PASSED)
            elif not entry.missing.isdisjoint(ended) and self.durability.has_looked_for(entry):
                self.table.drop(entry, "a rank ended before it made its part")

    def _decide_targets(self, turn: Turn) -> None:
        if not self.leadership.is_first:
            return
        if not self.is_whole:
            if self._has_been_whole:
                self.targets.withdraw()
            return
        if not self._knows_targets:
            rank_views = self.census.with_ranks()
            if not all(view.is_following for view in rank_views):
                return
            self._knows_targets = True
            states = [(v.host, s) for v in rank_views if v.state for s in v.state.targets]
            self.targets.recover(states)
            for view in rank_views:
                assert view.state is not None
                for kind in view.state.wishes:
                    self.targets.wish(kind)
                self.targets.accept_states(view.host, view.state.targets, self._ranks)
        # The steps of this host are known without its report, which may be older.
        own = self.census.views.get(self._identity.host)
        if own is not None:
            own.published = max(own.published, turn.published.highest)
        self.targets.propose(self._ranks)

    def _ranks(self) -> Ranks:
        origin = self.leadership.origin
        highest = max(self.census.highest_step, origin.step if origin else NO_STEP)
        return Ranks(self.census.hosts, highest)

    def _excuse_silence(self, now_secs: float) -> None:
        """Count the silence of hosts from now on, if this agent was stopped for a while.

        What the hosts have sent meanwhile may not be read yet. An agent that took all of them for
        lost would release the lease of a live attempt, and another start could take over the run.
        """
        checked_at_secs = self._checked_at_secs
        if checked_at_secs is None or now_secs - checked_at_secs < self._settings.silence_secs:
            return
        for view in self.census.views.values():
            if not view.is_lost:
                view.last_report_at_secs = now_secs

    def _check_silent_hosts(self, turn: Turn) -> None:
        oldest = turn.now_secs - self._settings.lost_secs
        for view in self.census.views.values():
            # If this agent was stopped for a while, its own host is still not lost.
            is_silent = view.last_report_at_secs < oldest and view.host != self._identity.host
            if not view.is_lost and is_silent:
                if view.known_ranks:
                    turn.act(HostSilent(view.host, self._settings.lost_secs))
                self._forget(view, is_silent=True)
                self.mirror.host_lost(view.host)
            if view.is_lost and (view.known_ranks or view.host in self.leadership.successors):
                # The host may follow a successor by now; its answer to these orders shows that.
                self._delivery.send(turn, view, self._commands()(view))
        self._note_quiet(turn.now_secs)
        self._drop_missed(self.census.views.values())
        self._protection.check_lateness(turn)
        # Hosts of earlier attempts get time to report their parts of open checkpoints.
        begun_at_secs = turn.now_secs if self._begun_at_secs is None else self._begun_at_secs
        has_gathered = turn.now_secs - begun_at_secs >= self._settings.gather_secs
        if not self.leadership.is_first or not has_gathered:
            return
        for entry in list(self.table.entries.values()):
            if entry.is_open and entry.id.attempt < self.leadership.attempt:
                self.table.drop(entry, "its attempt is over")

    def _note_quiet(self, now_secs: float) -> None:
        """Note which hosts of the attempt send nothing, and report a change to all others.

        A successor leads because rank 0's host is silent: it need not have had a report of that.
        """
        oldest = now_secs - self._settings.quiet_secs
        first = self.leadership.successors[0] if not self.leadership.is_first else None
        quiet = sorted(
            view.host
            for view in self.census.views.values()
            if (view.known_ranks or view.host == first)
            and view.last_report_at_secs < oldest
            and view.host != self._identity.host
        )[:QUIET_MAX]
        if tuple(quiet) != self.quiet:
            self.quiet = tuple(quiet)
            self._delivery.mark_all()

    def _forget(self, view: HostView, *, is_silent: bool = False) -> None:
        """Stop counting a host's RAM; the ranks of one that `is_silent` count as lost too."""
        self.table.apply_report(view.host, view.held, {})
        if is_silent:
            self.census.lose(view)
        else:
            self.census.forget(view)
        self._have_hosts_changed = True

    # Orders.

    def _commands(self) -> Callable[[HostView], Command]:
        """Return what makes the command of each host, from what all have in common now."""
        return partial(self._command, self._common())

    def _common(self) -> _Common:
        """Return what the commands of all hosts have in common now."""
        last_step = self.targets.agreed(TargetKind.PREEMPTION)
        return _Common(
            # The step at which all stop is written first: the host may end at any moment. The only
            # rank of a job may stop at a later one.
            entries=sorted(self.table, key=lambda e: last_step is None or e.id.step < last_step),
            command=Command(
                targets=self.targets.targets() if self._knows_targets else None,
                mirrored=self.mirror.newest,
                is_settled=self.durability.is_settled,
                is_closed=self.census.is_closed,
                ended=self.census.ended,
                quiet=self.quiet,
            ),
        )

    def _command(self, common: _Common, view: HostView) -> Command:
        writes, pulls = [], []
        for entry in common.entries:
            ranks = entry.writes.get(view.host)
            if ranks:
                writes.append(WriteOrder(entry.id, runs_of(ranks), entry.round))
            by_source: dict[str, list[int]] = {}
            for rank, source in entry.pulls.get(view.host, ()):
                by_source.setdefault(source, []).append(rank)
            for source, pulled in sorted(by_source.items()):
                pulls.append(PullOrder(entry.id, entry.part_count, runs_of(pulled), source))
        return msgspec.structs.replace(
            common.command,
            verdicts=tuple(self.table.verdict(checkpoint) for checkpoint in view.held),
            writes=tuple(writes),
            pulls=tuple(pulls),
            mirror=self.mirror.order_for(view.host),
            deleted_everywhere=self._confirmed_deletes(view),
        )

    def _confirmed_deletes(self, view: HostView) -> tuple[CheckpointId, ...]:
        """Return the checkpoints deleted on a host of which no host holds or commits anything.

        A successor confirms none: while the network is partitioned, it may see some hosts only.
        """
        if view.state is None or not (self.leadership.is_first and self._has_been_whole):
            return ()
        new = set(view.state.deleted) - self._known_deleted
        if new and any(other.is_lost and other.known_ranks for other in self.census.views.values()):
            # A host of the attempt is silent, and may come back with the checkpoint.
            new.clear()
        for checkpoint in new:
            is_held = any(checkpoint in other.held for other in self.census.views.values())
            if not is_held and checkpoint != self.durability.committing:
                self._known_deleted.add(checkpoint)
        return tuple(c for c in view.state.deleted if c in self._known_deleted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    """What the commands of all hosts have in common: made once for thousands of them.

    Attributes:
        entries: the checkpoints in the order in which they are written.
        command: a command without what is for one host.
    """

    entries: list[CheckpointEntry]
    command: Command
