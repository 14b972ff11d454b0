"""The invariants of the protocol, one case at a time, in a world without random faults."""

from __future__ import annotations

import itertools
import random

import pytest

from holdfast.coordination import effects as ef
from holdfast.coordination import inputs as fa
from holdfast.coordination.follower.host_inventory import HostInventory
from holdfast.coordination.messages import CheckpointStatus, Command, PullOrder, TargetKind
from holdfast.coordination.settings import LEASE_RENEW_SECS, Settings
from holdfast.coordination.turn import Turn
from tests.attempts import checkpoint_id
from tests.coordination.cases import checkpoint_of, make, reached, running, until
from tests.coordination.host import Host
from tests.coordination.jobs import survives
from tests.coordination.world import World


def test_one_host_sends_no_message_and_saves_the_very_next_step() -> None:
    world = make(1, ranks_a_host=2)
    job = running(world)
    world.run(world.now + 2)
    highest = max(t.step for t in job.trainers)
    world.wish(job.leader, TargetKind.DURABLE)
    assert world.hosts[job.leader].cells[TargetKind.DURABLE] == highest + 1
    until(world, lambda: reached(world, CheckpointStatus.COMMITTED))
    assert list(world.storage.manifests) == [checkpoint_of(world, highest + 1)]
    assert world.network.sent == 0


TOLD_SECS = 5.0


@pytest.mark.parametrize("kind", [TargetKind.DURABLE, TargetKind.RAM])
def test_ranks_that_are_twenty_steps_apart_meet_at_one_step(kind: TargetKind) -> None:
    world = make(4, window=21, pace_secs=0.05)
    job = running(world)
    for trainer, pace_secs in zip(job.trainers, (0.02, 0.2, 0.05, 0.1), strict=True):
        trainer.pace_secs = pace_secs
    world.run(world.now + 10)
    steps = [t.step for t in job.trainers]
    assert max(steps) - min(steps) >= 15
    world.wish("h0002", kind)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    (checkpoint,) = {c for t in job.trainers for c in t.begun}
    assert checkpoint.step > max(steps)


def test_a_refused_target_is_proposed_further_ahead_and_its_parts_are_dropped() -> None:
    world = make(3, pace_secs=0.02, window=5)
    world.network.faults.delay_secs_max = 0.5
    job = running(world)
    for _ in range(8):
        world.wish(job.leader, TargetKind.DURABLE)
        world.run(world.now + 6)
    begun = {c for t in job.trainers for c in t.begun}
    whole = set(world.storage.manifests)
    assert whole
    assert begun - whole, "no target was refused: the case shows nothing"
    for checkpoint in begun - whole:
        assert not any(checkpoint in host.ram for host in world.hosts.values())


@pytest.mark.parametrize("dies", ["no agent", "the leader's agent", "the leader's host"])
def test_what_was_sealed_when_all_trainers_died_becomes_durable(dies: str) -> None:
    world = make(4, kind=TargetKind.RAM)
    job = running(world)
    world.wish(job.leader, TargetKind.RAM)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    assert not world.storage.manifests
    job.kill()
    leader = world.hosts[job.leader]
    if dies == "the leader's agent":
        leader.kill_agent()
    elif dies == "the leader's host":
        leader.crash()
    until(world, lambda: bool(world.storage.manifests))


def test_a_lost_host_and_leader_costs_nothing_that_was_protected() -> None:
    world = make(4, kind=TargetKind.RAM)
    job = running(world)
    for _ in range(3):
        before = world.oracle.counts.get(CheckpointStatus.PROTECTED, 0)
        world.wish(job.leader, TargetKind.RAM)
        until(world, lambda n=before: reached(world, CheckpointStatus.PROTECTED, n + 1))
    (newest,) = {max(host.ram) for host in world.hosts.values()}
    world.hosts["h0000"].crash()
    job.kill()
    world.hosts["h0000"].reboot()
    running(world)
    assert world.storage.attempts[2].origin == newest


def test_copies_that_cannot_be_made_hold_no_checkpoint_up_for_long() -> None:
    world = make(3)
    job = running(world)
    world.pull_failures = 1.0
    for count in (1, 2):
        world.wish(job.leader, TargetKind.RAM)
        until(world, lambda count=count: reached(world, CheckpointStatus.COMPLETE, count))
        leading = world.hosts[job.leader]
        assert leading.view.lead.is_sealing
        world.run(world.now + Settings().lost_secs + 1)
        assert not leading.view.lead.is_sealing
    assert not reached(world, CheckpointStatus.PROTECTED)
    world.pull_failures = 0.0
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))


def test_a_takeover_fences_the_attempt_that_lives() -> None:
    world = make(4)
    first = running(world, ["h0000", "h0001"])
    second = running(world, ["h0002", "h0003"], takeover=True)
    world.wish("h0000", TargetKind.DURABLE)
    world.wish("h0002", TargetKind.DURABLE)
    until(world, lambda: bool(world.storage.manifests))
    world.run(world.now + 20)
    assert second.is_running
    assert {c.attempt.number for c in world.storage.manifests} == {2}
    assert not first.living, "its agents were never told that they are fenced"


@pytest.mark.parametrize("agent_dies", ["no agent", "its own", "the leader's"])
@pytest.mark.parametrize("ranks_a_host", [1, 2])
def test_all_ranks_are_told_of_one_that_ends_on_any_host(
    agent_dies: str, ranks_a_host: int
) -> None:
    world = make(4, ranks_a_host=ranks_a_host)
    world.network.faults.drop = 0.3
    job = running(world)
    host, leader = world.hosts["h0002"], world.hosts[job.leader]
    trainer = next(t for t in job.trainers if t.host is host)
    dying = {"its own": host, "the leader's": leader}.get(agent_dies)
    if dying is not None:
        dying.kill_agent()
    trainer.die()
    world.run(world.now + 0.3)
    if dying is not None:
        dying.start_agent()
    told = [world.hosts[name] for name in ("h0000", "h0001", "h0003")]
    assert world.run(world.now + TOLD_SECS, lambda: all(one.ended for one in told))
    for one in told:
        assert one.ended[0] == (job.token, trainer.rank, host.name)


def test_a_broken_group_does_not_stand_in_the_way() -> None:
    world = make(3)
    # No launcher ends the other ranks.
    world.zombies = 1.0
    first = running(world)
    first.trainers[2].die()
    world.run(world.now + 4)
    assert len(first.living) == 2
    second = running(world)
    assert second.trainers[0].attempt.number == 2


def test_a_branch_is_a_new_attempt_of_the_same_ranks() -> None:
    world = make(3)
    job = running(world)
    for _ in range(3):
        before = world.oracle.commits
        world.wish("h0001", TargetKind.DURABLE)
        until(world, lambda n=before: world.oracle.commits > n)
    origin = sorted(world.storage.manifests)[0]
    job.rewind(origin)
    until(world, lambda: all(t.attempt.number == 2 for t in job.trainers))
    assert world.storage.attempts[2].origin == origin
    before = world.oracle.commits
    world.wish("h0001", TargetKind.DURABLE)
    until(world, lambda: world.oracle.commits > before)
    assert [c.attempt.number for c in sorted(world.storage.manifests)].count(2) == 1
    assert len(world.storage.attempts) == 2, "each rank's wish has begun an attempt of its own"


def test_what_waits_for_storage_on_an_abandoned_branch_is_given_up_and_holds_nothing_up() -> None:
    world = make(3)
    job = running(world)
    world.wish(job.leader, TargetKind.DURABLE)
    until(world, lambda: reached(world, CheckpointStatus.COMMITTED))
    (origin,) = world.storage.manifests
    world.storage_slow_secs = 2.0
    for count in (2, 3):
        world.wish(job.leader, TargetKind.DURABLE)
        until(world, lambda n=count: reached(world, CheckpointStatus.COMPLETE, n))
    left = max(world.oracle.truths)
    job.rewind(origin)
    until(world, lambda: all(t.attempt.number == 2 for t in job.trainers))
    assert left not in world.storage.manifests
    # No later checkpoint replaces it.
    until(world, lambda: not any(left in host.ram for host in world.hosts.values()))
    assert world.oracle.truths[left].notified - {CheckpointStatus.PROTECTED} == {
        CheckpointStatus.DROPPED
    }
    assert world.hosts[job.leader].view.pending_ids() == []


@pytest.mark.parametrize("window", [1, 25])
@pytest.mark.parametrize("agent_dies", [False, True])
def test_a_notice_on_one_host_stops_all_ranks_at_one_step(window: int, agent_dies: bool) -> None:
    world = make(4, window=window)
    job = running(world)
    world.run(world.now + 3)
    world.wish("h0003", TargetKind.PREEMPTION)
    if agent_dies:
        until(world, lambda: world.hosts["h0002"].confirmed is not None)
        world.hosts[job.leader].kill_agent()
        world.run(world.now + 0.5)
        world.hosts[job.leader].start_agent()
    until(world, lambda: job.is_over)
    (step,) = {t.step for t in job.trainers}
    until(world, lambda: checkpoint_of(world, step) in world.storage.manifests)


@pytest.mark.parametrize(("host_count", "late_steps"), [(1, 0), (1, 5), (4, 0)])
def test_the_step_at_which_all_stop_is_written_before_older_ones_that_wait(
    host_count: int, late_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(host_count, window=1)
    job = running(world)
    world.storage_slow_secs = 20.0
    for _ in range(3):
        world.wish(job.leader, TargetKind.DURABLE)
        world.run(world.now + 1)
    do = Host.do

    def do_late(host: Host, effect: ef.Effect) -> None:
        # The training goes on while the agent is held up.
        if isinstance(effect, ef.SetTarget):
            job.trainers[0].step += late_steps
        do(host, effect)

    monkeypatch.setattr(Host, "do", do_late)
    world.wish(job.leader, TargetKind.PREEMPTION)
    until(world, lambda: job.is_over)
    (step,) = {t.step for t in job.trainers}
    stop, manifests = checkpoint_of(world, step), world.storage.manifests
    waiting = {c for host in world.hosts.values() for c in host.ram} - {stop, *manifests}
    assert len(waiting) >= 2, "no older checkpoint waits: the case shows nothing"
    until(world, lambda: stop in manifests)
    # One was being written already.
    assert len(waiting - manifests.keys()) >= len(waiting) - 1


def test_no_rank_stops_at_a_target_that_is_refused_elsewhere() -> None:
    refused = 0
    for seed in range(6):
        world = make(4, window=9, pace_secs=0.02)
        world.rng.seed(seed)
        world.network.faults.delay_secs_max = 0.4
        job = running(world)
        world.run(world.now + 2)
        world.wish("h0003", TargetKind.PREEMPTION)
        until(world, lambda j=job: j.is_over)
        assert len({t.step for t in job.trainers}) == 1
        refused += len({c for t in job.trainers for c in t.begun}) > 1
    assert refused, "no target was refused: the case shows nothing"


def test_without_ram_the_parts_are_committed_from_the_durable_tier() -> None:
    world = make(3, has_ram=False)
    job = running(world)
    world.wish(job.leader, TargetKind.DURABLE)
    until(world, lambda: bool(world.storage.manifests))
    assert not any(host.ram for host in world.hosts.values())


def test_what_is_durable_is_copied_all_the_same() -> None:
    world = make(3)
    world.pull_failures = 1.0
    job = running(world)
    world.wish(job.leader, TargetKind.DURABLE)
    until(world, lambda: bool(world.storage.manifests))
    (checkpoint,) = world.storage.manifests

    def standing() -> list[int]:
        return sorted(rank for host in world.hosts.values() for rank in host.ram[checkpoint])

    assert standing() == [0, 1, 2]
    world.pull_failures = 0.0
    until(world, lambda: standing() == [0, 0, 1, 1, 2, 2])


def test_status_tells_how_many_losses_are_survived() -> None:
    world = make(4, copies=3)
    job = running(world)
    world.wish(job.leader, TargetKind.RAM)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    (checkpoint,) = {c for t in job.trainers for c in t.begun}
    assert survives(world, job.leader) == (checkpoint, 2)
    for lost in itertools.combinations(world.hosts, 2):
        left = [h for name, h in world.hosts.items() if name not in lost]
        assert {r for h in left for r in h.ram[checkpoint]} == set(range(4))
    job.kill()
    until(world, lambda: bool(world.storage.manifests))
    assert survives(world, job.leader) == (checkpoint, None)


def test_the_ram_of_an_agent_that_leaves_counts_no_more_and_is_copied_anew() -> None:
    world = make(3)
    job = running(world)
    world.wish(job.leader, TargetKind.RAM)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    (checkpoint,) = {c for t in job.trainers for c in t.begun}
    assert survives(world, job.leader) == (checkpoint, 1)
    world.storage_slow_secs, world.pull_failures = 1000.0, 1.0
    world.hosts["h0002"].submit(fa.LeaveWanted())
    world.hosts["h0002"].kill_agent()
    world.run(world.now + 0.5)
    assert survives(world, job.leader) == (checkpoint, 0)
    world.pull_failures = 0.0
    until(world, lambda: survives(world, job.leader) == (checkpoint, 1))


@pytest.mark.parametrize("where", ["h0000", "h0002"])
def test_a_deleted_checkpoint_is_given_up_everywhere_and_is_not_the_newest_any_more(
    where: str,
) -> None:
    world = make(3)
    job = running(world)
    world.wish(job.leader, TargetKind.RAM)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    (checkpoint,) = {c for t in job.trainers for c in t.begun}
    world.hosts[where].delete(checkpoint)
    until(world, lambda: not world.hosts[where].deleting)
    assert not any(host.ram for host in world.hosts.values())
    assert survives(world, job.leader) is None
    world.wish(job.leader, TargetKind.RAM)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED, 2))


def test_what_is_deleted_while_the_leader_is_away_is_given_up_once_it_is_back() -> None:
    world = make(3)
    job = running(world)
    world.wish(job.leader, TargetKind.RAM)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    (checkpoint,) = {c for t in job.trainers for c in t.begun}
    leader = world.hosts[job.leader]
    leader.kill_agent()
    host = world.hosts["h0002"]
    host.delete(checkpoint)
    world.run(world.now + 20.0)
    assert host.deleting, "a successor, who may not see all hosts, has called it gone"
    leader.start_agent()
    until(world, lambda: not host.deleting)
    assert not any(host.ram for host in world.hosts.values())


def test_what_is_deleted_is_not_called_gone_while_a_host_is_silent() -> None:
    world = make(3)
    job = running(world)
    world.wish(job.leader, TargetKind.RAM)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    (checkpoint,) = {c for t in job.trainers for c in t.begun}
    silent, host = world.hosts["h0001"], world.hosts["h0002"]
    world.network.cut = {(a, b) for a in world.hosts for b in world.hosts if "h0001" in (a, b)}
    world.run(world.now + 15)
    host.delete(checkpoint)
    world.run(world.now + 15)
    assert host.deleting
    assert checkpoint in silent.ram
    world.network.cut.clear()
    until(world, lambda: not host.deleting)
    assert checkpoint not in silent.ram


def test_no_attempt_begins_from_what_a_host_has_deleted() -> None:
    world = make(3)
    job = running(world)
    for count in (1, 2):
        world.wish(job.leader, TargetKind.DURABLE)
        until(world, lambda n=count: world.oracle.commits >= n)
    older, newer = sorted(world.storage.manifests)
    # Durable first, then replicated: after a delete on one host the others have it whole.
    until(world, lambda: sum(len(h.ram.get(newer, ())) for h in world.hosts.values()) == 6)
    job.kill()
    for name in ("h0000", "h0001"):
        world.hosts[name].kill_agent()
    # No leader can confirm the delete; the durable tier has it no more, and RAM still has it.
    world.hosts["h0002"].delete(newer)
    assert world.oracle.is_whole_now(newer)
    running(world)
    assert world.storage.attempts[2].origin == older


def test_an_agent_that_starts_anew_gives_nothing_up_before_it_has_looked_into_storage() -> None:
    world = make(1, every=5)
    job = running(world)
    until(world, lambda: world.oracle.commits >= 2)
    host = world.hosts[job.leader]
    host.kill_agent()
    older = checkpoint_of(world, 2)
    host.hold(older, 0, 1, is_own=True)
    host.start_agent()
    assert older in host.ram
    until(world, lambda: older not in host.ram)


@pytest.mark.parametrize("copies", [1, 2])
def test_what_the_ram_policy_keeps_is_kept_while_hosts_are_silent_and_agents_start_anew(
    copies: int,
) -> None:
    world = make(3, copies=copies, kind=TargetKind.RAM)
    job = running(world)
    leader, others = world.hosts[job.leader], [world.hosts["h0001"], world.hosts["h0002"]]
    world.wish(job.leader, TargetKind.RAM)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    (kept,) = leader.ram
    for host in world.hosts.values():
        host.kept_steps.add(kept.step)

    def ask_policy() -> None:
        ids = (c.id for c in leader.view.lead.checkpoints if c.was_complete)
        leader.submit(fa.Preserved(frozenset(c for c in ids if c == kept)))

    ask_policy()
    # Both are silent until their RAM counts as lost, and come back.
    world.network.cut = {(a, b) for a in world.hosts for b in world.hosts if a != b}
    world.run(world.now + 15)
    ask_policy()
    world.run(world.now + 5)
    world.network.cut.clear()
    for count in (2, 3):
        ask_policy()
        world.wish(job.leader, TargetKind.RAM)
        until(world, lambda n=count: reached(world, CheckpointStatus.PROTECTED, n))
    leader.kill_agent()
    world.run(world.now + 1)
    leader.start_agent()
    # Evaluated before the others have reported, the policy knows no checkpoint.
    ask_policy()
    for count in (4, 5):
        world.run(world.now + 3)
        world.wish(job.leader, TargetKind.RAM)
        until(world, lambda n=count: len(world.oracle.truths) >= n)
    world.run(world.now + 3)
    assert all(kept in host.ram for host in (leader, *others))
    assert all(len(host.ram) <= 3 for host in (leader, *others)), "nothing is recycled"


def test_ram_stays_bounded_where_an_agent_started_anew_cannot_list_storage() -> None:
    world = make(2, kind=TargetKind.RAM)
    job = running(world)
    leader = world.hosts[job.leader]
    for count in (1, 2):
        world.wish(job.leader, TargetKind.RAM)
        until(world, lambda n=count: reached(world, CheckpointStatus.PROTECTED, n))
    world.storage_failures = 1.0
    leader.kill_agent()
    before = set(leader.ram)
    leader.start_agent()
    for count in range(3, 13):
        world.wish(job.leader, TargetKind.RAM)
        until(world, lambda n=count: len(world.oracle.truths) >= n)
        world.run(world.now + 2)
    assert before <= set(leader.ram), "another attempt may have been told of it"
    for host in world.hosts.values():
        assert len(host.ram) <= len(before) + 2


def test_a_leader_that_stood_still_does_not_take_its_own_host_for_lost() -> None:
    world = make(1)
    job = running(world)
    host = world.hosts[job.leader]
    world.wish(job.leader, TargetKind.RAM)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    (first,) = host.ram
    host.submit(fa.Preserved(frozenset({first})))
    world.wish(job.leader, TargetKind.RAM)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED, 2))
    world.now += 60.0
    host.submit(fa.Tick())
    assert first in host.ram
    assert len(host.ram) == 2


def test_the_leader_knows_what_a_save_costs_the_dearest_host() -> None:
    world = make(3)
    job = running(world)
    costs = {"h0001": 7.0, "h0002": 3.0}
    for name, cost_secs in costs.items():
        host = world.hosts[name]
        host.save_cost_secs = cost_secs
    host = world.hosts[job.leader]
    until(world, lambda: host.view.lead.save_cost_secs == 7.0)
    # A lost host does not answer.
    world.hosts["h0001"].crash()
    until(world, lambda: host.view.lead.save_cost_secs != 7.0)


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


def cut_off(world: World, name: str) -> set[tuple[str, str]]:
    return {(a, b) for a in world.hosts for b in world.hosts if (name in (a, b)) and a != b}


@pytest.mark.parametrize("cut", ["h0000", "h0002"])
def test_what_is_due_becomes_durable_and_ram_stays_bounded_while_a_host_is_cut_off(
    cut: str,
) -> None:
    world = make(3, every=2, pace_secs=1.0)
    job = running(world)
    until(world, lambda: reached(world, CheckpointStatus.COMMITTED))
    world.network.cut = cut_off(world, cut)
    world.run(world.now + 30)
    for _ in range(100):
        world.run(world.now + 1)
        step = min(t.step for t in job.trainers)
        assert max(world.storage.manifests).step > step - 8
        assert max(len(host.ram) for host in world.hosts.values()) < 15


def test_an_outage_and_its_end_are_each_reported_once() -> None:
    world = make(3, every=2, pace_secs=1.0)
    running(world)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    until(world, lambda: bool(world.storage.manifests))
    world.network.cut, world.are_writes_refused = cut_off(world, "h0000"), True
    world.run(world.now + 60)
    leading, other = world.hosts["h0000"].outages, world.hosts["h0002"].outages
    lost_secs = Settings().lost_secs
    silent = {ef.HostSilent(name, lost_secs) for name in ("h0001", "h0002")}
    assert set(leading[:2]) == silent
    assert [type(effect) for effect in leading[2:]] == [ef.ProtectionLate]
    assert other == [ef.LeaderChanged("h0001", "h0000", False)]
    world.network.cut, world.are_writes_refused = set(), False
    newest = max(world.storage.manifests)
    until(world, lambda: max(world.storage.manifests) > newest)
    assert set(leading[3:]) == {ef.HostHeard("h0001"), ef.HostHeard("h0002")}
    assert len(leading) == 5
    assert other[1:] == [ef.LeaderChanged("h0000", "h0001", True)]


@pytest.mark.parametrize("lost", ["h0000", "h0002"])
def test_each_host_knows_within_five_seconds_which_host_sends_nothing(lost: str) -> None:
    world = make(4, every=2, pace_secs=1.0)
    running(world)

    def quiet() -> set[tuple[str, ...]]:
        return {host.view.quiet_hosts for host in world.hosts.values() if host.agent is not None}

    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    for _ in range(60):
        world.run(world.now + 0.5)
        assert quiet() == {()}
    world.hosts[lost].crash()
    world.run(world.now + 4.5)
    for _ in range(60):
        # Also while the other hosts choose another leader.
        assert quiet() == {(lost,)}
        world.run(world.now + 0.5)


def test_what_a_lost_host_wrote_while_it_was_cut_off_is_looked_for_before_a_drop() -> None:
    world = make(2, every=10, pace_secs=1.0)
    running(world)
    until(world, lambda: reached(world, CheckpointStatus.COMMITTED))
    world.restarts = False
    world.network.cut = cut_off(world, "h0001")
    checkpoint = checkpoint_of(world, 20)
    until(world, lambda: 1 in world.storage.parts.get(checkpoint, {}))
    assert checkpoint not in world.storage.manifests
    world.hosts["h0001"].crash()
    world.network.cut = set()
    world.hosts["h0001"].reboot()
    until(world, lambda: checkpoint in world.storage.manifests)


def test_a_pull_that_failed_is_not_tried_again_before_new_orders() -> None:
    inventory, turn = HostInventory(Settings()), Turn("a", 0.0, fa.Published())
    checkpoint = checkpoint_id(1)
    command = Command(pulls=(PullOrder(checkpoint, 2, ((1, 1),), "b"),))

    def pulls(at_secs: float) -> int:
        turn = Turn("a", at_secs, fa.Published())
        inventory.run_due(turn, is_frozen=False)
        return sum(isinstance(effect, ef.Pull) for effect in turn.effects)

    inventory.apply_command(turn, command)
    assert pulls(0.0) == 1
    inventory.pull_failed(Turn("a", 1.0, fa.Published()), fa.PullFailed(checkpoint, 1))
    assert pulls(60.0) == 0
    inventory.apply_command(Turn("a", 61.0, fa.Published()), command)
    assert pulls(61.0) == 1


def test_an_agent_whose_trainer_makes_no_step_looks_four_times_a_second_at_most() -> None:
    world = make(1, interval_secs=1.0)
    job = running(world)
    until(world, lambda: reached(world, CheckpointStatus.COMMITTED))
    for trainer in job.trainers:
        trainer.pace_secs = 10_000.0
    # The target of the next checkpoint waits for the trainer meanwhile.
    world.run(world.now + 30)
    host, before = world.hosts["h0000"], world.events
    assert host.view.lead.targets
    world.run(world.now + 60)
    # Each tick is an event, and each renewal of the lease three.
    assert world.events - before < 60 * 4 + 60 / LEASE_RENEW_SECS * 3
    step, job.trainers[0].pace_secs = job.trainers[0].step, 0.1
    job.trainers[0]._next()
    until(world, lambda: max(c.step for c in world.storage.manifests) > step)
