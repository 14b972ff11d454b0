"""The follower: the role of every host, the leader's included.

It reports this host's whole state to its leader (`Report`) and applies the leader's `Orders`.

Invariants:
- Orders of an older attempt are ignored once a newer one is known.
- From this host's report to a start until that attempt has begun, nothing is dropped: the new
  attempt relies on the report.
- A report that was not acknowledged is sent again; if the leader is silent, to the next successor.
"""

from __future__ import annotations

from holdfast.coordination.effects import (
    AttemptJoined,
    DeleteConfirmed,
    Fenced,
    GroupRefused,
    LeaderChanged,
    RanksEnded,
)
from holdfast.coordination.follower.election import Election, leader_of
from holdfast.coordination.follower.host_inventory import HostInventory
from holdfast.coordination.follower.mirror_parts import MirrorShare
from holdfast.coordination.follower.rank_group import RankGroup, found_group, joined_group
from holdfast.coordination.follower.report_delivery import ReportDelivery
from holdfast.coordination.follower.target_cells import TargetCells
from holdfast.coordination.inputs import (
    BranchWanted,
    CopiesOffered,
    Found,
    PartAbandoned,
    PartBegun,
    PartSealed,
    Published,
    RankJoined,
    RankLeft,
    RankLost,
    TargetWritten,
)
from holdfast.coordination.leadership import Leadership, limits_after
from holdfast.coordination.messages import (
    NO_STEP,
    BranchWish,
    HostState,
    Leaving,
    Newer,
    Orders,
    RankProgress,
    Refusal,
    Refused,
    TargetKind,
)
from holdfast.coordination.rank_runs import ranks_in, runs_of
from holdfast.coordination.settings import DELETED_MAX, step_poll_secs
from holdfast.coordination.turn import AgentIdentity, Turn
from holdfast.format.names import NO_ATTEMPT, STEP_MAX, AttemptId, CheckpointId

POLL_SECS = 0.05
"""How often the published steps are read while a target waits for ranks."""


class Follower:
    """The follower of one host; see the module's docstring.

    Attributes:
        attempt: the newest attempt known here; `NO_ATTEMPT` if none is.
        leadership: what a successor has to know to lead that attempt; None if unknown.
        group: the trainers here that belong to the attempt; None if there are none.
        election: the leader that this host follows.
        inventory: the checkpoints of which this host holds parts.
        mirror: what this host writes to the remote tier.
        cells: the target cells.
    """

    def __init__(self, identity: AgentIdentity) -> None:
        self._identity = identity
        self._settings = identity.settings
        self.attempt = NO_ATTEMPT
        self.leadership: Leadership | None = None
        self.group: RankGroup | None = None
        self.waiting: dict[str, RankGroup] = {}
        """The trainers here whose attempt has not begun, by their tokens, in order of arrival."""
        self.election = Election(identity.settings)
        self.inventory = HostInventory(identity.settings)
        self.mirror = MirrorShare()
        self.cells = TargetCells()
        self._wishes: set[TargetKind] = set()
        self._branch: BranchWish | None = None
        self._reports = ReportDelivery(identity, self.election)
        # Nothing is dropped until then: a start may rely on what was reported.
        self._frozen_until_secs = float("-inf")
        self._is_changed = True
        self._orders: Orders | None = None
        """The last ones that a leader has sent to this agent."""
        # The attempt, and the leader whose orders arrived last.
        self._led_by = NO_ATTEMPT, ""
        self._deleted: dict[CheckpointId, bool] = {}
        """The checkpoints that were deleted here, and whether that was confirmed: no host has them.
        """
        self.ended_attempt = NO_ATTEMPT
        """The newest attempt of which a rank has ended here."""
        self.start_waits_for = ""
        """What the start on this host waits for; empty if there is none."""
        self._published = Published()
        self._published_at_secs = float("-inf")
        """When the published steps last changed."""

    def adopt_state(self, turn: Turn, found: Found) -> None:
        """Adopt what a previous agent left on this host."""
        self.attempt = found.attempt
        self.group = found_group(found)
        self.ended_attempt = found.ended_attempt
        self.inventory.adopt_images(found)
        self.cells.adopt_cells(turn, found)
        successors = found.successors or ((found.leader,) if found.leader else ())
        self.election.follow(found.attempt, successors, 0, turn.now_secs)
        if successors:
            self._learn_leadership(found.group, found.rank_count, found.origin)
        if self.group is not None:
            for rank in self.group.ranks:
                step = self.inventory.highest_sealed(found.attempt, rank)
                self.group.begun[rank] = self.group.sealed[rank] = step

    @property
    def begins_here(self) -> RankGroup | None:
        """The first of the waiting groups whose attempt this host has to begin; None if none."""
        host = self._identity.host
        return next((group for group in self.waiting.values() if group.leader == host), None)

    @property
    def is_settled(self) -> bool:
        """Whether, as far as its leader knows, no checkpoint needs this host's RAM any more."""
        is_told = self._orders is not None and self._orders.command.is_settled
        return is_told or len(self.inventory) == 0

    @property
    def is_closed(self) -> bool:
        """Whether all ranks of the newest attempt, on all hosts, have detached."""
        orders = self._orders
        return orders is not None and orders.attempt == self.attempt and orders.command.is_closed

    def quiet_hosts(self, now_secs: float) -> tuple[str, ...]:
        """Return the hosts that send nothing: the leader, or those of the leader's last orders."""
        election = self.election
        if election.leader is None:
            return ()
        if now_secs - election.last_orders_at_secs >= self._settings.quiet_secs:
            return (election.leader,)
        if election.incarnation == 0 and election.term > 0:
            # The next successor has sent no orders yet; the one before it is silent.
            return (leader_of(election.successors, election.term - 1),)
        return self._orders.command.quiet if self._orders is not None else ()

    # Local events.

    def joined(self, turn: Turn, item: RankJoined) -> None:
        """Add a trainer: to the present group, or to one whose attempt has not begun."""
        self._is_changed = True
        if self.group is not None and self.group.token == item.group:
            self.group.ranks.add(item.rank)
            return
        for token in [token for token in self.waiting if item.takeover and token != item.group]:
            self._refuse(turn, token, "another start took its place", Refusal.BUSY)
        if item.group not in self.waiting:
            # Other waiting starts are not refused: two hosts may get two starts in different
            # orders, and then each start would lose a rank. The attempt's record decides.
            self.waiting[item.group] = joined_group(item, turn.now_secs)
        self.waiting[item.group].ranks.add(item.rank)

    def left(self, item: RankLeft | RankLost) -> None:
        """Remove a trainer that has detached or was lost."""
        self._is_changed = True
        if self.group is not None and self.group.token == item.group:
            self.ended_attempt = self.attempt
        for group in (self.group, self.waiting.get(item.group)):
            if group is not None and group.token == item.group and item.rank in group.ranks:
                group.ranks.discard(item.rank)
                group.offers.pop(item.rank, None)
                group.is_broken |= isinstance(item, RankLost)
                (group.lost if isinstance(item, RankLost) else group.left).add(item.rank)
        self.waiting = {token: group for token, group in self.waiting.items() if group.ranks}

    def note_begun(self, item: PartBegun) -> None:
        """Note that a rank has read its target and begun a save."""
        if self.group is not None and item.id.attempt == self.group.attempt:
            self._is_changed = True
            begun = self.group.begun
            begun[item.rank] = max(begun.get(item.rank, NO_STEP), item.id.step)

    def offered(self, item: CopiesOffered) -> None:
        """Record the parts of other ranks that a rank here copies."""
        if self.group is not None:
            self._is_changed = True
            self.group.offers[item.rank] = item.parts

    def note_sealed(self, turn: Turn, item: PartSealed | PartAbandoned) -> None:
        """Note that a rank's part is whole, or could not be made."""
        self._is_changed = True
        group = self.group
        if group is None or item.id.attempt != group.attempt:
            if item.id not in self.inventory:
                reason = f"attempt {item.id.attempt} is not the present one here"
                self.inventory.refuse(turn, item.id, reason)
            return
        # An abandoned part counts as well: the rank has passed its step.
        for steps in (group.begun, group.sealed):
            steps[item.rank] = max(steps.get(item.rank, NO_STEP), item.id.step)
        if isinstance(item, PartSealed):
            self.inventory.note_sealed(turn, item)
        else:
            self.inventory.note_abandoned(turn, item)

    def wished(self, kind: TargetKind) -> None:
        """Report a wish for a checkpoint until its target is accepted."""
        if self.group is not None and kind not in self._wishes:
            self._wishes.add(kind)
            self._is_changed = True

    def branch_wanted(self, item: BranchWanted) -> None:
        """Report that the ranks here went back to an older checkpoint; each rank gives this."""
        if self.group is not None and item.attempt == self.group.attempt:
            self._branch = BranchWish(item.attempt, item.origin)
            self._is_changed = True

    def target_written(self, item: TargetWritten) -> None:
        """Apply the steps that were read after a target cell was written."""
        self._is_changed = True
        # The wish to stop stays until the target is confirmed: until then it may be refused.
        if self.cells.written(item) and item.kind is not TargetKind.PREEMPTION:
            self._wishes.discard(item.kind)

    def deleted(self, turn: Turn, checkpoint: CheckpointId) -> None:
        """Report a checkpoint that was removed here, to this leader and to later ones."""
        # Deleting twice keeps the confirmation, and moves the checkpoint to the newest end. Without
        # a leader there is no other host to ask.
        is_gone = self._deleted.pop(checkpoint, False) or self.election.leader is None
        self._deleted[checkpoint] = is_gone
        while len(self._deleted) > DELETED_MAX:
            del self._deleted[next(iter(self._deleted))]
        self._is_changed = True
        if is_gone:
            turn.act(DeleteConfirmed(checkpoint))

    def changed(self) -> None:
        """Note that the state to report may have changed."""
        self._is_changed = True

    def leave(self, turn: Turn) -> None:
        """Notify the leader that this host's RAM is going away."""
        leader = self.election.leader
        if leader is not None:
            leaving = Leaving(
                run=self._identity.run,
                attempt=self.attempt,
                incarnation=self._identity.incarnation,
            )
            turn.send(leader, leaving)

    # Messages of other hosts.

    def apply_orders(self, turn: Turn, sender: str, orders: Orders) -> None:
        """Apply a leader's orders if they are the newest; answer older ones with `Newer`."""
        if orders.attempt < self.attempt or (
            orders.attempt == self.attempt == self.election.attempt
            and orders.term < self.election.term
        ):
            self.send_newer(turn, sender)
            return
        # An order that was sent to the agent before this one says nothing about what this one has.
        is_for_this = orders.follower_incarnation in (0, self._identity.incarnation)
        if not self.election.accepts(orders, turn.now_secs, is_for_this=is_for_this):
            return
        # Another host may have reported the attempt before its orders come, so a waiting group
        # enters it even if its number is known.
        if self.attempt < orders.attempt or orders.group in self.waiting:
            self._enter(turn, orders)
        self._learn_leadership(orders.group, orders.rank_count, orders.origin)
        self._note_leader(turn)
        self._is_changed = True
        if not is_for_this:
            return
        self._reports.acknowledged(orders.ack)
        command = orders.command
        if command.targets is not None:
            if self.group is not None and self.group.token == orders.group:
                self.cells.apply_targets(turn, command.targets)
            if self.cells.is_confirmed(TargetKind.PREEMPTION):
                self._wishes.discard(TargetKind.PREEMPTION)
        self.inventory.apply_command(turn, command)
        self.mirror.apply_order(turn, command.mirror)
        self.mirror.learn_newest(turn, command.mirrored)
        for checkpoint in command.deleted_everywhere:
            if self._deleted.get(checkpoint) is False:
                self._deleted[checkpoint] = True
                turn.act(DeleteConfirmed(checkpoint))
        self._notify_ended(turn, orders)
        self._orders = orders

    def _note_leader(self, turn: Turn) -> None:
        """Report a change of the leader within an attempt, once its orders have arrived."""
        (attempt, before), leader = self._led_by, self.election.leader
        assert leader is not None
        self._led_by = self.attempt, leader
        if before and attempt == self.attempt and before != leader and self.group is not None:
            turn.act(LeaderChanged(leader, before, leader == self.election.successors[0]))

    def on_newer(self, turn: Turn, message: Newer) -> None:
        """Follow a newer attempt, or a later term of the present one."""
        if message.attempt > self.attempt:
            reason = f"attempt {message.attempt} is led by {message.leader}"
            self.fence(turn, message.attempt, reason)
            self.election.follow(message.attempt, (message.leader,), 0, turn.now_secs)
        elif message.attempt == self.attempt and message.term > self.election.term:
            successors = self.election.successors
            if message.leader in successors:
                self.election.follow(self.attempt, successors, message.term, turn.now_secs)
                self._is_changed = True

    def on_refused(self, turn: Turn, message: Refused) -> None:
        """Refuse the trainers here whose attempt does not begin."""
        if message.group in self.waiting:
            self._refuse(turn, message.group, message.reason, message.kind)

    def report_held(self, turn: Turn, starter: str) -> None:
        """Report to a start what this host holds, and drop nothing for `gather_secs`.

        A start repeats its question until its attempt has begun, so the time is extended.
        """
        self._frozen_until_secs = turn.now_secs + self._settings.gather_secs
        state = self._state(None, is_for_start=True)
        self._reports.answer(turn, starter, self.attempt, state)

    def send_newer(self, turn: Turn, host: str) -> None:
        """Send the newest attempt and its leader to a host that does not know them."""
        leader = self.election.leader
        if leader is not None and self.election.attempt == self.attempt and host != turn.host:
            newer = Newer(
                run=self._identity.run,
                attempt=self.attempt,
                leader=leader,
                term=self.election.term,
            )
            turn.send(host, newer)

    # Timed work.

    def run_due(self, turn: Turn) -> None:
        """Check the target cells, begin what is due, and report what has changed."""
        now_secs = turn.now_secs
        if turn.published != self._published:
            self._published, self._published_at_secs = turn.published, now_secs
        for token, waiting in list(self.waiting.items()):
            if now_secs - waiting.since_secs >= self._settings.joining_secs:
                self._refuse(turn, token, self._late_text(waiting), Refusal.UNREACHED)
        group = self.group
        if self.cells.is_waiting and group is not None:
            self.cells.check_ranks(group.ranks, group.begun, turn.published.lowest)
            self._is_changed = True
        if self.election.next_if_silent(now_secs):
            self._is_changed = True
        # Waiting trainers mean that this host has reported to a start.
        is_frozen = bool(self.waiting) or now_secs < self._frozen_until_secs
        if self.inventory.run_due(turn, is_frozen):
            self._is_changed = True
        make_state = self._state_for if self._is_changed else None
        self._reports.run_due(turn, self.attempt, self.waiting.values(), make_state)
        self._is_changed = False

    def next_at_secs(self, now_secs: float) -> float:
        """Return when `run_due` has work to do, if no input comes before."""
        times = [self.inventory.next_at_secs(now_secs), self._reports.next_at_secs()]
        if self.election.leader is not None:
            times.append(self.election.silent_at_secs())
        for group in self.waiting.values():
            times.append(group.hello.due_at_secs(self._settings))
            times.append(group.since_secs + self._settings.joining_secs)
        if self.cells.is_waiting:
            times.append(now_secs + step_poll_secs(POLL_SECS, now_secs - self._published_at_secs))
        return min(times)

    def _state_for(self, start: RankGroup | None) -> HostState:
        """Return the state for the start of a group, or for the leader."""
        return self._state(start or self.group, is_for_start=start is not None)

    def _state(self, group: RankGroup | None, *, is_for_start: bool) -> HostState:
        held = self.inventory.states(with_status=is_for_start)
        mirrored = self.mirror.state if not is_for_start else None
        ended_attempt = self.ended_attempt if is_for_start else NO_ATTEMPT
        if group is None:
            return HostState(
                group="",
                domain=self._identity.domain,
                held=held,
                peers=self.election.successors,
                deleted=tuple(self._deleted),
                ended_attempt=ended_attempt,
                mirrored=mirrored,
            )
        is_present = group is self.group
        sealed_ranks: dict[int, list[int]] = {}
        for rank, step in group.sealed.items():
            sealed_ranks.setdefault(step, []).append(rank)
        return HostState(
            group=group.token,
            domain=self._identity.domain,
            rank_count=group.rank_count,
            ranks=runs_of(group.ranks),
            is_broken=group.is_broken,
            offers=runs_of(group.offered),
            left=runs_of(group.left),
            lost=runs_of(group.lost),
            progress=tuple(
                RankProgress(runs_of(ranks), step) for step, ranks in sorted(sealed_ranks.items())
            ),
            targets=self.cells.states() if is_present else (),
            wishes=tuple(sorted(self._wishes)) if is_present else (),
            held=held,
            branch=self._branch if is_present else None,
            peers=() if is_present else self.election.successors,
            deleted=tuple(self._deleted),
            ended_attempt=ended_attempt,
            mirrored=mirrored,
        )

    def _late_text(self, waiting: RankGroup) -> str:
        """Return what the trainers of `waiting` have waited for until the timeout."""
        awaited = f"host {waiting.leader}, where rank 0 is, has not begun it"
        if waiting.leader == self._identity.host and self.start_waits_for:
            awaited = self.start_waits_for
        return f"{awaited} within {self._settings.joining_secs:.0f} s"

    def _notify_ended(self, turn: Turn, orders: Orders) -> None:
        """Notify the trainers here of ranks on other hosts that have ended, each rank once."""
        group = self.group
        if group is None or group.token != orders.group:
            return
        for ended in orders.command.ended:
            new = [rank for rank in ranks_in(ended.ranks) if rank not in group.notified_ended]
            # The ranks here were notified at once of those that ended on this host.
            if new and ended.host != self._identity.host:
                group.notified_ended.update(new)
                turn.act(RanksEnded(group.token, ended.host, tuple(new), ended.is_lost))

    def _learn_leadership(self, group: str, rank_count: int, origin: CheckpointId | None) -> None:
        """Keep what a successor has to know to lead in the leader's place."""
        attempt = self.election.attempt
        limits = limits_after({}, attempt, origin, STEP_MAX)
        self.leadership = Leadership(
            attempt=attempt,
            group=group,
            rank_count=rank_count,
            origin=origin,
            limits=limits,
            successors=self.election.successors,
        )

    def _enter(self, turn: Turn, orders: Orders) -> None:
        """Enter a newer attempt: of waiting trainers here, or of trainers on other hosts."""
        waiting = self.waiting.pop(orders.group, None)
        if waiting is not None:
            self.fence(turn, orders.attempt, "another start has taken its place")
            self.group = waiting
        elif self.group is None or self.group.token != orders.group:
            self.fence(turn, orders.attempt, "trainers on other hosts have taken the run over")
        self.attempt = orders.attempt
        self.cells.clear_all(turn)
        self.inventory.release()
        self.mirror.release(turn)
        self._wishes.clear()
        self._branch = None
        self._is_changed = True
        self._frozen_until_secs = float("-inf")
        if self.group is not None:
            self.group.begin(orders.attempt, orders.origin)
            turn.act(AttemptJoined(orders.group, orders.attempt, orders.origin, orders.successors))

    def fence(self, turn: Turn, attempt: AttemptId, reason: str) -> None:
        """Stop the trainers here: a newer attempt of other trainers has begun.

        Its leader may be unknown. Until it is known, this host reports to the hosts that led
        before, whose answers name it.
        """
        self.attempt = attempt
        self.election.follow(attempt, self.election.successors, 0, turn.now_secs)
        self._is_changed = True
        group, self.group = self.group, None
        self.cells.clear_all(turn)
        self.inventory.release()
        self.mirror.release(turn)
        self._wishes.clear()
        self._branch = None
        if group is not None and group.ranks:
            turn.act(Fenced(group.token, attempt, reason))

    def _refuse(self, turn: Turn, token: str, reason: str, kind: Refusal) -> None:
        del self.waiting[token]
        turn.act(GroupRefused(token, reason, kind))
