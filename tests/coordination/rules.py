"""Rules of the protocol, each broken on purpose; the simulator has to detect each breach."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from holdfast.coordination.follower.election import Election
from holdfast.coordination.follower.follower import Follower
from holdfast.coordination.follower.target_cells import TargetCells
from holdfast.coordination.leader import save_targets
from holdfast.coordination.leader.checkpoint_table import CheckpointEntry, CheckpointTable
from holdfast.coordination.leader.durability import Durability
from holdfast.coordination.leader.host_view import HostView
from holdfast.coordination.leader.leader import Leader
from holdfast.coordination.leader.mirror import Mirror
from holdfast.coordination.leader.rank_census import RankCensus
from holdfast.coordination.messages import TargetKind
from holdfast.coordination.start.bootstrap import Bootstrap
from holdfast.coordination.turn import Channel
from holdfast.format.names import AttemptId, age_of

Patch = Callable[[object, str, Any], None]
Breach = Callable[[Patch], None]


def accept_without_looking(patch: Patch) -> None:
    written = TargetCells.written

    def blind(self: TargetCells, item: Any) -> bool:
        return written(self, replace(item, highest=-1, is_missed=False))

    patch(TargetCells, "written", blind)


def agree_before_all_accept(patch: Patch) -> None:
    patch(save_targets, "_has_all", lambda found, hosts: bool(found))


def recycle_once_complete(patch: Patch) -> None:
    def count(self: CheckpointEntry, rank: int, required: int, domains: Any) -> None:
        _count(self, rank, min(required, 1), domains)

    _count = CheckpointEntry.update_rank
    patch(CheckpointEntry, "update_rank", count)


def drop_all_but_the_newest_part(patch: Patch) -> None:
    verdict = CheckpointTable.verdict

    def hasty(self: CheckpointTable, checkpoint: Any) -> Any:
        found = verdict(self, checkpoint)
        newest = max(self.entries, key=age_of, default=checkpoint)
        return type(found)(found.id, found.status, found.id != newest, found.reason)

    patch(CheckpointTable, "verdict", hasty)


def never_send_again(patch: Patch) -> None:
    patch(Channel, "due_at_secs", lambda self, settings: float("inf"))


def obey_older_attempts(patch: Patch) -> None:
    apply_orders = Follower.apply_orders

    def gullible(self: Follower, turn: Any, sender: str, orders: Any) -> None:
        if orders.attempt < self.attempt:
            self.inventory.apply_command(turn, orders.command)
        else:
            apply_orders(self, turn, sender, orders)

    patch(Follower, "apply_orders", gullible)


def believe_overtaken_reports(patch: Patch) -> None:
    patch(HostView, "is_stale", lambda self, report, lost_secs, now_secs: False)


def obey_overtaken_orders(patch: Patch) -> None:
    def accepts(self: Election, orders: Any, now_secs: float) -> bool:
        self.attempt, self.successors = orders.attempt, orders.successors
        self.term, self.incarnation, self.seq = orders.term, orders.incarnation, orders.seq
        self.ack, self.last_orders_at_secs = orders.version, now_secs
        return True

    patch(Election, "accepts", accepts)


def commit_without_the_last_part(patch: Patch) -> None:
    def durable_pending(self: Durability) -> Any:
        for found in self._table.pending():
            if len(found.durable) >= max(1, found.part_count - 1):
                yield found

    patch(Durability, "_durable_pending", durable_pending)


def count_parts_of_other_steps(patch: Patch) -> None:
    take = CheckpointTable.apply_report

    def mixed(self: CheckpointTable, host: str, old: Any, new: Any) -> None:
        take(self, host, old, new)
        ids = sorted(new)
        for older, newer in itertools.pairwise(ids):
            known = self.entries.get(older)
            other = self.entries.get(newer)
            if known is not None and other is not None and known.part_count == other.part_count:
                for rank, holders in known.holders.items():
                    other.holders.setdefault(rank, {}).update(holders)
                    other.update_rank(rank, self.required, self.domains)
                self._advance(other)

    patch(CheckpointTable, "apply_report", mixed)


def drop_while_an_attempt_begins(patch: Patch) -> None:
    from holdfast.coordination.follower.host_inventory import HostInventory

    work = HostInventory.run_due
    patch(HostInventory, "run_due", lambda self, turn, is_frozen: work(self, turn, False))


def never_take_the_lead_back(patch: Patch) -> None:
    patch(Leader, "outbid", lambda self, term: None)


def keep_words_of_the_attempt_before(patch: Patch) -> None:
    patch(TargetCells, "clear_all", lambda self, turn: self._cells.clear())


def go_on_from_the_newest_committed(patch: Patch) -> None:
    from holdfast.coordination.start import bootstrap

    def choose(states: Any, durable: Any, put_back: Any) -> Any:
        found = [c for c in durable.committed if c.step <= durable.limits.get(c.attempt, -1)]
        return max(found, default=None)

    patch(bootstrap, "choose_checkpoint", choose)


def begin_before_all_hosts_have_reported(patch: Patch) -> None:
    from holdfast.coordination.start import bootstrap

    gather = Bootstrap._gather

    def hasty(self: Bootstrap, turn: Any) -> None:
        if turn.now_secs >= self.since_secs + 10:
            self._phase = bootstrap._Phase.LIST
        else:
            gather(self, turn)

    patch(Bootstrap, "_gather", hasty)


def know_an_attempt_by_its_hosts_name(patch: Patch) -> None:
    listed_durable = Bootstrap.listed_durable

    def credulous(self: Bootstrap, item: Any) -> None:
        is_of_this_name = item.leader == self.identity.host
        listed_durable(self, replace(item, is_begun_here=is_of_this_name))

    patch(Bootstrap, "listed_durable", credulous)


def keep_what_ranks_have_missed(patch: Patch) -> None:
    patch(Leader, "_drop_missed", lambda self, views: None)


def look_at_a_host_only_when_it_reports(patch: Patch) -> None:
    drop_missed = Leader._drop_missed
    patch(
        Leader,
        "_drop_missed",
        lambda self, views: drop_missed(self, views) if isinstance(views, list) else None,
    )


def forget_the_ranks_of_silent_hosts(patch: Patch) -> None:
    forget = RankCensus.forget

    def forget_all(self: RankCensus, view: Any) -> None:
        forget(self, view)
        self.hosts -= {view.host}

    patch(RankCensus, "forget", forget_all)


def never_pull(patch: Patch) -> None:
    patch(Durability, "_order_pulls", lambda self, entry: None)


def call_deleted_what_hosts_still_hold(patch: Patch) -> None:
    patch(Leader, "_confirmed_deletes", lambda self, view: view.state.deleted if view.state else ())


def forget_what_was_deleted(patch: Patch) -> None:
    def delete(self: CheckpointTable, checkpoint: Any) -> None:
        self._deleted[checkpoint] = None

    patch(CheckpointTable, "delete", delete)


def join_without_a_record(patch: Patch) -> None:
    def begin(self: Bootstrap, turn: Any) -> None:
        number = self.listed.newest_attempt.number + 1 if self.listed else 1
        self._begin_leading(AttemptId.of_start(number, self.group.token))

    patch(Bootstrap, "_begin", begin)


def stop_before_it_is_agreed(patch: Patch) -> None:
    apply = TargetCells.apply_targets

    def eager(self: TargetCells, turn: Any, wanted: Any) -> None:
        eager_ones = [
            type(t)(t.kind, t.step, True) if t.kind is TargetKind.PREEMPTION else t for t in wanted
        ]
        apply(self, turn, eager_ones)

    patch(TargetCells, "apply_targets", eager)


def forget_what_failed(patch: Patch) -> None:
    def failed(self: Durability, turn: Any, item: Any) -> None:
        self._tries += 1

    patch(Durability, "commit_failed", failed)


def commit_a_copy_without_the_last_part(patch: Patch) -> None:
    done = Mirror.done.fget
    assert done is not None

    def hopeful(self: Mirror) -> Any:
        found = done(self)
        count = self.target.part_count if self.target is not None else 0
        return frozenset(range(count)) if len(found) >= max(1, count - 1) else found

    patch(Mirror, "done", property(hopeful))


def leave_parts_to_hosts_that_fail(patch: Patch) -> None:
    patch(Mirror, "_take_over", lambda self, host: None)


def try_a_copy_once(patch: Patch) -> None:
    failed = Mirror._failed

    def final(self: Mirror, turn: Any, reason: str) -> None:
        failed(self, turn, reason)
        self._try_at_secs = float("inf")

    patch(Mirror, "_failed", final)


def believe_copies_of_other_rounds(patch: Patch) -> None:
    take_report = Mirror.take_report

    def gullible(self: Mirror, turn: Any, host: str, mirrored: Any) -> None:
        if mirrored is not None and self.target is not None:
            share = (self._shares or {}).get(host)
            if share is not None:
                share.done |= share.ranks
        take_report(self, turn, host, mirrored)

    patch(Mirror, "take_report", gullible)


def report_a_copy_before_it_is_there(patch: Patch) -> None:
    want = Mirror.want

    def hopeful(self: Mirror, target: Any) -> None:
        want(self, target)
        self.newest, self.is_changed = target.id, True

    patch(Mirror, "want", hopeful)


def keep_copies_to_the_leader(patch: Patch) -> None:
    command = Leader._command
    patch(
        Leader,
        "_command",
        lambda self, *others: msgspec.structs.replace(command(self, *others), mirrored=None),
    )


BREACHES: dict[str, Breach] = {
    breach.__name__: breach
    for breach in (
        accept_without_looking,
        agree_before_all_accept,
        recycle_once_complete,
        drop_all_but_the_newest_part,
        never_send_again,
        obey_older_attempts,
        believe_overtaken_reports,
        obey_overtaken_orders,
        commit_without_the_last_part,
        count_parts_of_other_steps,
        drop_while_an_attempt_begins,
        never_take_the_lead_back,
        keep_words_of_the_attempt_before,
        go_on_from_the_newest_committed,
        begin_before_all_hosts_have_reported,
        know_an_attempt_by_its_hosts_name,
        keep_what_ranks_have_missed,
        look_at_a_host_only_when_it_reports,
        forget_the_ranks_of_silent_hosts,
        never_pull,
        call_deleted_what_hosts_still_hold,
        forget_what_was_deleted,
        join_without_a_record,
        stop_before_it_is_agreed,
        forget_what_failed,
    )
}

BREACHES_OF_COPIES: dict[str, Breach] = {
    breach.__name__: breach
    for breach in (
        commit_a_copy_without_the_last_part,
        leave_parts_to_hosts_that_fail,
        try_a_copy_once,
        believe_copies_of_other_rounds,
        report_a_copy_before_it_is_there,
        keep_copies_to_the_leader,
    )
}
