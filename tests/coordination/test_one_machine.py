"""A single node, where the order of its inputs matters."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from holdfast.coordination import effects as ef
from holdfast.coordination import inputs as fa
from holdfast.coordination.messages import (
    Alive,
    CheckpointStatus,
    CheckpointVerdict,
    Command,
    Newer,
    Orders,
    Probe,
    PullOrder,
    TargetKind,
    TargetProposal,
    WhoHolds,
)
from holdfast.coordination.node import Node
from holdfast.coordination.settings import Settings
from holdfast.coordination.turn import AgentIdentity
from holdfast.format.names import NO_ATTEMPT, AttemptId
from tests.attempts import attempt_id, checkpoint_id

NOTHING = fa.Published()


def a_member() -> Node:
    """Return a node of attempt 2 that holds one part, and follows `a`."""
    machine = Node(
        AgentIdentity(run="run", host="b", domain="b", incarnation=7, settings=Settings())
    )
    held = checkpoint_id(50)
    listed = fa.Listed(part_count=2, ranks=frozenset({1}))
    machine.handle(fa.Found(ram={held: listed}), 0.0, NOTHING)
    joined = fa.RankJoined(group="g2", rank=1, rank_count=2, leader="a")
    machine.handle(joined, 0.0, NOTHING)
    machine.handle(fa.Received("a", orders(2, "g2", seq=1)), 0.1, NOTHING)
    return machine


def orders(
    attempt: int,
    group: str,
    *,
    seq: int,
    drop: bool = False,
    run: str = "run",
    pulls: tuple[PullOrder, ...] = (),
    to: int = 0,
) -> Orders:
    verdict = CheckpointVerdict(checkpoint_id(50), CheckpointStatus.PROTECTED, drop)
    return Orders(
        run=run,
        attempt=attempt_id(attempt),
        group=group,
        term=0,
        incarnation=3,
        seq=seq,
        version=seq,
        ack=0,
        follower_incarnation=to,
        origin=checkpoint_id(50),
        rank_count=2,
        successors=("a", "b"),
        command=Command(targets=(), verdicts=(verdict,), pulls=pulls),
    )


def drops(effects: list[ef.Effect]) -> list[ef.Effect]:
    return [e for e in effects if isinstance(e, ef.Drop)]


def test_orders_of_an_older_attempt_are_answered_with_the_newer_one() -> None:
    machine = a_member()
    done = machine.handle(
        fa.Received("z", orders(1, "g1", seq=99, drop=True)), 0.2, NOTHING
    ).effects
    assert not drops(done)
    (told,) = [e for e in done if isinstance(e, ef.Send) and e.host == "z"]
    assert isinstance(told.message, Newer)
    assert (told.message.attempt, told.message.leader) == (attempt_id(2), "a")
    assert drops(
        machine.handle(fa.Received("a", orders(2, "g2", seq=2, drop=True)), 0.3, NOTHING).effects
    )


def test_orders_that_were_overtaken_are_passed_over() -> None:
    machine = a_member()
    machine.handle(fa.Received("a", orders(2, "g2", seq=5)), 0.2, NOTHING)
    assert not drops(
        machine.handle(fa.Received("a", orders(2, "g2", seq=4, drop=True)), 0.3, NOTHING).effects
    )


def test_orders_for_the_agent_before_this_one_are_not_carried_out() -> None:
    machine = a_member()
    late = orders(2, "g2", seq=2, drop=True, to=6)
    assert not drops(machine.handle(fa.Received("a", late), 0.2, NOTHING).effects)
    again = orders(2, "g2", seq=3, drop=True, to=7)
    assert drops(machine.handle(fa.Received("a", again), 0.3, NOTHING).effects)


def test_nothing_is_dropped_between_the_report_to_a_new_attempt_and_its_beginning() -> None:
    machine = a_member()
    asks = WhoHolds(run="run", attempt=attempt_id(2), group="g3")
    machine.handle(fa.Received("c", asks), 0.2, NOTHING)
    drop = orders(2, "g2", seq=2, drop=True)
    assert not drops(machine.handle(fa.Received("a", drop), 0.3, NOTHING).effects)
    # The start has failed: its bound has passed.
    assert drops(machine.handle(fa.Tick(), 30.0, NOTHING).effects)


def test_nothing_is_dropped_while_trainers_here_begin_an_attempt() -> None:
    machine = a_member()
    joined = fa.RankJoined(group="g3", rank=0, rank_count=1, leader="c", takeover=True)
    machine.handle(joined, 0.2, NOTHING)
    drop = orders(2, "g2", seq=2, drop=True)
    assert not drops(machine.handle(fa.Received("a", drop), 0.3, NOTHING).effects)


def test_a_host_that_hears_of_a_newer_attempt_fences_its_trainers_and_knows_it() -> None:
    machine = a_member()
    done = machine.handle(fa.Received("c", orders(3, "g3", seq=1)), 0.2, NOTHING).effects
    assert [e.attempt for e in done if isinstance(e, ef.Fenced)] == [attempt_id(3)]
    assert machine.view(0.2).attempt == attempt_id(3)
    sealed = fa.PartSealed(rank=1, id=checkpoint_id(60, 2), part_count=2, in_ram=True, is_due=True)
    late = machine.handle(sealed, 0.3, NOTHING).effects
    assert [e.id.step for e in drops(late) if isinstance(e, ef.Drop)] == [60]


def test_another_runs_messages_are_passed_over() -> None:
    machine = a_member()
    done = machine.handle(
        fa.Received("c", orders(3, "g3", seq=1, run="other")), 0.2, NOTHING
    ).effects
    assert not done
    assert machine.view(0.2).attempt == attempt_id(2)


@pytest.mark.parametrize("is_missed", [True, False])
def test_a_rank_that_has_missed_the_target_makes_its_host_refuse_it(is_missed: bool) -> None:
    machine = a_member()
    target = with_target(orders(2, "g2", seq=2), 10)
    done = machine.handle(fa.Received("a", target), 0.2, fa.Published(9, 9)).effects
    assert ef.SetTarget(TargetKind.DURABLE, 10) in done
    looked = machine.handle(
        fa.TargetWritten(TargetKind.DURABLE, 10, 10, is_missed, 10), 0.3, fa.Published(10, 10)
    ).effects
    (report,) = [e.message for e in looked if isinstance(e, ef.Send)]
    (state,) = report.state.targets  # type: ignore[union-attr]
    assert (state.is_accepted, state.highest) == (not is_missed, 10)


def with_target(message: Orders, step: int) -> Orders:
    command = msgspec.structs.replace(
        message.command, targets=(TargetProposal(TargetKind.DURABLE, step, False),)
    )
    return msgspec.structs.replace(message, command=command)


def asked_for(effects: list[ef.Effect]) -> ef.BeginAttempt:
    (found,) = [e for e in effects if isinstance(e, ef.BeginAttempt)]
    return found


def test_a_start_does_not_take_another_ones_record_for_its_own() -> None:
    machine = Node(
        AgentIdentity(run="run", host="a", domain="a", incarnation=7, settings=Settings())
    )
    machine.handle(fa.Found(), 0.0, NOTHING)
    listed = fa.DurableListed(
        newest_attempt=NO_ATTEMPT, leader="", limits={}, committed=frozenset(), parts={}
    )
    asked = []
    for group in ("g1", "g2"):
        joined = fa.RankJoined(group=group, rank=0, rank_count=1, leader="a", takeover=True)
        machine.handle(joined, 0.1, NOTHING)
        asked.append(asked_for(machine.handle(listed, 0.2, NOTHING).effects))
    assert [one.attempt for one in asked] == [
        AttemptId.of_start(1, group) for group in ("g1", "g2")
    ]
    done = machine.handle(fa.AttemptBegun(asked[0]), 0.3, NOTHING).effects
    assert not [e for e in done if isinstance(e, ef.AttemptJoined)]
    assert machine.view(0.2).attempt == asked[0].attempt
    done = machine.handle(fa.AttemptTaken(asked[1]), 0.4, NOTHING).effects
    assert ef.ListDurable() in done
    limits = {asked[0].attempt: 10**15}
    listed = fa.DurableListed(
        newest_attempt=asked[0].attempt, leader="a", limits=limits, committed=frozenset(), parts={}
    )
    second = asked_for(machine.handle(listed, 0.5, NOTHING).effects)
    done = machine.handle(fa.AttemptBegun(second), 0.6, NOTHING).effects
    assert [(e.group, e.attempt.number) for e in done if isinstance(e, ef.AttemptJoined)] == [
        ("g2", 2)
    ]


def told_alive(effects: list[ef.Effect]) -> list[Alive]:
    return [e.message for e in effects if isinstance(e, ef.Send) and isinstance(e.message, Alive)]


def a_start() -> tuple[Node, ef.BeginAttempt]:
    """Return a node of the one host of a run that has asked for its first attempt."""
    machine = Node(
        AgentIdentity(run="run", host="a", domain="a", incarnation=7, settings=Settings())
    )
    machine.handle(fa.Found(), 0.0, NOTHING)
    machine.handle(fa.RankJoined(group="g1", rank=0, rank_count=1, leader="a"), 0.1, NOTHING)
    listed = fa.DurableListed(
        newest_attempt=NO_ATTEMPT, leader="", limits={}, committed=frozenset(), parts={}
    )
    return machine, asked_for(machine.handle(listed, 0.2, NOTHING).effects)


def test_a_start_whose_record_stands_before_it_was_told_so_is_alive() -> None:
    machine, asked = a_start()
    probe = fa.Received("b", Probe(run="run", attempt=asked.attempt, group="g2"))
    (told,) = told_alive(machine.handle(probe, 0.3, NOTHING).effects)
    assert (told.is_living, told.attempt, told.group) == (True, asked.attempt, "g2")
    other = fa.Received("b", Probe(run="run", attempt=attempt_id(2), group="g2"))
    assert not told_alive(machine.handle(other, 0.4, NOTHING).effects)
    machine.handle(fa.AttemptBegun(asked), 0.5, NOTHING)
    assert told_alive(machine.handle(probe, 0.6, NOTHING).effects)[0].is_living


def asked_hosts(effects: list[ef.Effect]) -> list[str]:
    return [e.host for e in effects if isinstance(e, ef.Send) and isinstance(e.message, WhoHolds)]


def test_hosts_are_asked_again_until_storage_says_whether_the_attempt_has_begun() -> None:
    machine = a_member()
    joined = fa.RankJoined(group="g3", rank=0, rank_count=1, leader="b", takeover=True)
    machine.handle(joined, 0.2, NOTHING)
    listed = fa.DurableListed(
        newest_attempt=attempt_id(2),
        leader="a",
        limits={attempt_id(1): 50, attempt_id(2): 10**15},
        committed=frozenset(),
        parts={},
    )
    # The other part of step 50 is on another host, if anywhere.
    assert asked_hosts(machine.handle(listed, 0.3, NOTHING).effects) == ["a"]
    now_secs, begun = 0.3, []
    while not begun:
        now_secs += 0.5
        ready = machine.handle(fa.Tick(), now_secs, NOTHING)
        begun = [effect for effect in ready.effects if isinstance(effect, ef.BeginAttempt)]
    settings, asked_at_secs = Settings(), [now_secs]
    while now_secs < 3 * settings.gather_secs:
        # As an agent does: it submits a tick when the node asks for one.
        now_secs = ready.next_at_secs
        ready = machine.handle(fa.Tick(), now_secs, NOTHING)
        if asked_hosts(ready.effects):
            asked_at_secs.append(now_secs)
    pauses = [b - a for a, b in itertools.pairwise(asked_at_secs)]
    assert len(pauses) > 10
    # Some of them may be lost in transit.
    assert max(pauses) < settings.gather_secs / 3
    machine.handle(fa.AttemptBegun(begun[0]), now_secs, NOTHING)
    assert not asked_hosts(
        machine.handle(fa.Tick(), now_secs + settings.gather_secs, NOTHING).effects
    )


def test_a_host_alone_on_which_nothing_happens_looks_again_every_two_seconds() -> None:
    machine, asked = a_start()
    ready = machine.handle(fa.AttemptBegun(asked), 0.5, NOTHING)
    now_secs, looks = 0.5, list[float]()
    while now_secs < 100.0:
        renewed = [e.attempt for e in ready.effects if isinstance(e, ef.RenewLease)]
        now_secs = ready.next_at_secs if not renewed else now_secs + 0.001
        item = fa.LeaseWritten(renewed[0]) if renewed else fa.Tick()
        ready = machine.handle(item, now_secs, NOTHING)
        looks += [now_secs] if not renewed else []
    # Each costs an agent beside an idle trainer, or without one, about a millisecond. Its lease is
    # renewed every five seconds.
    assert len(looks) < 100 / 2 + 100 / 5 + 5
