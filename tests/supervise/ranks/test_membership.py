"""The ranks of the next generation are decided as `membership` promises, whatever happens."""

from __future__ import annotations

import os

import pytest

from holdfast.supervise.ranks import membership
from holdfast.supervise.ranks.membership import (
    Joined,
    Leave,
    Member,
    Membership,
    Seat,
    Settings,
    State,
)
from tests.supervise.ranks.simulated_job import Job

FOUR = Settings(ranks=4, spares=1, ranks_min=4, leave_secs=5.0)
SCHEDULES = int(os.environ.get("HOLDFAST_SCHEDULES", "300"))


def ready_job(settings: Settings) -> Membership:
    """Return a job whose first generation has begun."""
    job = Membership(settings, set(range(settings.hosts)))
    for host in range(settings.hosts):
        assert job.join(host, starting(settings, host), 0.0) == []
    for host in range(settings.hosts):
        for member in settings.first_members(host):
            job.ready(member, 1.0)
    assert job.generation == 1
    return job


def starting(settings: Settings, host: int = 0) -> Joined:
    """Return the processes of a host that starts."""
    return Joined(members={member: Member() for member in settings.first_members(host)})


def known(job: Membership, host: int) -> Joined:
    """Return what a host's launcher knows."""
    own = {m: m_own for m, m_own in job._members.items() if m % job.settings.hosts == host}
    return Joined(members=own, generation=job.generation, size=job.size)


def test_the_first_processes_are_the_ranks_and_the_others_are_spares() -> None:
    job = Membership(FOUR)
    assert job.join(0, starting(FOUR), 0.0) == []
    assert [effect for member in range(3) for effect in job.ready(member, 1.0)] == []
    (begin,) = job.ready(3, 1.0)
    seats = tuple(Seat(rank, rank, rank) for rank in range(4))
    assert begin == membership.Begin(1, seats, ())


def test_a_spare_takes_the_seat_of_a_lost_rank_and_the_others_keep_theirs() -> None:
    job = ready_job(FOUR)
    assert job.ended(2, "killed", 2.0) == [membership.Break(1, (0, 1, 3)), membership.Start(5)]
    assert job.left(0, 1, Leave(7, "closed by peer"), 2.1) == []
    assert job.left(1, 1, Leave(7, "closed by peer"), 2.1) == []
    seats = Seat(0, 0, 0), Seat(1, 1, 1), Seat(4, 2, 2), Seat(3, 3, 3)
    assert job.left(3, 1, Leave(7, "closed by peer"), 2.1) == [membership.Begin(2, seats, (2,))]


def test_survivors_that_hold_one_step_save_it_first() -> None:
    job = ready_job(FOUR)
    job.ended(2, "killed", 2.0)
    for member in (0, 1):
        job.left(member, 1, Leave(7, "closed", kept_step=7), 2.1)
    (begin,) = job.left(3, 1, Leave(7, "closed", kept_step=7), 2.1)
    seats = Seat(0, 0, 0), Seat(1, 1, 1), Seat(3, 2, 3)
    assert begin == membership.Begin(2, seats, (), 7, (0, 1, 3))
    for member in (0, 1):
        assert job.left(member, 2, Leave(7, ""), 2.2) == []
    (begin,) = job.left(3, 2, Leave(7, ""), 2.2)
    seats = Seat(0, 0, 0), Seat(1, 1, 1), Seat(4, 2, 2), Seat(3, 3, 3)
    assert begin == membership.Begin(3, seats, (2,))


@pytest.mark.parametrize("other", [None, 6])
def test_survivors_that_hold_different_steps_save_none(other: int | None) -> None:
    job = ready_job(FOUR)
    job.ended(2, "killed", 2.0)
    for member in (0, 1):
        job.left(member, 1, Leave(7, "closed", kept_step=7), 2.1)
    (begin,) = job.left(3, 1, Leave(7, "closed", kept_step=other), 2.1)
    assert isinstance(begin, membership.Begin)
    assert begin.kept_step is None


def test_a_survivor_that_is_lost_while_it_saves_is_replaced_too() -> None:
    job = ready_job(FOUR)
    job.ended(2, "killed", 2.0)
    for member in (0, 1, 3):
        job.left(member, 1, Leave(7, "closed", kept_step=7), 2.1)
    assert job.ended(3, "killed", 2.2) == [membership.Break(2, (0, 1)), membership.Start(6)]
    job.ready(5, 2.3)
    job.left(0, 2, Leave(7, "lost"), 2.4)
    (begin,) = job.left(1, 2, Leave(7, "lost"), 2.4)
    assert isinstance(begin, membership.Begin)
    assert (begin.generation, begin.lost, begin.kept_step) == (3, (2, 3), None)


def test_a_rank_that_does_not_leave_is_killed_and_lost() -> None:
    job = ready_job(FOUR)
    job.ended(2, "killed", 2.0)
    job.left(0, 1, Leave(7, "closed by peer"), 2.1)
    job.left(1, 1, Leave(7, "closed by peer"), 2.1)
    assert job.next_secs == 7.0
    assert job.tick(6.9) == []
    assert job.tick(7.0) == [membership.Kill(3)]
    assert job.tick(7.1) == []
    assert job.ended(3, "killed", 7.2) == [membership.Start(6)]
    (begin,) = job.ready(5, 9.0)
    assert isinstance(begin, membership.Begin)
    assert begin.lost == (2, 3)


def test_a_failure_is_the_programs_own_if_no_rank_ends_meanwhile() -> None:
    job = ready_job(FOUR)
    assert job.failed(1, 1, "ValueError: bad batch", 2.0) == []
    assert job.next_secs == 2.0 + membership.DOUBT_SECS
    assert job.tick(2.0 + membership.DOUBT_SECS) == [membership.Own(1)]


def test_a_failure_follows_from_a_rank_that_ends_meanwhile() -> None:
    job = ready_job(FOUR)
    job.failed(1, 1, "RuntimeError: something of the network", 2.0)
    effects = job.ended(2, "killed", 2.2)
    assert membership.Break(1, (0, 1, 3)) in effects
    assert job.tick(3.0) == []


def test_a_job_without_spares_goes_on_with_fewer_ranks() -> None:
    job = ready_job(Settings(ranks=4, spares=0, ranks_min=2, leave_secs=5.0))
    assert job.ended(0, "killed", 2.0) == [membership.Break(1, (1, 2, 3))]
    job.left(1, 1, Leave(7, "closed"), 2.1)
    job.left(2, 1, Leave(7, "closed"), 2.1)
    seats = Seat(1, 0, 1), Seat(2, 1, 2), Seat(3, 2, 3)
    assert job.left(3, 1, Leave(7, "closed"), 2.1) == [membership.Begin(2, seats, (0,))]


def test_a_job_with_too_few_ranks_is_given_up() -> None:
    job = ready_job(Settings(ranks=2, spares=0, ranks_min=1, leave_secs=5.0))
    job.ended(0, "killed", 2.0)
    (effect,) = job.ended(1, "killed", 2.0)
    assert effect == membership.GiveUp("0 processes are left, fewer than 1 (killed)")


def test_a_rank_that_has_finished_trains_again_with_the_others() -> None:
    job = ready_job(FOUR)
    for member in (0, 1, 3):
        assert job.finished(member, 1, 2.0) == []
    effects = job.ended(2, "killed", 3.0)
    assert isinstance(effects[1], membership.Begin)
    assert [seat.member for seat in effects[1].seats] == [0, 1, 4, 3]


def test_processes_that_do_not_call_surviving_give_the_job_up() -> None:
    job = Membership(FOUR)
    job.join(0, starting(FOUR), 0.0)
    for member in range(2):
        assert job.ended(member, "exit code 1", 1.0)[0] == membership.Start(5 + member)
    (effect,) = job.ended(2, "exit code 1", 1.0)
    assert effect == membership.GiveUp("processes end before they call surviving (exit code 1)")


def test_generations_without_a_new_step_give_the_job_up() -> None:
    job, now_secs = ready_job(FOUR), 2.0
    while not job.is_over:
        now_secs += 1.0
        members = [m for m, own in job._members.items() if own.rank is not None]
        effects = job.ended(members[0], "killed", now_secs)
        for member in members[1:]:
            effects += job.left(member, job.generation, Leave(7, "closed"), now_secs)
        for start in effects:
            if isinstance(start, membership.Start) and not job.is_over:
                effects += job.ready(start.member, now_secs)
    assert job.generation == membership.LOSSES_MAX + 1


def test_a_job_that_was_told_to_end_replaces_no_rank() -> None:
    job = ready_job(FOUR)
    assert job.ending(0, 2.0) == []
    assert job.ended(2, "killed", 2.0) == [membership.Break(1, (0, 1, 3))]
    job.left(0, 1, Leave(7, "closed"), 2.1)
    job.left(1, 1, Leave(7, "closed"), 2.1)
    assert job.left(3, 1, Leave(7, "closed"), 2.1) == [membership.Release(has_finished=False)]


@pytest.mark.parametrize("spares", [0, 1, 3])
@pytest.mark.parametrize("ranks_min", [1, 4])
def test_a_job_trains_to_its_end_once_faults_stop(spares: int, ranks_min: int) -> None:
    settings = Settings(ranks=4, spares=spares, ranks_min=ranks_min, leave_secs=5.0)
    generations = 0
    for seed in range(SCHEDULES // 6):
        job = Job(seed, settings, {"end": 0.02, "stick": 0.01, "fail": 0.01})
        job.run(10.0)
        job.stop_faults()
        job.run(200.0)
        assert job.is_released or job.gave_up, f"seed {seed}"
        generations += len(job.begun)
    assert generations > SCHEDULES // 6


TWO_EACH = Settings(ranks=4, spares=0, ranks_min=4, leave_secs=5.0, hosts=3, spare_hosts=1)
"""Hosts 0 and 1 have two ranks each: the processes 0 and 3, and 1 and 4. Host 2 waits."""


def begun(effects: list[membership.Effect]) -> membership.Begin:
    (begin,) = [effect for effect in effects if isinstance(effect, membership.Begin)]
    return begin


def leave(job: Membership, *members: int, secs: float = 2.1) -> list[membership.Effect]:
    """Let processes leave the present generation; return the effects of the last one."""
    return [job.left(m, job.generation, Leave(7, "closed"), secs) for m in members][-1]


def test_a_spare_host_takes_the_ranks_of_a_lost_one() -> None:
    job = ready_job(TWO_EACH)
    assert job.host_lost(1, 2.0) == [membership.Break(1, (0, 3))]
    begin = begun(leave(job, 0, 3))
    assert begin.seats == (Seat(0, 0, 0), Seat(3, 1, 1), Seat(2, 2, 0), Seat(5, 3, 1))
    assert begin.lost == (2, 3)


def test_the_ranks_keep_their_numbers_when_the_first_host_is_lost() -> None:
    job = ready_job(TWO_EACH)
    other = Membership(TWO_EACH, {0, 1, 2})
    assert other.join(1, known(job, 1), 2.0) == []
    assert other.join(2, known(job, 2), 2.0) == []
    # The host that was lost may not have noticed yet.
    leave(other, 1, 4)
    assert other.tick(2.0 + membership.JOIN_SECS - 0.1) == []
    begin = begun(other.tick(2.0 + membership.JOIN_SECS))
    assert begin.generation == 2
    assert begin.seats == (Seat(2, 0, 0), Seat(5, 1, 1), Seat(1, 2, 0), Seat(4, 3, 1))
    assert begin.lost == (0, 1)


def test_hosts_without_a_majority_do_not_train() -> None:
    job = ready_job(TWO_EACH)
    job.host_lost(1, 2.0)
    leave(job, 0, 3, secs=2.1)
    assert job.generation == 2
    # The ranks of the next generation are whole when the other side may have elected a leader.
    assert job.host_lost(2, 3.0) == [membership.Break(2, (0, 3))]
    leave(job, 0, 3)
    assert job.tick(3.0 + membership.HOST_SECS - 0.1) == []
    (effect,) = job.tick(3.0 + membership.HOST_SECS)
    reason = "1 of 3 hosts are here, which is no majority (lost host 2)"
    assert effect == membership.GiveUp(reason)


def test_a_spare_host_without_which_there_is_no_majority_ends_the_generation() -> None:
    settings = Settings(ranks=2, spares=0, ranks_min=1, leave_secs=5.0, hosts=4, spare_hosts=2)
    job = ready_job(settings)
    assert job.host_lost(3, 2.0) == []
    assert job.host_lost(2, 2.0) == []
    # Half of the hosts, with the first one.
    assert job.has_quorum
    assert membership.Break(1, (0,)) in job.host_lost(1, 2.0)
    assert not job.has_quorum


def test_a_job_goes_on_at_once_with_the_ranks_of_the_hosts_that_are_left() -> None:
    settings = Settings(ranks=4, spares=1, ranks_min=2, leave_secs=5.0, hosts=2)
    job = ready_job(settings)
    job.host_lost(1, 2.0)
    begin = begun(leave(job, 0, 2))
    assert begin.seats == (Seat(0, 0, 0), Seat(2, 1, 1))
    assert begin.lost == (2, 3)


def test_a_host_that_comes_back_gives_its_processes_to_the_ranks_that_are_free() -> None:
    settings = Settings(ranks=4, spares=0, ranks_min=4, leave_secs=5.0, hosts=2)
    job = ready_job(settings)
    cut_off = known(job, 1)
    job.host_lost(1, 2.0)
    assert leave(job, 0, 2) == []
    assert job.join(1, cut_off, 3.0) == []
    begin = begun(leave(job, 1, 3))
    assert [(seat.member, seat.rank) for seat in begin.seats] == [(0, 0), (2, 1), (1, 2), (3, 3)]
    # No rank was lost, only the connection.
    assert begin.lost == ()


def test_processes_of_an_older_generation_wait_until_they_have_left_it() -> None:
    job = ready_job(TWO_EACH)
    cut_off = known(job, 1)
    job.host_lost(1, 2.0)
    leave(job, 0, 3)
    assert job.join(1, cut_off, 3.0) == []
    assert cut_off.members[1].state is State.LEAVING
    assert job.left(1, 1, Leave(7, "closed"), 3.1) == []
    assert cut_off.members[1].state is State.WAITING
    assert cut_off.members[1].rank is None


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("ranks_min", [2, 4])
@pytest.mark.parametrize(("hosts", "spare_hosts"), [(2, 0), (3, 1), (4, 2)])
def test_jobs_of_hosts_train_to_their_end_once_faults_stop(
    hosts: int, spare_hosts: int, ranks_min: int, spares: int
) -> None:
    settings = Settings(
        ranks=4,
        spares=spares,
        ranks_min=ranks_min,
        leave_secs=5.0,
        hosts=hosts,
        spare_hosts=spare_hosts,
    )
    faults = {"end": 0.01, "stick": 0.005, "fail": 0.005}
    faults |= {"host": 0.003, "drop": 0.003, "leader": 0.003}
    generations = 0
    for seed in range(SCHEDULES // 12):
        job = Job(seed, settings, faults)
        job.run(10.0)
        job.stop_faults()
        job.run(600.0)
        assert job.is_released or job.gave_up, f"seed {seed}"
        generations += len(job.begun)
    assert generations > SCHEDULES // 12


def test_a_spare_host_that_is_told_to_end_takes_no_ranks_and_the_others_go_on() -> None:
    job = ready_job(
        Settings(ranks=4, spares=1, ranks_min=4, leave_secs=5.0, hosts=3, spare_hosts=1)
    )
    assert job.ending(2, 2.0) == []
    effects = job.ended(0, "killed", 2.1)
    assert effects[0] == membership.Break(1, (3, 1, 4))
    assert isinstance(effects[1], membership.Start)
    begin = begun(leave(job, 3, 1, 4))
    assert {seat.member % 3 for seat in begin.seats} == {0, 1}


def test_a_rank_of_an_older_generation_that_does_not_leave_is_killed() -> None:
    job = ready_job(TWO_EACH)
    cut_off = known(job, 1)
    job.host_lost(1, 2.0)
    leave(job, 0, 3)
    job.join(1, cut_off, 3.0)
    assert job.next_secs == 8.0
    assert job.tick(8.0) == [membership.Kill(1), membership.Kill(4)]
    assert job.tick(9.0) == []


def test_a_host_that_starts_as_leader_waits_shortly_if_others_have_trained() -> None:
    job = ready_job(TWO_EACH)
    started = Membership(TWO_EACH, {0, 1, 2})
    started.join(1, starting(TWO_EACH, 1), 3.0)
    started.join(0, known(job, 0), 4.0)
    for member in (1, 4):
        started.ready(member, 4.1)
    assert leave(started, 0, 3) == []
    begin = begun(started.tick(4.0 + membership.JOIN_SECS))
    assert [(seat.member, seat.rank) for seat in begin.seats] == [(0, 0), (3, 1), (1, 2), (4, 3)]
