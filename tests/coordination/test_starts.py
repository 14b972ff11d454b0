"""The start of an attempt: concurrent starts, hosts that report late, attempts on other hosts."""

from __future__ import annotations

import re
from copy import deepcopy

import pytest

from holdfast.coordination.effects import (
    BeginAttempt,
    Effect,
    ListDurable,
)
from holdfast.coordination.follower.rank_group import RankGroup
from holdfast.coordination.inputs import DurableListed, ListingFailed, Published
from holdfast.coordination.messages import CheckpointStatus, TargetKind
from holdfast.coordination.settings import LEASE_SECS, STORING_SECS, TRIES_MAX, Settings
from holdfast.coordination.start.bootstrap import Bootstrap
from holdfast.coordination.start.restart_point import UNKNOWN_REASON
from holdfast.coordination.turn import AgentIdentity, Turn
from holdfast.format.names import NO_ATTEMPT, CheckpointId
from tests.coordination.cases import make, reached, running, until
from tests.coordination.oracle import BrokenPromiseError
from tests.coordination.rules import BREACHES
from tests.coordination.world import World

FAST_SECS = 10.0
"""A start that waits for no lease takes less."""
SLOW_SECS = 10.0
"""How long slow storage takes for a request at most."""


def test_of_two_starts_at_once_one_wins_and_the_other_is_told_that_the_run_is_busy() -> None:
    world = make(4)
    first = world.start_job(["h0000", "h0001"])
    second = world.start_job(["h0002", "h0003"])
    until(world, lambda: first.is_running or second.is_running)
    until(world, lambda: bool(first.refused or second.refused))
    assert first.is_running != second.is_running
    assert world.oracle.counts["busy"] == 2
    assert list(world.storage.attempts) == [1]


@pytest.mark.parametrize("answer_secs", [0.0, 0.5])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_of_two_starts_on_the_same_hosts_one_wins_in_whatever_order_their_ranks_come(
    seed: int, turned: bool, answer_secs: float
) -> None:
    world = make(3)
    world.answer_secs = answer_secs
    world.rng.seed(seed)
    hosts = list(world.hosts)
    first = world.start_job(hosts)
    second = world.start_job(hosts[::-1] if turned else hosts)
    until(world, lambda: first.is_running or second.is_running)
    until(world, lambda: bool(first.refused or second.refused))
    world.run(world.now + 20)
    (winner,) = (job for job in (first, second) if len(job.living) == len(hosts))
    assert winner.is_running
    assert not winner.refused
    assert list(world.storage.attempts) == [1]


def cut_off(world: World, name: str) -> set[tuple[str, str]]:
    """Cut a host off from all others; return the pairs to take out of `cut` to heal it."""
    pairs = {pair for other in world.hosts if other != name for pair in cut_pair(name, other)}
    world.network.cut |= pairs
    return pairs


def cut_pair(one: str, other: str) -> set[tuple[str, str]]:
    return {(one, other), (other, one)}


def protected_in_ram(world: World) -> CheckpointId:
    """Run until a checkpoint is protected by RAM alone; return it."""
    job = running(world)
    world.run(world.now + 1)
    world.wish(job.leader, TargetKind.RAM)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    job.kill()
    (newest,) = {max(host.ram) for host in world.hosts.values()}
    assert newest not in world.storage.manifests
    return newest


@pytest.mark.parametrize("late_secs", [20.0, 60.0])
@pytest.mark.parametrize(("lost", "late"), [("h0001", "h0002"), ("h0000", "h0001")])
def test_a_host_that_reports_late_and_a_lost_one_cost_nothing_that_was_protected(
    lost: str, late: str, late_secs: float
) -> None:
    world = make(3)
    world.are_writes_refused = True
    newest = protected_in_ram(world)
    world.hosts[lost].crash()
    pairs = cut_off(world, late)
    world.hosts[lost].reboot()
    job = world.start_job(list(world.hosts))
    world.run(world.now + late_secs)
    assert not job.is_running
    assert list(world.storage.attempts) == [1]
    world.network.cut -= pairs
    until(world, lambda: job.is_running)
    assert world.storage.attempts[2].origin == newest
    assert not any(host.given_up for host in world.hosts.values())


def test_a_start_that_a_host_never_reports_to_is_refused_and_names_it() -> None:
    world = make(3)
    protected_in_ram(world)
    cut_off(world, "h0002")
    held = {name: set(host.ram) for name, host in world.hosts.items()}
    job = world.start_job(list(world.hosts))
    began_at = world.now
    assert world.run(world.now + 2 * Settings().joining_secs, lambda: bool(job.refused))
    assert world.now - began_at < Settings().reporting_secs + 2
    assert "rank 2 of host h0002 has not reported to host h0000 within 90 s" in job.refused
    assert list(world.storage.attempts) == [1]
    assert {name: set(host.ram) for name, host in world.hosts.items()} == held


def test_a_host_that_hears_nothing_of_its_start_names_the_host_that_begins_it() -> None:
    world = make(2)
    cut_off(world, "h0000")
    job = world.start_job(["h0000", "h0001"])
    world.run(world.now + 1)
    world.hosts["h0000"].kill_agent()
    assert world.run(world.now + 2 * Settings().joining_secs, lambda: bool(job.refused))
    assert "host h0000, where rank 0 is, has not begun it within" in job.refused


def test_a_start_on_fewer_hosts_waits_for_the_others_in_bounds_and_names_what_it_gives_up() -> None:
    world = make(3)
    world.are_writes_refused = True
    newest = protected_in_ram(world)
    world.hosts["h0001"].crash()
    cut_off(world, "h0002")
    world.is_calm = False
    began_at = world.now
    running(world, ["h0000"])
    assert world.now - began_at < FAST_SECS
    (lost,) = world.hosts["h0000"].given_up
    assert (lost.id, lost.status) == (newest, CheckpointStatus.PROTECTED)
    assert "parts of rank 1" in lost.reason
    assert "h0001, h0002" in lost.reason


def test_a_start_on_another_host_is_refused_while_a_host_that_cannot_be_asked_trains() -> None:
    world = make(2)
    cut_off(world, "h0000")
    first = running(world, ["h0000"])
    world.run(world.now + 7)
    began_at = world.now
    second = world.start_job(["h0001"])
    until(world, lambda: bool(second.refused))
    assert world.oracle.counts["busy"] == 1
    assert world.now - began_at < FAST_SECS + 5
    check_names_holder(second.refused)
    assert first.is_running
    assert list(world.storage.attempts) == [1]


def test_no_start_has_a_live_run_whose_agent_was_stopped_for_longer_than_a_silence() -> None:
    world = make(4)
    first = running(world, ["h0000", "h0001", "h0002"])
    leader = world.hosts["h0000"]
    leader.halt()
    world.run(world.now + Settings().lost_secs + 2)
    second = world.start_job(["h0003"])
    world.run(world.now + 0.5)
    leader.go_on()
    until(world, lambda: bool(second.refused))
    assert "attempt 1 is live on other hosts" in second.refused
    assert len(first.living) == 3
    assert list(world.storage.attempts) == [1]


def check_names_holder(refusal: str) -> None:
    assert "attempt 1 is live on host h0000 (process 1 of user u)" in refusal
    found = re.search(r"is valid for another (\d+) s", refusal)
    assert found is not None, refusal
    assert LEASE_SECS - 6 < int(found[1]) <= LEASE_SECS


@pytest.mark.parametrize("age_secs", [2.0, 40.0])
def test_a_start_by_another_agent_of_the_same_hosts_name_is_refused(age_secs: float) -> None:
    world = make(1)
    first = running(world)
    world.run(world.now + age_secs)
    world.add_twin("h0000")
    began_at = world.now
    second = world.start_job(["h0000-twin"])
    until(world, lambda: bool(second.refused))
    assert world.now - began_at < FAST_SECS
    check_names_holder(second.refused)
    world.run(world.now + 2 * LEASE_SECS)
    assert first.is_running
    assert list(world.storage.attempts) == [1]


def test_of_two_starts_at_once_by_agents_of_one_name_one_wins() -> None:
    world = make(1)
    world.add_twin("h0000")
    jobs = [world.start_job([name]) for name in world.hosts]
    until(world, lambda: any(job.refused for job in jobs))
    assert sum(job.is_running for job in jobs) == 1
    assert list(world.storage.attempts) == [1]


def test_an_agent_that_did_not_lead_the_attempt_does_not_answer_for_the_host_of_its_name() -> None:
    world = make(2)
    first = running(world, ["h0000"])
    world.hosts["h0000"], twin = world.add_twin("h0000"), world.hosts["h0000"]
    began_at = world.now
    second = world.start_job(["h0001"])
    until(world, lambda: bool(second.refused))
    assert world.now - began_at < FAST_SECS
    check_names_holder(second.refused)
    assert first.is_running
    assert twin.agent is not None
    assert list(world.storage.attempts) == [1]


def test_a_takeover_by_another_agent_of_the_same_hosts_name_waits_for_nothing() -> None:
    world = make(1)
    running(world)
    world.add_twin("h0000")
    began_at = world.now
    running(world, ["h0000-twin"], takeover=True)
    assert world.now - began_at < FAST_SECS / 2
    assert list(world.storage.attempts) == [1, 2]


def test_an_attempt_that_ended_is_followed_at_once_by_an_agent_of_the_same_hosts_name() -> None:
    world = make(1)
    first = running(world)
    first.finish()
    until(world, lambda: first.is_over)
    world.run(world.now + 1)
    world.add_twin("h0000")
    began_at = world.now
    running(world, ["h0000-twin"])
    assert world.now - began_at < FAST_SECS / 2


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_host_whose_trainers_and_agent_were_killed_waits_for_no_lease(is_joined: bool) -> None:
    world = make(1)
    first = world.start_job(["h0000"])
    until(world, lambda: first.is_running if is_joined else bool(world.storage.attempts))
    world.hosts["h0000"].kill_agent()
    first.kill()
    assert 1 in world.storage.leases
    began_at = world.now
    running(world)
    assert world.now - began_at < FAST_SECS / 2
    assert not world.hosts["h0000"].awaited


def test_a_host_that_came_back_without_its_ram_waits_until_its_lease_has_run_out() -> None:
    world = make(1)
    running(world)
    world.run(world.now + 7)
    world.hosts["h0000"].crash()
    world.hosts["h0000"].reboot()
    began_at = world.now
    running(world)
    assert LEASE_SECS - 10 < world.now - began_at < LEASE_SECS + FAST_SECS
    (told,) = world.hosts["h0000"].awaited
    assert (told.attempt.number, told.host) == (1, "h0000")


def test_the_oracle_notices_an_attempt_that_is_known_by_its_hosts_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    BREACHES["know_an_attempt_by_its_hosts_name"](monkeypatch.setattr)
    world = make(1)
    running(world)
    world.run(world.now + 2)
    world.add_twin("h0000")
    with pytest.raises(BrokenPromiseError, match=r"I11.*begins 2 while attempt 1 is live"):
        running(world, ["h0000-twin"])


@pytest.mark.parametrize("since_secs", [0.0, 17.0, 40.0])
def test_a_lost_host_is_taken_over_once_its_lease_has_run_out(since_secs: float) -> None:
    world = make(2)
    cut_off(world, "h0000")
    running(world, ["h0000"])
    world.run(world.now + 7)
    world.hosts["h0000"].crash()
    world.run(world.now + since_secs)
    began_at = world.now
    running(world, ["h0001"])
    waited_secs = world.now - began_at
    awaited = world.hosts["h0001"].awaited
    if since_secs >= LEASE_SECS:
        assert not awaited
        assert waited_secs < FAST_SECS
        return
    assert LEASE_SECS - 10 < waited_secs + since_secs < LEASE_SECS + FAST_SECS
    (told,) = awaited
    assert (told.attempt.number, told.host) == (1, "h0000")
    assert told.secs == pytest.approx(LEASE_SECS - since_secs, abs=10)


def test_an_attempt_that_has_left_is_followed_at_once_on_any_host() -> None:
    world = make(2)
    cut_off(world, "h0000")
    first = running(world, ["h0000"])
    world.run(world.now + 7)
    first.finish()
    until(world, lambda: first.is_over)
    world.run(world.now + 1)
    assert not world.storage.leases
    began_at = world.now
    running(world, ["h0001"])
    assert world.now - began_at < FAST_SECS
    assert not world.hosts["h0001"].awaited


def left_to_store(*, is_refused: bool = False) -> tuple[World, CheckpointId]:
    """A host that cannot be asked, whose trainers were killed, and what it has yet to store."""
    world = make(2)
    cut_off(world, "h0000")
    first = running(world, ["h0000"])
    world.run(world.now + 7)
    world.storage_slow_secs, world.are_writes_refused = SLOW_SECS, is_refused
    world.wish("h0000", TargetKind.DURABLE)
    until(world, lambda: reached(world, CheckpointStatus.COMPLETE))
    first.kill()
    (checkpoint,) = world.hosts["h0000"].ram
    assert checkpoint not in world.storage.manifests
    return world, checkpoint


def test_a_start_waits_for_an_agent_elsewhere_that_stores_what_its_trainers_left() -> None:
    world, checkpoint = left_to_store()
    running(world, ["h0001"])
    assert world.storage.attempts[2].origin == checkpoint
    (told,) = world.hosts["h0001"].awaited
    assert (told.host, told.is_storing, told.secs) == ("h0000", True, STORING_SECS)
    assert not world.hosts["h0001"].ram_given_up


def test_a_start_waits_in_bounds_for_an_agent_that_cannot_store() -> None:
    world, _ = left_to_store(is_refused=True)
    # What is protected on a host that cannot be reached is lost.
    world.is_calm = False
    began_at = world.now
    job = world.start_job(["h0001"])
    assert world.run(world.now + STORING_SECS + 10 * SLOW_SECS, lambda: job.is_running)
    assert world.now - began_at >= STORING_SECS
    assert world.storage.attempts[2].origin is None
    (given_up,) = world.hosts["h0001"].ram_given_up
    assert (given_up.host, given_up.attempt.number) == ("h0000", 1)
    assert "within 60 s" in given_up.reason


def test_a_start_waits_no_longer_than_a_lease_for_an_agent_that_dies_while_it_stores() -> None:
    world, _ = left_to_store(is_refused=True)
    world.run(world.now + SLOW_SECS)
    world.hosts["h0000"].crash()
    world.are_writes_refused, world.storage_slow_secs = False, 0.05
    began_at = world.now
    running(world, ["h0001"])
    # A renewal may have been under way.
    assert world.now - began_at < SLOW_SECS + LEASE_SECS + FAST_SECS < STORING_SECS
    (given_up,) = world.hosts["h0001"].ram_given_up
    assert "not renewed" in given_up.reason


@pytest.mark.parametrize("is_agent_killed", [False, True])
def test_hosts_that_saw_their_ranks_end_wait_for_no_lease(is_agent_killed: bool) -> None:
    world = make(3)
    first = running(world)
    world.run(world.now + 3)
    world.hosts["h0000"].crash()
    first.kill()
    assert 1 in world.storage.leases
    for name in ("h0001", "h0002"):
        if is_agent_killed:
            world.hosts[name].kill_agent()
    began_at = world.now
    running(world, ["h0001", "h0002"])
    assert world.now - began_at < FAST_SECS
    assert not world.hosts["h0001"].awaited


def test_a_takeover_waits_for_no_lease() -> None:
    world = make(2)
    cut_off(world, "h0000")
    running(world, ["h0000"])
    began_at = world.now
    running(world, ["h0001"], takeover=True)
    assert world.now - began_at < FAST_SECS
    assert list(world.storage.attempts) == [1, 2]


def test_a_training_that_saves_nothing_learns_that_it_was_taken_over() -> None:
    world = make(2)
    cut_off(world, "h0000")
    first = running(world, ["h0000"])
    running(world, ["h0001"], takeover=True)
    until(world, lambda: not first.living)


def test_a_host_that_stood_still_is_taken_over_and_can_do_nothing_when_it_goes_on() -> None:
    world = make(2)
    cut_off(world, "h0000")
    first = running(world, ["h0000"])
    world.wish("h0000", TargetKind.DURABLE)
    until(world, lambda: bool(world.storage.manifests))
    paused = world.hosts["h0000"]
    paused.pause()
    began_at = world.now
    running(world, ["h0001"])
    assert LEASE_SECS - 10 < world.now - began_at < LEASE_SECS + FAST_SECS
    committed = set(world.storage.manifests)
    paused.unpause()
    for _ in range(3):
        world.wish("h0000", TargetKind.DURABLE)
        world.run(world.now + 5)
    assert not first.living
    late = set(world.storage.manifests) - committed
    assert not any(checkpoint.attempt.number == 1 for checkpoint in late)


def test_an_agent_that_returns_to_its_trainers_renews_their_lease() -> None:
    world = make(2)
    cut_off(world, "h0000")
    first = running(world, ["h0000"])
    world.hosts["h0000"].kill_agent()
    world.run(world.now + 3)
    world.hosts["h0000"].start_agent()
    world.run(world.now + 2 * LEASE_SECS)
    second = world.start_job(["h0001"])
    until(world, lambda: bool(second.refused))
    assert first.is_running


@pytest.mark.parametrize("seed", range(10))
def test_of_two_starts_that_cannot_ask_each_other_one_wins(seed: int) -> None:
    world = make(2)
    world.rng.seed(seed)
    cut_off(world, "h0000")
    first, second = world.start_job(["h0000"]), world.start_job(["h0001"])
    until(world, lambda: bool(first.refused or second.refused))
    assert list(world.storage.attempts) == [1]
    assert sum(job.is_running for job in (first, second)) == 1


def trained(world: World, hosts: list[str], secs: float, kind: TargetKind) -> CheckpointId:
    """Train on `hosts` for a while, and end all trainers; return the newest checkpoint."""
    status = {
        TargetKind.DURABLE: CheckpointStatus.COMMITTED,
        TargetKind.RAM: CheckpointStatus.PROTECTED,
    }[kind]
    job = running(world, hosts)
    world.run(world.now + secs)
    count = world.oracle.counts.get(status, 0)
    world.wish(hosts[0], kind)
    until(world, lambda: reached(world, status, count + 1))
    job.kill()
    return max(world.hosts[hosts[0]].ram, key=lambda checkpoint: checkpoint.age)


@pytest.mark.parametrize("hosts", [["h0000"], ["h0000", "h0001"], ["h0001", "h0000"]])
@pytest.mark.parametrize("is_agent_killed", [False, True])
@pytest.mark.parametrize("lost_kind", [TargetKind.DURABLE, TargetKind.RAM])
@pytest.mark.parametrize("shift", range(3))
def test_a_run_that_was_put_back_goes_on_from_its_new_attempt_and_not_from_the_lost_one_in_ram(
    shift: int, lost_kind: TargetKind, is_agent_killed: bool, hosts: list[str]
) -> None:
    world = make(2)
    # Other groups, so that either of the two attempts 2 may have the greater token.
    world.jobs_before = shift
    first = trained(world, ["h0000"], 3.0, TargetKind.DURABLE)
    # Only its RAM has the last checkpoints of the lost attempt.
    world.are_writes_refused = lost_kind is TargetKind.RAM
    lost = trained(world, ["h0000"], 20.0, lost_kind)
    world.run(world.now + 1)
    if is_agent_killed:
        world.hosts["h0000"].kill_agent()
    world.storage.put_back(1)
    world.are_writes_refused = False
    newest = trained(world, ["h0001"], 5.0, TargetKind.DURABLE)
    assert world.storage.attempts[2].origin == first
    assert newest.attempt.number == lost.attempt.number == 2
    assert newest.attempt != lost.attempt
    assert newest.step < lost.step
    assert any(lost in host.ram for host in world.hosts.values())
    running(world, hosts)
    assert world.storage.attempts[3].origin == newest
    assert list(world.storage.attempts) == [1, 2, 3]
    given_up = [one for host in world.hosts.values() for one in host.given_up if one.id == lost]
    assert [one.reason for one in given_up] == [UNKNOWN_REASON]


def without_newer_records(world: World) -> tuple[CheckpointId, CheckpointId, dict]:
    """Train three attempts, and remove the records of the newer two alone.

    Returns:
        The newest checkpoints of the first attempt and of the last one, and the records.
    """
    first = trained(world, ["h0000"], 3.0, TargetKind.DURABLE)
    for _ in range(2):
        last = trained(world, ["h0000"], 5.0, TargetKind.DURABLE)
    world.hosts["h0000"].crash()
    records = {number: world.storage.attempts.pop(number) for number in (2, 3)}
    assert {first, last} <= world.storage.manifests.keys()
    return first, last, records


def test_committed_checkpoints_without_the_records_of_their_attempts_refuse_a_start() -> None:
    world = make(2)
    first, last, _ = without_newer_records(world)
    job = world.start_job(["h0001"])
    began_at = world.now
    assert world.run(world.now + 2 * LEASE_SECS, lambda: bool(job.refused))
    assert world.now - began_at >= LEASE_SECS
    assert f"step {last.step} of attempt 3 committed and no record" in job.refused
    assert f"takeover=True, which continues from step {first.step}" in job.refused
    assert list(world.storage.attempts) == [1]


def test_a_takeover_begins_beside_checkpoints_without_records_and_above_their_numbers() -> None:
    world = make(2)
    first, last, _ = without_newer_records(world)
    job = world.start_job(["h0001"], takeover=True)
    began_at = world.now
    until(world, lambda: job.is_running)
    assert world.now - began_at < FAST_SECS
    assert list(world.storage.attempts) == [1, 4]
    assert world.storage.attempts[4].origin == first
    (lost,) = (one for one in world.hosts["h0001"].given_up if one.id == last)
    assert (lost.status, lost.reason) == (CheckpointStatus.COMMITTED, UNKNOWN_REASON)


def test_records_that_storage_shows_later_than_the_checkpoints_are_awaited() -> None:
    world = make(2)
    _, last, records = without_newer_records(world)
    job = world.start_job(["h0001"])
    world.run(world.now + LEASE_SECS / 2)
    assert not job.is_running
    assert not job.refused
    world.storage.attempts |= records
    until(world, lambda: job.is_running)
    assert world.storage.attempts[4].origin == last


@pytest.mark.parametrize("hosts", [["h0000"], ["h0001"]])
def test_a_checkpoint_that_was_deleted_and_put_back_is_continued_from(hosts: list[str]) -> None:
    """The agent that deleted it lives on, and reports that to each later start."""
    world = make(2)
    first = trained(world, ["h0000", "h0001"], 3.0, TargetKind.DURABLE)
    before = deepcopy(world.storage)
    world.run(world.now + 1)
    world.hosts["h0000"].delete(first)
    world.run(world.now + 1)
    world.storage.manifests, world.storage.parts = before.manifests, before.parts
    # The oracle takes a delete for the last word.
    world.oracle.are_deleted.clear()
    running(world, hosts)
    assert world.storage.attempts[2].origin == first


def test_a_late_failure_of_another_listing_neither_repeats_a_begin_nor_refuses_it() -> None:
    settings = Settings()
    identity = AgentIdentity(run="r", host="h", domain="h", incarnation=1, settings=settings)
    start = Bootstrap(identity, RankGroup("token", 0, "h"), 0.0)

    def effects_at(secs: float, *failures: ListingFailed) -> list[Effect]:
        turn = Turn("h", secs, Published())
        for failure in failures:
            start.listing_failed(turn, failure)
        start.run_due(turn, None)
        return turn.effects

    assert effects_at(0.0) == [ListDurable()]
    start.listed_durable(
        DurableListed(
            newest_attempt=NO_ATTEMPT, leader="", limits={}, committed=frozenset(), parts={}
        )
    )
    (begin,) = effects_at(1.0)
    assert isinstance(begin, BeginAttempt)
    failures = [ListingFailed("late")] * TRIES_MAX
    assert effects_at(1.0 + settings.storage_retry_secs, *failures) == []
    assert effects_at(1.0 + 3 * settings.storage_retry_secs) == []
    assert (start.refusal, start.awaits(begin)) == ("", True)
