"""What the protocol promises, one case at a time, in a world without chance faults."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from holdfast.engine.agreement import effects as ef
from holdfast.engine.agreement import facts as fa
from holdfast.engine.agreement.agreement import Agreement
from holdfast.engine.agreement.messages import (
    Command,
    Kind,
    Newer,
    Orders,
    Status,
    Target,
    Verdict,
    WhoHolds,
)
from holdfast.engine.agreement.settings import Settings
from holdfast.engine.agreement.turn import Identity
from holdfast.format.names import CheckpointId
from tests.agreement.jobs import Job
from tests.agreement.world import Shape, World

BOUND_SECS = 60.0


def make(host_count: int, **shape: object) -> World:
    fields = {
        "host_count": host_count,
        "domain_size": 1,
        "ranks_a_host": 1,
        "window": 1,
        "every": 0,
        "copies": 2,
        "interval_secs": 0.0,
        **shape,
    }
    world = World(5, Shape(**fields), Settings(copies=fields["copies"]))  # type: ignore[arg-type]
    world.is_calm = True
    world.restarts = False
    for host in world.hosts.values():
        host.start_agent()
    return world


def running(world: World, hosts: list[str] | None = None, **more: bool) -> Job:
    job = world.start_job(hosts or list(world.hosts), **more)
    assert world.run(world.now + BOUND_SECS, lambda: job.is_running)
    return job


def until(world: World, condition: object) -> None:
    assert world.run(world.now + BOUND_SECS, condition), "it has not come about in time"  # type: ignore[arg-type]


def reached(world: World, status: Status, count: int = 1) -> bool:
    return world.oracle.counts.get(status, 0) >= count


def test_one_host_sends_no_message_and_saves_the_very_next_step() -> None:
    world = make(1, ranks_a_host=2)
    job = running(world)
    world.run(world.now + 2)
    highest = max(t.step for t in job.trainers)
    world.wish(job.leader, Kind.DURABLE)
    assert world.hosts[job.leader].words[Kind.DURABLE] == highest + 1
    until(world, lambda: reached(world, Status.COMMITTED))
    assert list(world.storage.manifests) == [CheckpointId(highest + 1, 1)]
    assert world.network.sent == 0


@pytest.mark.parametrize("kind", [Kind.DURABLE, Kind.RAM])
def test_ranks_that_are_twenty_steps_apart_meet_at_one_step(kind: Kind) -> None:
    world = make(4, window=21, pace_secs=0.05)
    job = running(world)
    for trainer, pace_secs in zip(job.trainers, (0.02, 0.2, 0.05, 0.1), strict=True):
        trainer.pace_secs = pace_secs
    world.run(world.now + 10)
    steps = [t.step for t in job.trainers]
    assert max(steps) - min(steps) >= 15
    world.wish("h0002", kind)
    until(world, lambda: reached(world, Status.PROTECTED))
    (checkpoint,) = {c for t in job.trainers for c in t.begun}
    assert checkpoint.step > max(steps)


def test_a_refused_target_is_proposed_further_ahead_and_its_parts_are_dropped() -> None:
    world = make(3, pace_secs=0.02, window=5)
    world.network.faults.delay_secs_max = 0.5
    job = running(world)
    for _ in range(8):
        world.wish(job.leader, Kind.DURABLE)
        world.run(world.now + 6)
    begun = {c for t in job.trainers for c in t.begun}
    whole = set(world.storage.manifests)
    assert whole
    assert begun - whole, "no target was refused: the case shows nothing"
    for checkpoint in begun - whole:
        assert not any(checkpoint in host.ram for host in world.hosts.values())


@pytest.mark.parametrize("dies", ["no agent", "the leader's agent", "the leader's host"])
def test_what_was_sealed_when_all_trainers_died_becomes_durable(dies: str) -> None:
    world = make(4, kind=Kind.RAM)
    job = running(world)
    world.wish(job.leader, Kind.RAM)
    until(world, lambda: reached(world, Status.PROTECTED))
    assert not world.storage.manifests
    job.kill()
    leader = world.hosts[job.leader]
    if dies == "the leader's agent":
        leader.kill_agent()
    elif dies == "the leader's host":
        leader.crash()
    until(world, lambda: bool(world.storage.manifests))


def test_a_lost_host_and_leader_costs_nothing_that_was_protected() -> None:
    world = make(4, kind=Kind.RAM)
    job = running(world)
    for _ in range(3):
        before = world.oracle.counts.get(Status.PROTECTED, 0)
        world.wish(job.leader, Kind.RAM)
        until(world, lambda n=before: reached(world, Status.PROTECTED, n + 1))
    (newest,) = {max(host.ram) for host in world.hosts.values()}
    world.hosts["h0000"].crash()
    job.kill()
    world.hosts["h0000"].reboot()
    running(world)
    assert world.storage.attempts[2].origin == (newest.step, newest.attempt)


def test_of_two_starts_at_once_one_wins_and_the_other_is_told_that_the_run_is_busy() -> None:
    world = make(4)
    first = world.start_job(["h0000", "h0001"])
    second = world.start_job(["h0002", "h0003"])
    until(world, lambda: first.is_running or second.is_running)
    until(world, lambda: bool(first.refused or second.refused))
    assert first.is_running != second.is_running
    assert world.oracle.counts["busy"] == 2
    assert list(world.storage.attempts) == [1]


def test_copies_that_cannot_be_made_hold_no_checkpoint_up_for_long() -> None:
    world = make(3)
    job = running(world)
    world.pull_failures = 1.0
    for count in (1, 2):
        world.wish(job.leader, Kind.RAM)
        until(world, lambda count=count: reached(world, Status.COMPLETE, count))
        leading = world.hosts[job.leader].agent
        assert leading.is_sealing
        world.run(world.now + Settings().lost_secs + 1)
        assert not leading.is_sealing
    assert not reached(world, Status.PROTECTED)
    world.pull_failures = 0.0
    until(world, lambda: reached(world, Status.PROTECTED))


def test_a_takeover_fences_the_attempt_that_lives() -> None:
    world = make(4)
    first = running(world, ["h0000", "h0001"])
    second = running(world, ["h0002", "h0003"], takeover=True)
    world.wish("h0000", Kind.DURABLE)
    world.wish("h0002", Kind.DURABLE)
    until(world, lambda: bool(world.storage.manifests))
    world.run(world.now + 20)
    assert second.is_running
    assert {c.attempt for c in world.storage.manifests} == {2}
    assert not first.living, "its agents were never told that they are fenced"


def test_a_broken_group_does_not_stand_in_the_way() -> None:
    world = make(3)
    first = running(world)
    first.trainers[2].die()
    world.run(world.now + 2)
    second = running(world)
    assert second.trainers[0].attempt == 2


def test_a_branch_is_a_new_attempt_of_the_same_ranks() -> None:
    world = make(3)
    job = running(world)
    for _ in range(3):
        before = world.oracle.commits
        world.wish("h0001", Kind.DURABLE)
        until(world, lambda n=before: world.oracle.commits > n)
    origin = sorted(world.storage.manifests)[0]
    job.rewind(origin)
    until(world, lambda: all(t.attempt == 2 for t in job.trainers))
    assert world.storage.attempts[2].origin == (origin.step, 1)
    before = world.oracle.commits
    world.wish("h0001", Kind.DURABLE)
    until(world, lambda: world.oracle.commits > before)
    assert [c.attempt for c in sorted(world.storage.manifests)].count(2) == 1
    assert len(world.storage.attempts) == 2, "each rank's wish has begun an attempt of its own"


def test_what_waits_for_storage_on_an_abandoned_branch_is_given_up_and_holds_nothing_up() -> None:
    world = make(3)
    job = running(world)
    world.wish(job.leader, Kind.DURABLE)
    until(world, lambda: reached(world, Status.COMMITTED))
    (origin,) = world.storage.manifests
    world.storage_slow_secs = 2.0
    for count in (2, 3):
        world.wish(job.leader, Kind.DURABLE)
        until(world, lambda n=count: reached(world, Status.COMPLETE, n))
    left = max(world.oracle.truths)
    job.rewind(origin)
    until(world, lambda: all(t.attempt == 2 for t in job.trainers))
    assert left not in world.storage.manifests
    # Nothing more is saved that would overtake it.
    until(world, lambda: not any(left in host.ram for host in world.hosts.values()))
    assert world.oracle.truths[left].told == {Status.DROPPED}
    agent = world.hosts[job.leader].agent
    assert agent is not None
    assert agent.pending_ids() == []


@pytest.mark.parametrize("window", [1, 25])
@pytest.mark.parametrize("agent_dies", [False, True])
def test_a_notice_on_one_host_stops_all_ranks_at_one_step(window: int, agent_dies: bool) -> None:
    world = make(4, window=window)
    job = running(world)
    world.run(world.now + 3)
    world.wish("h0003", Kind.PREEMPTION)
    if agent_dies:
        until(world, lambda: world.hosts["h0002"].confirmed is not None)
        world.hosts[job.leader].kill_agent()
        world.run(world.now + 0.5)
        world.hosts[job.leader].start_agent()
    until(world, lambda: job.is_over)
    (step,) = {t.step for t in job.trainers}
    until(world, lambda: CheckpointId(step, 1) in world.storage.manifests)


def test_no_rank_stops_at_a_target_that_is_refused_elsewhere() -> None:
    refused = 0
    for seed in range(6):
        world = make(4, window=9, pace_secs=0.02)
        world.rng.seed(seed)
        world.network.faults.delay_secs_max = 0.4
        job = running(world)
        world.run(world.now + 2)
        world.wish("h0003", Kind.PREEMPTION)
        until(world, lambda j=job: j.is_over)
        assert len({t.step for t in job.trainers}) == 1
        refused += len({c for t in job.trainers for c in t.begun}) > 1
    assert refused, "no target was refused: the case shows nothing"


def test_without_ram_the_parts_are_committed_from_the_durable_tier() -> None:
    world = make(3, has_ram=False)
    job = running(world)
    world.wish(job.leader, Kind.DURABLE)
    until(world, lambda: bool(world.storage.manifests))
    assert not any(host.ram for host in world.hosts.values())


def test_a_reader_is_told_where_every_part_stands() -> None:
    world = make(4, ranks_a_host=2)
    job = running(world)
    world.wish(job.leader, Kind.RAM)
    until(world, lambda: reached(world, Status.PROTECTED))
    (checkpoint,) = {c for t in job.trainers for c in t.begun}
    found = []
    world.oracle.sources_found = lambda host, effect: found.append(effect)  # type: ignore[method-assign]
    world.hosts["h0003"].tell(fa.SourcesWanted(checkpoint))
    until(world, lambda: bool(found))
    told = {
        rank: set(part.hosts)
        for part in found[0].parts
        for first, count in part.ranks
        for rank in range(first, first + count)
    }
    holders = {
        rank: {h.name for h in world.hosts.values() if rank in h.ram.get(checkpoint, ())}
        for rank in range(8)
    }
    assert told == holders
    assert all(len(hosts) == 2 for hosts in holders.values())


def test_status_tells_how_many_losses_are_survived() -> None:
    world = make(4, copies=3)
    job = running(world)
    world.wish(job.leader, Kind.RAM)
    until(world, lambda: reached(world, Status.PROTECTED))
    agent = world.hosts[job.leader].agent
    assert agent is not None
    (checkpoint,) = {c for t in job.trainers for c in t.begun}
    assert agent.survives() == (checkpoint, 2)
    for lost in itertools.combinations(world.hosts, 2):
        left = [h for name, h in world.hosts.items() if name not in lost]
        assert {r for h in left for r in h.ram[checkpoint]} == set(range(4))
    job.kill()
    until(world, lambda: bool(world.storage.manifests))
    assert agent.survives() == (checkpoint, None)


def test_the_ram_of_an_agent_that_leaves_counts_no_more_and_is_copied_anew() -> None:
    world = make(3)
    job = running(world)
    world.wish(job.leader, Kind.RAM)
    until(world, lambda: reached(world, Status.PROTECTED))
    agent = world.hosts[job.leader].agent
    assert agent is not None
    (checkpoint,) = {c for t in job.trainers for c in t.begun}
    assert agent.survives() == (checkpoint, 1)
    world.storage_slow_secs, world.pull_failures = 1000.0, 1.0
    world.hosts["h0002"].tell(fa.LeaveWanted())
    world.hosts["h0002"].kill_agent()
    world.run(world.now + 0.5)
    assert agent.survives() == (checkpoint, 0)
    world.pull_failures = 0.0
    until(world, lambda: agent.survives() == (checkpoint, 1))


def test_a_deleted_checkpoint_is_given_up_everywhere_and_is_not_the_newest_any_more() -> None:
    world = make(3)
    job = running(world)
    world.wish(job.leader, Kind.RAM)
    until(world, lambda: reached(world, Status.PROTECTED))
    agent = world.hosts[job.leader].agent
    assert agent is not None
    (checkpoint,) = {c for t in job.trainers for c in t.begun}
    world.oracle.abandoned(checkpoint)
    world.hosts[job.leader].tell(fa.Deleted(checkpoint))
    until(world, lambda: not any(host.ram for host in world.hosts.values()))
    assert agent.survives() is None
    world.wish(job.leader, Kind.RAM)
    until(world, lambda: reached(world, Status.PROTECTED, 2))


def test_an_agent_that_starts_anew_gives_nothing_up_before_it_has_looked_into_storage() -> None:
    world = make(1, every=5)
    job = running(world)
    until(world, lambda: world.oracle.commits >= 2)
    host = world.hosts[job.leader]
    host.kill_agent()
    older = CheckpointId(2, 1)
    host.hold(older, 0, 1, is_own=True)
    host.start_agent()
    assert older in host.ram
    until(world, lambda: older not in host.ram)


def test_a_leader_that_stood_still_does_not_take_its_own_host_for_lost() -> None:
    world = make(1)
    job = running(world)
    host = world.hosts[job.leader]
    world.wish(job.leader, Kind.RAM)
    until(world, lambda: reached(world, Status.PROTECTED))
    (first,) = host.ram
    host.tell(fa.Preserved(frozenset({first})))
    world.wish(job.leader, Kind.RAM)
    until(world, lambda: reached(world, Status.PROTECTED, 2))
    world.now += 60.0
    host.tell(fa.Tick())
    assert first in host.ram
    assert len(host.ram) == 2


# One machine alone, where the order of what it hears matters.

NOTHING = fa.Published()


def a_member() -> Agreement:
    """A host of attempt 2 that holds one part, and follows `a`."""
    machine = Agreement(
        Identity(run="run", host="b", domain="b", incarnation=7, settings=Settings())
    )
    held = CheckpointId(50, 1)
    listed = fa.Listed(part_count=2, ranks=frozenset({1}))
    machine.handle(fa.Found(ram={held: listed}), 0.0, NOTHING)
    joined = fa.RankJoined(group="g2", rank=1, rank_count=2, leader="a")
    machine.handle(joined, 0.0, NOTHING)
    machine.handle(fa.Received("a", orders(2, "g2", seq=1)), 0.1, NOTHING)
    return machine


def orders(attempt: int, group: str, *, seq: int, drop: bool = False, run: str = "run") -> Orders:
    verdict = Verdict(CheckpointId(50, 1), Status.PROTECTED, drop)
    return Orders(
        run=run,
        attempt=attempt,
        group=group,
        term=0,
        incarnation=3,
        seq=seq,
        version=seq,
        ack=0,
        origin=CheckpointId(50, 1),
        rank_count=2,
        successors=("a", "b"),
        command=Command(targets=(), verdicts=(verdict,)),
    )


def drops(effects: list[ef.Effect]) -> list[ef.Effect]:
    return [e for e in effects if isinstance(e, ef.Drop)]


def test_orders_of_an_older_attempt_are_answered_with_the_newer_one() -> None:
    machine = a_member()
    done = machine.handle(fa.Received("z", orders(1, "g1", seq=99, drop=True)), 0.2, NOTHING)
    assert not drops(done)
    (told,) = [e for e in done if isinstance(e, ef.Send) and e.host == "z"]
    assert isinstance(told.message, Newer)
    assert (told.message.attempt, told.message.leader) == (2, "a")
    assert drops(machine.handle(fa.Received("a", orders(2, "g2", seq=2, drop=True)), 0.3, NOTHING))


def test_orders_that_were_overtaken_are_passed_over() -> None:
    machine = a_member()
    machine.handle(fa.Received("a", orders(2, "g2", seq=5)), 0.2, NOTHING)
    assert not drops(
        machine.handle(fa.Received("a", orders(2, "g2", seq=4, drop=True)), 0.3, NOTHING)
    )


def test_nothing_is_dropped_between_the_report_to_a_new_attempt_and_its_beginning() -> None:
    machine = a_member()
    asks = WhoHolds(run="run", attempt=2, group="g3")
    machine.handle(fa.Received("c", asks), 0.2, NOTHING)
    drop = orders(2, "g2", seq=2, drop=True)
    assert not drops(machine.handle(fa.Received("a", drop), 0.3, NOTHING))
    # The start came to nothing: its bound has passed.
    assert drops(machine.handle(fa.Tick(), 30.0, NOTHING))


def test_nothing_is_dropped_while_trainers_here_begin_an_attempt() -> None:
    machine = a_member()
    joined = fa.RankJoined(group="g3", rank=0, rank_count=1, leader="c", takeover=True)
    machine.handle(joined, 0.2, NOTHING)
    drop = orders(2, "g2", seq=2, drop=True)
    assert not drops(machine.handle(fa.Received("a", drop), 0.3, NOTHING))


def test_a_host_that_hears_of_a_newer_attempt_fences_its_trainers_and_serves_no_older_one() -> None:
    machine = a_member()
    done = machine.handle(fa.Received("c", orders(3, "g3", seq=1)), 0.2, NOTHING)
    assert [e.attempt for e in done if isinstance(e, ef.Fenced)] == [3]
    assert not machine.serves(2)
    assert machine.serves(3)
    sealed = fa.PartSealed(rank=1, id=CheckpointId(60, 2), part_count=2, in_ram=True, is_due=True)
    late = machine.handle(sealed, 0.3, NOTHING)
    assert [e.id.step for e in drops(late) if isinstance(e, ef.Drop)] == [60]


def test_another_runs_messages_are_passed_over() -> None:
    machine = a_member()
    done = machine.handle(fa.Received("c", orders(3, "g3", seq=1, run="other")), 0.2, NOTHING)
    assert not done
    assert machine.attempt == 2


def test_a_rank_that_has_passed_the_target_makes_its_host_refuse_it() -> None:
    machine = a_member()
    target = with_target(orders(2, "g2", seq=2), 10)
    done = machine.handle(fa.Received("a", target), 0.2, fa.Published(9, 9))
    assert ef.SetTarget(Kind.DURABLE, 10) in done
    looked = machine.handle(fa.TargetWritten(Kind.DURABLE, 10, 10), 0.3, fa.Published(10, 10))
    (report,) = [e.message for e in looked if isinstance(e, ef.Send)]
    (state,) = report.state.targets  # type: ignore[union-attr]
    assert (state.is_accepted, state.highest) == (False, 10)


def with_target(message: Orders, step: int) -> Orders:
    command = msgspec.structs.replace(message.command, targets=(Target(Kind.DURABLE, step, False),))
    return msgspec.structs.replace(message, command=command)


def test_two_worlds_of_one_seed_are_the_same() -> None:
    def story(seed: int) -> tuple[int, int, object]:
        world = make(5, interval_secs=1.0)
        world.rng = random.Random(seed)
        world.network.rng = world.rng
        running(world)
        world.run(20.0)
        return world.events, world.network.sent, sorted(world.storage.manifests)

    assert story(3) == story(3)
    assert story(3) != story(4)
