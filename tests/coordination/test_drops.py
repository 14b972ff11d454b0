"""Accepted saves that are dropped: each rank is notified of the end of each save.

Ranks are hundreds of steps apart, and one host's agent is stopped for a while. The oracle applies
the rule of all schedules (I10): every save that a living rank has accepted ends in bounded time.
"""

from __future__ import annotations

import random

import pytest

from holdfast.coordination.effects import Drop, ReportOutcome
from holdfast.coordination.follower.host_inventory import HostInventory
from holdfast.coordination.inputs import PartSealed, Published
from holdfast.coordination.leader.checkpoint_table import CheckpointTable, Recycling
from holdfast.coordination.messages import CheckpointStatus, CheckpointVerdict, Command, Held
from holdfast.coordination.settings import Settings
from holdfast.coordination.turn import Turn
from tests.attempts import attempt_id, checkpoint_id
from tests.coordination.oracle import BrokenPromiseError
from tests.coordination.rules import BREACHES
from tests.coordination.world import Shape, World
from tests.trust.figures import tell

STEPS = 600
SECS = 400.0
DRIFT_SEEDS = 100


def drifted_world(seed: int, halted: str, halt_at: float, *, every: int) -> World:
    """Run two hosts; rank 0 takes ten steps per step of rank 1; both end after `STEPS`."""
    shape = Shape(
        host_count=2,
        domain_size=1,
        ranks_a_host=1,
        window=STEPS,
        every=every,
        copies=2,
        interval_secs=3.0,
        pace_secs=0.1,
        fill_secs_max=0.2,
    )
    world = World(seed, shape, Settings(copies=2))
    world.restarts = False
    for host in world.hosts.values():
        host.start_agent()
    job = world.start_job(world.up_hosts())
    job.steps = STEPS
    job.trainers[0].pace_secs, job.trainers[1].pace_secs = 0.05, 0.5
    world.oracle.begin_calm()
    world.at(halt_at, world.hosts[halted].halt)
    world.at(halt_at + 40.0, world.hosts[halted].go_on)
    return world


def some_drifted_world(seed: int) -> World:
    """Some hosts whose ranks are at any distance, and one agent or whole host that is stopped."""
    chance = random.Random(seed)
    shape = Shape(
        host_count=chance.choice([2, 3, 4]),
        domain_size=1,
        ranks_a_host=chance.choice([1, 2]),
        window=STEPS,
        every=chance.choice([2, 5, 10]),
        copies=2,
        interval_secs=chance.choice([0.0, 3.0]),
        pace_secs=0.1,
        fill_secs_max=0.2,
    )
    world = World(seed, shape, Settings(copies=2))
    world.restarts = False
    for host in world.hosts.values():
        host.start_agent()
    job = world.start_job(world.up_hosts())
    job.steps = STEPS
    for trainer in job.trainers:
        trainer.pace_secs = chance.choice([0.02, 0.05, 0.3, 0.5])
    world.oracle.begin_calm()
    stopped = world.hosts[chance.choice(sorted(world.hosts))]
    at_secs = chance.uniform(5.0, 60.0)
    stop, go_on = (stopped.halt, stopped.go_on)
    if chance.random() < 0.5:
        stop, go_on = (stopped.pause, stopped.unpause)
    world.at(at_secs, stop)
    world.at(at_secs + 40.0, go_on)
    return world


def run_through(world: World) -> None:
    world.run(SECS)
    job = world.job
    assert job is not None
    assert {trainer.step for trainer in job.trainers} == {STEPS - 1}
    assert world.oracle.commits > 0
    assert not any(trainer.accepted_at for trainer in job.trainers)


@pytest.mark.parametrize("halted", ["h0000", "h0001"])
@pytest.mark.parametrize("every", [0, 5])
@pytest.mark.parametrize("seed", range(2))
def test_each_save_of_ranks_far_apart_ends_also_when_an_agent_was_stopped(
    seed: int, every: int, halted: str
) -> None:
    run_through(drifted_world(seed, halted, 20.0 + 10 * seed, every=every))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_each_save_ends_of_ranks_at_any_distance_while_a_host_is_stopped() -> None:
    for seed in range(DRIFT_SEEDS):
        try:
            run_through(some_drifted_world(seed))
        except (AssertionError, BrokenPromiseError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    tell(
        "ranks hundreds of steps apart",
        "each accepted save ends and its rank is notified, also if a host is stopped for 40 s",
        f"{DRIFT_SEEDS} schedules of 2 to 4 hosts, each save ended",
    )


@pytest.mark.parametrize(
    ("rule", "halted", "every", "promise"),
    [
        ("look_at_a_host_only_when_it_reports", "h0000", 5, "I10"),
        ("forget_the_ranks_of_silent_hosts", "h0001", 0, "I5"),
    ],
)
def test_the_simulator_notices_what_ends_no_save(
    rule: str, halted: str, every: int, promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    BREACHES[rule](monkeypatch.setattr)
    with pytest.raises(BrokenPromiseError, match=promise):
        run_through(drifted_world(0, halted, 20.0, every=every))


@pytest.mark.parametrize(
    ("is_due", "status", "told"),
    [
        (True, CheckpointStatus.OPEN, CheckpointStatus.DROPPED),
        (True, CheckpointStatus.COMPLETE, CheckpointStatus.DROPPED),
        (False, CheckpointStatus.OPEN, CheckpointStatus.DROPPED),
        (False, CheckpointStatus.COMPLETE, CheckpointStatus.PROTECTED),
    ],
)
def test_what_is_given_up_without_a_final_verdict_ends_its_save(
    is_due: bool, status: CheckpointStatus, told: CheckpointStatus
) -> None:
    inventory, turn = HostInventory(Settings()), Turn("a", 0.0, Published())
    one = checkpoint_id(1)
    inventory.note_sealed(
        turn, PartSealed(rank=0, id=one, part_count=2, in_ram=True, is_due=is_due)
    )
    inventory.apply_command(turn, Command(verdicts=(CheckpointVerdict(one, status, True),)))
    inventory.run_due(turn, is_frozen=False)
    assert [e.status for e in turn.effects if isinstance(e, ReportOutcome)] == [told]
    assert [e.id for e in turn.effects if isinstance(e, Drop)] == [one]


def test_an_open_checkpoint_is_not_forgotten_by_a_leader_that_may_not_recycle() -> None:
    table = CheckpointTable(attempt_id(1), {})
    table.required, table.preserved, table.domains = 1, frozenset(), {"a": "a", "b": "b"}
    old, new = checkpoint_id(1), checkpoint_id(2)
    held = Held(old, 2, is_due=False, own=((0, 1),), replicas=(), written=())
    whole = Held(new, 1, is_due=False, own=((0, 1),), replicas=(), written=())
    table.apply_report("b", {}, {old: held})
    table.apply_report("b", {old: held}, {})
    table.apply_report("a", {}, {new: whole})
    assert table.floor == new
    table.settle()
    assert old in table.entries
    table.recycling = Recycling.ALL
    table.settle()
    assert table.verdict(old).status is CheckpointStatus.DROPPED
