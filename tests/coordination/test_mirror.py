"""The copies to the remote tier: their leader's orders, and what one host does with them."""

from __future__ import annotations

from holdfast.coordination import inputs
from holdfast.coordination.effects import (
    Effect,
    MirrorCommit,
    MirrorEnded,
    MirrorParts,
    ReportMirrored,
)
from holdfast.coordination.follower.mirror_parts import MirrorShare
from holdfast.coordination.inputs import MirrorTarget, Published
from holdfast.coordination.leader.mirror import PAUSE_SECS_MAX, STALL_SECS, Mirror
from holdfast.coordination.messages import Mirrored, MirrorOrder
from holdfast.coordination.rank_runs import ranks_in, runs_of
from holdfast.coordination.turn import Turn
from holdfast.format.names import CheckpointId
from tests.attempts import checkpoint_id

HOSTS = {"a": {0, 1}, "b": {2, 3}}
FIRST, SECOND, THIRD = (MirrorTarget(checkpoint_id(step), 4) for step in (1, 2, 3))


class Rig:
    """A mirror on host a, and the time."""

    def __init__(self, target: MirrorTarget = FIRST) -> None:
        self.mirror = Mirror("a")
        self.now_secs = 0.0
        self.mirror.want(target)

    def act(self) -> list[Effect]:
        turn = self.turn()
        self.mirror.run_due(turn, lambda: HOSTS)
        return turn.effects

    def turn(self) -> Turn:
        return Turn("a", self.now_secs, Published())

    def ordered(self, host: str) -> set[int]:
        order = self.mirror.order_for(host)
        return set(ranks_in(order.ranks)) if order is not None else set()

    def report(self, host: str, *done: int, failure: str = "") -> list[Effect]:
        turn, target = self.turn(), self.mirror.target
        assert target is not None
        mirrored = Mirrored(target.id, self.mirror.round, runs_of(done), 10 * len(done), failure)
        self.mirror.take_report(turn, host, mirrored)
        return [*turn.effects, *self.act()]

    def finish(self) -> list[Effect]:
        self.report("b", 2, 3)
        self.report("a", 0, 1)
        turn = self.turn()
        assert self.mirror.committing is not None
        self.mirror.committed(turn, self.mirror.committing)
        return [*turn.effects, *self.act()]


def test_each_host_writes_the_parts_of_its_ranks_and_the_leader_commits_them() -> None:
    rig = Rig()
    assert rig.act() == []
    assert (rig.ordered("a"), rig.ordered("b")) == ({0, 1}, {2, 3})
    assert rig.report("b", 2, 3) == []
    assert rig.report("a", 0, 1) == [MirrorCommit(FIRST.id, 4)]
    turn = rig.turn()
    rig.mirror.committed(turn, FIRST.id)
    assert turn.effects == [MirrorEnded(FIRST.id, host_count=2, written_bytes=40)]
    assert rig.mirror.is_settled


def test_the_leader_writes_the_parts_of_hosts_that_fail_are_lost_or_stall() -> None:
    failing, lost, stalling = Rig(), Rig(), Rig()
    for rig in (failing, lost, stalling):
        rig.act()
    failing.report("b", 2, failure="no room")
    lost.mirror.host_lost("b")
    stalling.report("b", 2)
    stalling.now_secs = STALL_SECS
    stalling.act()
    assert (failing.ordered("a"), failing.ordered("b")) == ({0, 1, 3}, {2})
    assert (lost.ordered("a"), lost.ordered("b")) == ({0, 1, 2, 3}, set())
    assert (stalling.ordered("a"), stalling.ordered("b")) == ({0, 1, 3}, {2})


def test_parts_of_another_number_of_ranks_are_all_written_by_the_leader() -> None:
    rig = Rig(MirrorTarget(checkpoint_id(1), 2))
    rig.act()
    assert (rig.ordered("a"), rig.ordered("b")) == ({0, 1}, set())


def test_a_failed_try_is_repeated_with_growing_pauses_and_then_all_parts_anew() -> None:
    rig, pauses = Rig(), []
    for _ in range(10):
        rig.act()
        before = rig.mirror.round
        (ended,) = rig.report("a", 0, failure="no answer")
        assert ended == MirrorEnded(FIRST.id, reason="no answer")
        assert rig.mirror.round > before
        pauses.append(rig.mirror.next_at_secs(rig.now_secs) - rig.now_secs)
        rig.now_secs = rig.mirror.next_at_secs(rig.now_secs)
    assert pauses[:4] == [1, 2, 4, 8]
    assert max(pauses) == pauses[-1] == PAUSE_SECS_MAX
    assert not rig.mirror.is_trying


def test_one_that_is_due_meanwhile_waits_and_only_the_last_of_several() -> None:
    rig = Rig()
    rig.act()
    rig.mirror.want(SECOND)
    rig.mirror.want(THIRD)
    assert rig.mirror.ids == {FIRST.id, THIRD.id}
    assert rig.finish()[0] == MirrorEnded(FIRST.id, host_count=2, written_bytes=40)
    assert rig.mirror.target == THIRD
    assert rig.ordered("a") == {0, 1}
    rig.finish()
    assert rig.mirror.is_settled


def test_one_whose_try_has_failed_is_replaced_by_the_next() -> None:
    rig = Rig()
    rig.act()
    rig.report("a", failure="no answer")
    rig.mirror.want(SECOND)
    assert rig.mirror.ids == {SECOND.id}
    waiting = Rig()
    waiting.act()
    waiting.mirror.want(SECOND)
    waiting.report("a", failure="no answer")
    assert waiting.mirror.ids == {SECOND.id}


def test_a_deleted_checkpoint_is_not_copied_any_more() -> None:
    rig = Rig()
    rig.act()
    rig.mirror.want(SECOND)
    rig.mirror.forget(SECOND.id)
    assert rig.mirror.ids == {FIRST.id}
    rig.mirror.forget(FIRST.id)
    assert rig.mirror.is_settled
    assert (rig.ordered("a"), rig.ordered("b")) == (set(), set())


def test_reports_of_an_older_round_do_not_count() -> None:
    rig = Rig()
    rig.act()
    old = rig.mirror.round
    rig.report("a", failure="no answer")
    rig.now_secs = 5.0
    rig.act()
    rig.mirror.take_report(rig.turn(), "b", Mirrored(FIRST.id, old, ((2, 2),), 20))
    assert rig.mirror.done == frozenset()


def test_a_new_leader_takes_a_round_above_those_that_hosts_know() -> None:
    rig = Rig()
    rig.mirror.take_report(rig.turn(), "b", Mirrored(checkpoint_id(9), 70, ((2, 1),), 10))
    rig.act()
    order = rig.mirror.order_for("b")
    assert order is not None
    assert order.round > 70
    assert set(ranks_in(order.ranks)) == {2, 3}


def share_effects(share: MirrorShare, order: MirrorOrder | None) -> list[Effect]:
    turn = Turn("b", 0.0, Published())
    share.apply_order(turn, order)
    return turn.effects


def order(target: MirrorTarget, number: int, *ranks: int) -> MirrorOrder:
    return MirrorOrder(target.id, runs_of(ranks), number)


def written(checkpoint: CheckpointId, number: int, rank: int) -> inputs.MirrorPartWritten:
    return inputs.MirrorPartWritten(checkpoint, number, rank, 10)


def test_a_host_writes_each_ordered_part_once_and_reports_it() -> None:
    share = MirrorShare()
    asked = order(FIRST, 1, 2)
    assert share_effects(share, asked) == [MirrorParts(FIRST.id, 1, frozenset({2}))]
    assert share_effects(share, asked) == []
    # The leader moves another host's part here.
    assert share_effects(share, order(FIRST, 1, 2, 3)) == [MirrorParts(FIRST.id, 1, frozenset({3}))]
    assert not share.is_settled
    for rank in (2, 3):
        share.part_written(written(FIRST.id, 1, rank))
    assert share.is_settled
    assert share.state == Mirrored(FIRST.id, 1, ((2, 2),), 20)


def test_another_round_or_checkpoint_replaces_what_is_under_way() -> None:
    share = MirrorShare()
    share_effects(share, order(FIRST, 1, 2))
    assert share_effects(share, order(FIRST, 2, 2)) == [MirrorParts(FIRST.id, 2, frozenset({2}))]
    share.part_written(written(FIRST.id, 1, 2))
    assert share.state == Mirrored(FIRST.id, 2, (), 0)
    share.parts_failed(inputs.MirrorPartsFailed(FIRST.id, 2, "no answer"))
    assert share.state == Mirrored(FIRST.id, 2, (), 0, "no answer")
    assert share_effects(share, order(FIRST, 2, 2, 3)) == []
    assert share.is_settled
    # An order that ends all work also ends what is under way.
    assert share_effects(share, None) == [MirrorParts(FIRST.id, 2, frozenset())]
    assert share.state is None


def test_the_newest_copy_is_the_one_that_was_found_or_committed_until_it_is_deleted() -> None:
    rig = Rig()
    assert rig.mirror.newest is None
    rig.mirror.found(checkpoint_id(0))
    rig.act()
    assert rig.mirror.newest == checkpoint_id(0)
    rig.finish()
    assert rig.mirror.newest == FIRST.id
    rig.mirror.is_changed = False
    rig.mirror.forget(SECOND.id)
    assert (rig.mirror.newest, rig.mirror.is_changed) == (FIRST.id, False)
    rig.mirror.forget(FIRST.id)
    assert (rig.mirror.newest, rig.mirror.is_changed) == (None, True)


def test_a_host_reports_each_newest_copy_once_and_none_of_the_attempt_before() -> None:
    share, turn = MirrorShare(), Turn("b", 0.0, Published())
    for newest in (FIRST.id, FIRST.id, None, SECOND.id):
        share.learn_newest(turn, newest)
    assert turn.effects == [ReportMirrored(FIRST.id), ReportMirrored(SECOND.id)]
    assert share.newest == SECOND.id
    # The next attempt may continue from an earlier checkpoint, which the tier lacks.
    share.release(turn)
    assert share.newest is None
