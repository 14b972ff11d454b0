"""Schedules: from a seed, a world with faults for a while, then calm, then checks.

A schedule has three phases. In the first, everything fails at random. Then faults stop, and the
liveness invariants have to hold within a bounded time: a wish leads to a commit, a preemption stops
all ranks at one step, everything becomes durable, queues are empty. Last, as many failure domains
as may be lost are lost with all trainers, and the next start has to find the newest protected
checkpoint; the report of one of the hosts left may reach it late.

A remote tier fails in the first phase, is slow or silent, or is taken over. In the second one, the
newest committed checkpoint has to get there, or is reported as missing if the tier is lost.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from holdfast.coordination import inputs as fa
from holdfast.coordination.messages import TargetKind
from holdfast.coordination.settings import Settings
from holdfast.format.names import CheckpointId, age_of
from tests.coordination.host import Host
from tests.coordination.jobs import Job
from tests.coordination.world import Shape, World

STORM_SECS = 30.0
CALM_SECS = 150.0
HALTING = 0.3
"""In so many of the schedules an agent is stopped and goes on."""


@dataclass(frozen=True)
class Outcome:
    """The results of a schedule, for the figures."""

    counts: dict[str, int]
    events: int
    messages: int


def draw_shape(rng: random.Random, host_count: int | None = None) -> Shape:
    """Return a world of 2 to 16 hosts, small ones more often."""
    hosts = host_count or min(16, 2 + int(rng.expovariate(0.25)))
    return Shape(
        host_count=hosts,
        domain_size=rng.choice([1, 1, 1, 2]) if hosts >= 4 else 1,
        ranks_a_host=rng.choice([1, 1, 2, 3]) if hosts <= 6 else 1,
        window=rng.choice([1, 1, 1, 2, 8, 25]),
        every=rng.choice([0, 0, 0, 0, 7, 20]),
        copies=rng.choice([1, 2, 2, 2, 2, 3]),
        has_ram=rng.random() < 0.93,
        interval_secs=rng.choice([1.0, 3.0, 3.0, 6.0]),
        kind=rng.choice([TargetKind.DURABLE, TargetKind.DURABLE, TargetKind.RAM]),
        pace_secs=rng.choice([0.1, 0.3, 0.3, 1.0]),
        fill_secs_max=rng.choice([0.1, 0.5, 2.0]),
    )


class Schedule:
    """One seed's schedule."""

    def __init__(
        self, seed: int, host_count: int | None = None, *, has_remote: bool = False
    ) -> None:
        self.rng = random.Random(f"schedule {seed}")
        # A generator of its own, so that the seeds of older faults keep their schedules.
        self.halts = random.Random(f"halts {seed}")
        # A generator of its own, so that a schedule's other faults stay as they are.
        self.start_rng = random.Random(f"starts {seed}")
        self.remote_rng = random.Random(f"remote faults {seed}")
        shape = replace(draw_shape(self.rng, host_count), has_remote=has_remote)
        self.world = World(seed, shape, Settings(copies=shape.copies))
        self.world.network.is_on_wire = seed % 10 == 0

    def run(self) -> Outcome:
        """Run all phases.

        Raises:
            BrokenPromiseError: an invariant was broken.
        """
        world = self.world
        for host in world.hosts.values():
            if self.rng.random() < 0.7:
                host.start_agent()
        world.start_job(world.up_hosts())
        self._storm()
        self._calm_down()
        self._all_comes_about()
        self._last_start_finds_it()
        world.restarts = False
        network = world.network
        return Outcome(world.oracle.counts, world.events, network.sent)

    # The storm.

    def _storm(self) -> None:
        world, rng = self.world, self.rng
        faults = world.network.faults
        faults.drop = rng.choice([0, 0.01, 0.1, 0.3])
        faults.repeat = rng.choice([0, 0.05, 0.3])
        faults.delay_secs_max = rng.choice([0.005, 0.02, 0.3])
        faults.slow = rng.choice([0, 0.02, 0.1])
        world.storage_failures = rng.choice([0, 0, 0.05, 0.3])
        world.storage_slow_secs = rng.choice([0.05, 0.3, 3.0])
        world.pull_failures = rng.choice([0, 0.1, 0.5])
        world.abandons = rng.choice([0, 0, 0.05])
        world.zombies = rng.choice([0, 0, 0.4])
        deeds = [
            self._crash,
            self._crash,
            self._kill_agent,
            self._kill_agent,
            self._kill_trainer,
            self._cut,
            self._cut,
            self._notice,
            self._wish,
            self._wish,
            self._rewind,
            self._delete,
            self._rival,
            self._kill_all_after_save,
        ]
        at = 2.0
        gap_secs = rng.choice([1.0, 3.0, 8.0])
        while True:
            at += rng.expovariate(1 / gap_secs)
            if at >= STORM_SECS:
                break
            world.at(at, rng.choice(deeds))
        if self.halts.random() < HALTING:
            world.at(self.halts.uniform(2.0, STORM_SECS), self._halt)
        for deed in (self._pause, self._start_without_a_host):
            if self.start_rng.random() < 0.4:
                world.at(2 + self.start_rng.random() * (STORM_SECS - 4), deed)
        self._plan_remote_faults()
        world.run(STORM_SECS)

    def _plan_remote_faults(self) -> None:
        remote, rng = self.world.remote, self.remote_rng
        if remote is None:
            return
        remote.failures = rng.choice([0, 0, 0.1, 0.5])
        remote.slow_secs = rng.choice([0.1, 1.0, 5.0])
        for deed, share in ((self._silence_remote, 0.5), (self._take_over_remotely, 0.3)):
            if rng.random() < share:
                self.world.at(rng.uniform(2.0, STORM_SECS), deed)

    def _plan_last_remote_faults(self, leader: str) -> None:
        """Let the remote tier be lost, or fail for a while, or for one host that does not lead."""
        world, remote, rng = self.world, self.world.remote, self.remote_rng
        assert remote is not None
        is_lost = rng.random() < 0.3
        # A start could not know the attempt of the machine that has taken over the tier.
        remote.is_lost = is_lost and remote.storage.newest <= world.storage.newest
        remote.failures = rng.choice([0, 0.9])
        world.at(10.0, self._mend_remote)
        others = [name for name in world.up_hosts() if name != leader]
        if others and rng.random() < 0.5:
            remote.cut_off.add(rng.choice(others))

    def _mend_remote(self) -> None:
        assert self.world.remote is not None
        self.world.remote.failures = 0.0

    def _silence_remote(self) -> None:
        """Let the remote tier answer nothing for a while."""
        remote = self.world.remote
        assert remote is not None
        self.world.oracle.count("remote silences")
        remote.is_silent = True
        self.world.at(self.remote_rng.choice([1.0, 5.0, 20.0]), self._hear_remote)

    def _hear_remote(self) -> None:
        assert self.world.remote is not None
        self.world.remote.is_silent = False

    def _take_over_remotely(self) -> None:
        """Begin an attempt on a machine that has the remote tier alone."""
        assert self.world.remote is not None
        if self.world.storage.attempts:
            self.world.remote.take_over()

    def _halt(self) -> None:
        """Stop one agent's process for a while."""
        host = self.world.hosts[self.halts.choice(list(self.world.hosts))]
        self.world.oracle.count("halts")
        host.halt()
        self.world.at(self.halts.choice([0.5, 3.0, 12.0, 40.0]), host.go_on)

    def _crash(self) -> None:
        world = self.world
        up = world.up_hosts()
        if len(up) <= 1:
            return
        domain = world.hosts[self.rng.choice(up)].domain
        for host in world.hosts.values():
            if host.domain == domain and host.is_up:
                world.oracle.count("crashes")
                host.crash()
                world.at(1 + self.rng.random() * 15, self._reboot, host.name)

    def _reboot(self, name: str) -> None:
        if not self.world.hosts[name].is_up:
            self.world.hosts[name].reboot()

    def _kill_agent(self) -> None:
        host = self.world.hosts[self.rng.choice(list(self.world.hosts))]
        if host.agent is not None:
            self.world.oracle.count("agents killed")
            host.kill_agent()
            self.world.at(0.1 + self.rng.random() * 4, self._restart_agent, host.name)

    def _restart_agent(self, name: str) -> None:
        host = self.world.hosts[name]
        if host.is_up:
            host.start_agent()

    def _kill_trainer(self) -> None:
        job = self.world.job
        if job is not None and job.living:
            self.world.oracle.count("trainers killed")
            self.rng.choice(job.living).die()

    def _kill_all_after_save(self) -> None:
        """Kill all trainers, and the leader's agent."""
        job = self.world.job
        if job is None or not job.living:
            return
        job.kill()
        if self.rng.random() < 0.5:
            self.world.hosts[job.leader].kill_agent()
            self.world.at(self.rng.random() * 20, self._restart_agent, job.leader)

    def _cut(self) -> None:
        """Partition the hosts for a while, in both directions or in one."""
        world, rng = self.world, self.rng
        names = list(world.hosts)
        rng.shuffle(names)
        k = rng.randrange(1, len(names))
        pairs = {(a, b) for a in names[:k] for b in names[k:]}
        if rng.random() < 0.7:
            pairs |= {(b, a) for a, b in pairs}
        world.oracle.count("cuts")
        world.network.cut |= pairs
        world.at(rng.choice([0.5, 3.0, 12.0, 25.0]), self._heal, pairs)

    def _start_without_a_host(self) -> None:
        """Kill all trainers, and cut a host off while they are started again."""
        world, rng = self.world, self.start_rng
        if world.job is not None:
            world.job.kill()
        pairs = self._cut_off(rng.choice(list(world.hosts)))
        world.at(rng.choice([5.0, 15.0, 25.0]), self._heal, pairs)

    def _start_late(self, pairs: set[tuple[str, str]]) -> None:
        self.world.are_writes_refused = False
        self._heal(pairs)

    def _cut_off(self, name: str) -> set[tuple[str, str]]:
        """Cut one host off from all others; return the pairs to heal."""
        world = self.world
        others = [other for other in world.hosts if other != name]
        pairs = {(name, other) for other in others} | {(other, name) for other in others}
        world.oracle.count("hosts cut off")
        world.network.cut |= pairs
        return pairs

    def _pause(self) -> None:
        """Pause a host for a while, its agent and its trainers."""
        world, rng = self.world, self.start_rng
        host = world.hosts[rng.choice(list(world.hosts))]
        if host.is_up:
            world.oracle.count("pauses")
            host.pause()
            world.at(rng.choice([2.0, 8.0, 35.0]), self._go_on, host.name)

    def _go_on(self, name: str) -> None:
        if self.world.hosts[name].is_paused:
            self.world.hosts[name].unpause()

    def _heal(self, pairs: set[tuple[str, str]]) -> None:
        self.world.network.heal(pairs, self.world.now)

    def _notice(self) -> None:
        job = self.world.job
        if job is not None and job.living:
            self.world.oracle.count("notices")
            self.world.wish(self.rng.choice(job.living).host.name, TargetKind.PREEMPTION)

    def _wish(self) -> None:
        job = self.world.job
        if job is not None and job.living:
            kind = self.rng.choice([TargetKind.DURABLE, TargetKind.RAM])
            self.world.wish(self.rng.choice(job.living).host.name, kind)

    def _rewind(self) -> None:
        world = self.world
        job = world.job
        if job is None or not job.is_running or len({t.attempt for t in job.trainers}) != 1:
            return
        attempt = job.trainers[0].attempt
        choices = [c for c in world.storage.manifests if world.storage.on_timeline(c)]
        if choices and attempt == world.storage.newest:
            world.oracle.count("rewinds")
            job.rewind(self.rng.choice(choices))

    def _delete(self) -> None:
        """Let a rank on any host delete a checkpoint that it sees, an old or a new one."""
        world = self.world
        seen = sorted(c for c in world.oracle.truths if world.oracle.is_whole_now(c))
        job = world.job
        if seen and job is not None and job.living:
            self.rng.choice(job.living).host.delete(self.rng.choice(seen))

    def _rival(self) -> None:
        """Start the same run once more."""
        world, rng = self.world, self.rng
        up = world.up_hosts()
        if world.job is None or not up:
            return
        rng.shuffle(up)
        before = world.job
        world.oracle.count("rivals")
        rival = world.start_job(up[: rng.randint(1, len(up))], takeover=rng.random() < 0.4)
        if rng.random() < 0.5:
            # The start that loses is not repeated.
            world.job = before
            world.at(25.0, rival.kill)

    # Check the liveness invariants.

    def _calm_down(self) -> None:
        world = self.world
        world.restarts = True
        faults = world.network.faults
        faults.drop = faults.repeat = faults.slow = 0.0
        faults.delay_secs_max = 0.02
        world.network.cut.clear()
        world.storage_failures = world.pull_failures = world.abandons = world.zombies = 0.0
        world.storage_slow_secs = 0.1
        if world.remote is not None:
            world.remote.failures, world.remote.slow_secs = 0.0, 0.1
            world.remote.is_silent = False
        for host in world.hosts.values():
            if host.is_paused:
                host.unpause()
            if not host.is_up:
                host.reboot()
            host.go_on()
            host.start_agent()
        # Messages that were sent in the storm arrive, and leases expire.
        for job in world.jobs.values():
            if job is not world.job:
                job.kill()
        world.run(world.now + 6.0)
        world.is_calm = True
        world.oracle.begin_calm()
        if world.job is None or world.job.is_broken or world.job.is_over:
            return
        if any(not t.attempt for t in world.job.trainers):
            # It was refused, or waits for an attempt that never began: the launcher ends it.
            world.run(world.now + 70.0, lambda: world.job is not None and world.job.is_running)

    def _all_comes_about(self) -> None:
        world, rng = self.world, self.rng
        oracle = world.oracle
        if not world.run(world.now + CALM_SECS, self._is_running):
            oracle.fail("I6", f"no attempt runs {CALM_SECS} s after the storm")
        job = world.job
        assert job is not None
        before = oracle.commits
        while oracle.commits == before:
            # A job that got a notice in the storm may stop now; the next one gets another notice.
            job = world.job
            world.wish(rng.choice(job.living).host.name, TargetKind.DURABLE)
            world.run(
                world.now + CALM_SECS, lambda j=job: oracle.commits > before or world.job is not j
            )
            if oracle.commits == before and world.job is job:
                oracle.fail("I6", "a wish has led to no commit")
            if not world.run(world.now + CALM_SECS, self._is_running):
                oracle.fail("I6", f"no attempt runs {CALM_SECS} s after the one before")
        self._delete()
        if not world.run(world.now + CALM_SECS, self._is_deleted):
            oracle.fail("I6", "what was deleted is not told to be gone")
        if not world.run(world.now + CALM_SECS, self._is_running):
            oracle.fail("I6", f"no attempt runs {CALM_SECS} s after a delete")
        job = world.job
        world.restarts = False
        if world.remote is not None:
            self._plan_last_remote_faults(job.leader)
        if job.has_ram and not world.run(
            world.now + CALM_SECS, lambda: self._is_copied() or self._is_fenced(job)
        ):
            oracle.fail("I6", "no checkpoint comes to stand in enough failure domains' RAM")
        if self._is_fenced(job):
            # The remote tier was taken over in the storm, and a host has seen it only now.
            return
        if rng.random() < 0.5:
            # A notice in the storm may have stopped the job while its copies were awaited.
            if not job.is_over:
                world.wish(rng.choice(job.living).host.name, TargetKind.PREEMPTION)
            if not world.run(world.now + CALM_SECS, lambda: job.is_over or self._is_fenced(job)):
                oracle.fail("I7", "a preemption has not stopped all ranks")
            if not job.is_over:
                return
            stopped_at = CheckpointId(job.trainers[0].step, job.trainers[0].attempt)
            if stopped_at not in world.storage.manifests:
                oracle.fail("I7", f"all ranks stopped at {stopped_at}, which is not committed")
        else:
            job.finish()
            world.run(world.now + CALM_SECS, lambda: job.is_over)
        if not world.run(world.now + CALM_SECS, self._is_quiet):
            oracle.fail("I6", f"it does not come to rest: {self._restless()}")
        if not world.run(world.now + CALM_SECS, lambda: not self._missing_copy()):
            oracle.fail("I12", self._missing_copy())
        if world.remote is not None:
            world.remote.is_lost = False
            world.remote.cut_off.clear()

    def _missing_copy(self) -> str:
        """Return what the remote tier lacks without a report; empty if nothing."""
        world, remote = self.world, self.world.remote
        if remote is None:
            return ""
        newest = max(filter(world.storage.on_timeline, world.storage.manifests), default=None)
        if newest is None or newest in remote.storage.manifests:
            if self._is_mirroring():
                return "" if remote.is_lost else "copies are under way"
            return self._uninformed(newest) if newest is not None else ""
        if remote.is_lost and remote.ended.get(newest):
            return ""
        if remote.storage.forbids(newest):
            # A machine that shares this tier alone has taken the run over, and its trainers know.
            return ""
        return f"{newest} is neither in the remote tier nor reported as missing there"

    def _is_mirroring(self) -> bool:
        return any(host.view.is_mirroring for host in self._hosts_with_agents())

    def _uninformed(self, newest: CheckpointId) -> str:
        """Return which agents of the job do not know that the remote tier has its newest one."""
        behind = [h.name for h in self._hosts_with_agents() if h.view.mirrored != newest]
        return f"{', '.join(behind)} do not know that {newest} is copied" if behind else ""

    def _hosts_with_agents(self) -> list[Host]:
        job = self.world.job
        assert job is not None
        hosts = [trainer.host for trainer in job.trainers]
        return [host for host in hosts if host.agent is not None]

    def _is_fenced(self, job: Job) -> bool:
        """Return whether a job has ended because the remote tier has a newer attempt."""
        remote = self.world.remote
        attempt = job.trainers[0].attempt
        return remote is not None and job.is_broken and remote.storage.newest > attempt

    def _is_running(self) -> bool:
        job = self.world.job
        return job is not None and job.is_running and bool(job.living)

    def _is_deleted(self) -> bool:
        """Return whether all deletes of the job's hosts are done; others may know no leader."""
        job = self.world.job
        return job is not None and not any(trainer.host.deleting for trainer in job.living)

    def _is_copied(self) -> bool:
        """Return whether a checkpoint of the present attempt is in enough domains."""
        job, oracle = self.world.job, self.world.oracle
        assert job is not None
        attempt = job.trainers[0].attempt
        if any(c.attempt == attempt and oracle.is_copied_now(c) for c in oracle.truths):
            return True
        host = self.world.hosts[job.leader]
        if host.agent is not None and TargetKind.RAM not in host.view.lead.targets:
            self.world.wish(job.leader, TargetKind.RAM)
        return False

    def _is_quiet(self) -> bool:
        return not self._restless()

    def _restless(self) -> str:
        world = self.world
        assert world.job is not None
        for name in {t.host.name for t in world.job.trainers}:
            agent = world.hosts[name].agent
            if agent is None or not agent.roles.follower.is_settled:
                return f"{name} is not settled"
            if agent.roles.follower.inventory.under_way:
                return f"{name} has deeds under way"
            if agent.roles.leader is not None and agent.roles.leader.table.open_entries():
                return f"{name} waits for parts of ranks that are gone"
        newest = [
            c
            for c, t in world.oracle.truths.items()
            if t.was_complete
            and world.storage.on_timeline(c)
            and world.oracle.is_whole_now(c)
            and not t.is_abandoned
            and not world.oracle.is_overtaken(c)
        ]
        last = max(newest, key=age_of, default=None)
        if last is not None and last not in world.storage.manifests:
            return f"{last} is complete and not committed"
        return ""

    def _last_start_finds_it(self) -> None:
        """Lose as many domains as may be lost at once, and start again."""
        world, rng = self.world, self.rng
        world.restarts = True
        world.start_job(world.up_hosts())
        if not world.run(world.now + CALM_SECS, self._is_running):
            world.oracle.fail("I6", "the last job but one does not start")
        world.run(world.now + 2 + rng.random() * 6)
        world.restarts = False
        # A report of a host that kept its RAM may come late, and storage may lack its parts.
        is_late = self.start_rng.random() < 0.5
        world.are_writes_refused = is_late
        for job in world.jobs.values():
            job.kill()
        domains = sorted({host.domain for host in world.hosts.values()})
        losses = min(world.settings.copies, len(domains)) - 1
        lost = set(rng.sample(domains, losses))
        for host in world.hosts.values():
            if host.domain in lost:
                host.crash()
        world.run(world.now + rng.random() * 30)
        for host in world.hosts.values():
            if not host.is_up:
                host.reboot()
            host.start_agent()
        pairs: set[tuple[str, str]] = set()
        if is_late:
            kept = [host.name for host in world.hosts.values() if host.domain not in lost]
            pairs = self._cut_off(self.start_rng.choice(kept))
        world.start_job(world.up_hosts())
        world.at(self.start_rng.choice([5.0, 20.0, 60.0]), self._start_late, pairs)
        if not world.run(world.now + CALM_SECS, self._is_running):
            world.oracle.fail("I6", "the last job does not start")
        world.hosts[world.up_hosts()[0]].submit(fa.Tick())
