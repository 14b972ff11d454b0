"""The protocol against the invariants of docs/protocol.md, on seeded schedules.

`HOLDFAST_SCHEDULE=4711 pytest tests/coordination -k one_schedule` runs one seed alone, without a
remote tier and with one.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest

from holdfast.coordination.messages import TargetKind
from holdfast.coordination.settings import Settings, heartbeat_for
from tests.coordination.oracle import BrokenPromiseError
from tests.coordination.rules import BREACHES, BREACHES_OF_COPIES
from tests.coordination.schedule import Schedule
from tests.coordination.world import Shape, World
from tests.trust.figures import tell

FAST_SEEDS = 30
FAST_SEEDS_WITH_REMOTE = 20
SOAK_SEEDS = 10_000
CHUNK = 10
SEEN_BROKEN = [(6192, False), (21139, True), (101508, True), (810293, True), (50479, False)]
"""A host that had no orders yet reported without its ranks, which were taken for ended ones; a host
that was lost and came back was not sent the orders again that it had not acknowledged; a job that a
notice of the storm stops late was asked to stop once more, which was the schedule's own mistake; a
leader whose agent had been stopped took all other hosts for lost, and another start had the run;
a leader that had reported its attempt as ended heard from all hosts again before the start."""
MANY_HOSTS = 1000

# The seed that reveals each broken rule, so that the test runs one schedule. Other rules need the
# soak test, or have a case of their own in test_cases.py.
SEEN_AT = {
    "accept_without_looking": 4,
    "agree_before_all_accept": 0,
    "recycle_once_complete": 0,
    "drop_all_but_the_newest_part": 0,
    "never_send_again": 4,
    "commit_without_the_last_part": 0,
    "count_parts_of_other_steps": 0,
    "keep_words_of_the_attempt_before": 2,
    "go_on_from_the_newest_committed": 39,
    "begin_before_all_hosts_have_reported": 40,
    "join_without_a_record": 0,
    "keep_what_ranks_have_missed": 10,
    "never_pull": 0,
    "call_deleted_what_hosts_still_hold": 44,
}


def run_seed(seed: int, *, has_remote: bool = False) -> tuple[int, str, dict[str, int]]:
    """Return the seed, the broken invariant (empty: none), and the counts of events."""
    schedule = Schedule(seed, has_remote=has_remote)
    try:
        outcome = schedule.run()
    except (BrokenPromiseError, AssertionError) as error:
        return seed, str(error), {}
    counts = {str(what): count for what, count in outcome.counts.items()}
    return seed, "", counts | {"events": outcome.events, "messages": outcome.messages}


def replay(seed: int, error: str) -> str:
    command = f"HOLDFAST_SCHEDULE={seed} pytest tests/coordination -k one_schedule"
    return f"seed {seed}: {error}\nreplay: {command}"


def listed(counts: Counter[str]) -> str:
    """Return the counts of events as text, the most frequent first."""
    return ", ".join(f"{what!s} {count:,}" for what, count in counts.most_common())


@pytest.mark.parametrize("first", range(0, FAST_SEEDS, CHUNK))
def test_no_schedule_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + CHUNK):
        _, error, _ = run_seed(seed)
        assert not error, replay(seed, error)


@pytest.mark.parametrize("first", range(0, FAST_SEEDS_WITH_REMOTE, CHUNK))
def test_no_schedule_with_a_remote_tier_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + CHUNK):
        _, error, _ = run_seed(seed, has_remote=True)
        assert not error, replay(seed, error)


@pytest.mark.parametrize(("seed", "has_remote"), SEEN_BROKEN)
def test_a_schedule_that_broke_a_promise_breaks_none_now(seed: int, has_remote: bool) -> None:
    _, error, _ = run_seed(seed, has_remote=has_remote)
    assert not error, replay(seed, error)


def test_one_schedule_breaks_no_promise() -> None:
    seed = int(os.environ.get("HOLDFAST_SCHEDULE", "7"))
    for has_remote in (False, True):
        _, error, _ = run_seed(seed, has_remote=has_remote)
        assert not error, replay(seed, error)


@pytest.mark.parametrize("rule", SEEN_AT)
def test_the_simulator_notices_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BREACHES[rule](monkeypatch.setattr)
    seeds = range(SEEN_AT[rule], SEEN_AT[rule] + 10)
    assert any(run_seed(seed)[1] for seed in seeds), f"{rule} is broken, and no promise was"


@pytest.mark.parametrize("rule", BREACHES_OF_COPIES)
def test_the_simulator_notices_a_broken_rule_of_copies(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    BREACHES_OF_COPIES[rule](monkeypatch.setattr)
    error = next(filter(None, (run_seed(seed, has_remote=True)[1] for seed in range(10))), "")
    assert error, f"{rule} is broken, and no promise was"


@pytest.mark.parametrize("seed", [1092, 1240, 7, 8, 9])
def test_a_leader_of_many_hosts_that_places_replicas_at_intervals_breaks_no_promise(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first two seeds, hosts that hold parts join between two placements."""
    monkeypatch.setattr(Settings, "placing_secs", 0.3)
    _, error, _ = run_seed(seed, has_remote=True)
    assert not error


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("has_remote", [False, True])
def test_ten_thousand_schedules_break_no_promise(has_remote: bool) -> None:
    total: Counter[str] = Counter()
    broken = []
    run = partial(run_seed, has_remote=has_remote)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for seed, error, counts in pool.map(run, range(SOAK_SEEDS), chunksize=50):
            total.update(counts)
            if error:
                broken.append(replay(seed, error))
                print(broken[-1])
    tell(
        "agreement, two tiers" if has_remote else "agreement",
        "10,000 schedules of 2 to 16 hosts, 0 promises broken",
        f"{SOAK_SEEDS:,} schedules, {len(broken)} broken ({listed(total)})",
    )
    assert not broken, "\n".join(broken[:10])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_hosts_agree() -> None:
    outcome = many_hosts(MANY_HOSTS, secs=90.0)
    tell(
        "agreement, many hosts",
        "one schedule of 1,000 hosts",
        f"{MANY_HOSTS:,} hosts, 0 promises broken ({outcome})",
    )


def test_fifty_hosts_agree() -> None:
    many_hosts(50, secs=40.0)


def many_hosts(count: int, secs: float) -> str:
    """Many hosts, some losses, and a preemption, checked by the oracle."""
    shape = Shape(
        host_count=count,
        domain_size=4,
        ranks_a_host=1,
        window=2,
        every=0,
        copies=2,
        interval_secs=10.0,
        pace_secs=1.0,
    )
    heartbeat_secs = heartbeat_for(count)
    world = World(1, shape, Settings(copies=2, heartbeat_secs=heartbeat_secs))
    world.network.faults.drop, world.network.faults.repeat = 0.02, 0.02
    for host in world.hosts.values():
        host.start_agent()
    world.start_job(world.up_hosts())
    world.run(secs / 3)
    lost = [host for host in world.hosts.values() if host.domain == "d001"]
    for host in lost:
        host.crash()
    world.run(world.now + 8)
    for host in lost:
        host.reboot()
    assert world.run(world.now + secs, lambda: world.job is not None and world.job.is_running)
    job = world.job
    assert job is not None
    before = world.oracle.commits
    world.wish(job.trainers[-1].host.name, TargetKind.DURABLE)
    assert world.run(world.now + secs + 60, lambda: world.oracle.commits > before)
    world.restarts = False
    world.wish(job.trainers[-1].host.name, TargetKind.PREEMPTION)
    assert world.run(world.now + secs + 60, lambda: job.is_over)
    counts = listed(Counter(world.oracle.counts))
    return f"{world.events:,} events, {world.network.sent:,} messages, {counts}"
