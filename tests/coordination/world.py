"""The world of the simulator: time, hosts, the launcher of jobs. One seed makes one world."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from holdfast.coordination import effects as ef
from holdfast.coordination import inputs as fa
from holdfast.coordination.messages import AnyMessage, Refusal, TargetKind
from holdfast.coordination.settings import Settings
from tests.coordination.host import Host
from tests.coordination.jobs import Job
from tests.coordination.network import Network
from tests.coordination.oracle import Oracle
from tests.coordination.remote import Remote
from tests.coordination.storage import Storage
from tests.coordination.trainer import Trainer

EVENTS_MAX = 3_000_000


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The options of a world."""

    host_count: int
    domain_size: int
    ranks_a_host: int
    window: int
    every: int
    copies: int
    has_ram: bool = True
    has_remote: bool = False
    interval_secs: float = 1.0
    kind: TargetKind = TargetKind.DURABLE
    pace_secs: float = 0.1
    fill_secs_max: float = 0.3


@dataclass
class World:
    seed: int
    shape: Shape
    settings: Settings
    now: float = 0.0
    hosts: dict[str, Host] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    job: Job | None = None
    is_calm: bool = False
    restarts: bool = True
    storage_failures: float = 0.0
    are_writes_refused: bool = False
    """Whether storage takes neither parts nor manifests; what is small it takes."""
    storage_slow_secs: float = 0.05
    answer_secs: float = 0.0
    """The delay between an attempt's record being put and its host learning of it."""
    pull_failures: float = 0.0
    abandons: float = 0.0
    zombies: float = 0.0
    jobs_before: int = 0
    """The number in the first job's token, from which the tokens of attempts follow."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.fill_secs_max = self.shape.fill_secs_max
        self.storage = Storage()
        self.remote = (
            Remote(self, random.Random(f"remote {self.seed}")) if self.shape.has_remote else None
        )
        self.oracle = Oracle(self)
        self.network = Network(self.rng, self.at, self._deliver)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0
        self.events = 0
        for i in range(self.shape.host_count):
            name = f"h{i:04d}"
            self.hosts[name] = Host(self, name, f"d{i // self.shape.domain_size:03d}")

    def add_twin(self, name: str) -> Host:
        """Add a host whose agent has the name of `name`: of another user, folder or container."""
        twin = Host(self, f"{name}-twin", self.hosts[name].domain, known_as=name)
        self.hosts[twin.name] = twin
        twin.start_agent()
        return twin

    # Time.

    def at(self, secs: float, call: Callable[..., None], *arguments: object) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + secs, self._count, call, arguments))

    def run(self, until: float, is_done: Callable[[], bool] | None = None) -> bool:
        """Let time pass; return whether `is_done` became true before `until`."""
        looked = 0
        while self._heap and self._heap[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(self._heap)
            self.events += 1
            if self.events > EVENTS_MAX:
                self.oracle.fail("I8", "there is no end of events")
            call(*arguments)
            looked += 1
            if is_done is not None and looked % 16 == 0 and is_done():
                return True
        if is_done is not None and is_done():
            return True
        self.now = until
        return False

    def storage_secs(self) -> float:
        return self.rng.random() * self.storage_slow_secs

    def listing(self, since_step: int) -> fa.DurableListed:
        """List the durable tier; a newer attempt of the remote tier decides the timeline."""
        listed = self.storage.listing(since_step)
        remote = self.remote
        if remote is None:
            return listed
        there = remote.storage.listing(since_step)
        committed = listed.committed | there.committed
        remote_only = there.committed - listed.committed
        if there.newest_attempt.number <= listed.newest_attempt.number:
            return replace(listed, committed=committed, remote_only=remote_only)
        return replace(
            self.storage.listing(0),
            newest_attempt=there.newest_attempt,
            leader=there.leader,
            limits=there.limits,
            committed=committed,
            remote_only=remote_only,
        )

    def _deliver(self, sender: str, to: str, message: AnyMessage) -> None:
        # A machine that shares the remote tier alone is not reached.
        if to in self.hosts:
            self.hosts[to].receive(sender, message)

    # Jobs.

    def start_job(self, hosts: list[str], *, takeover: bool = False) -> Job:
        """Start trainers on these hosts; the first one has rank 0."""
        shape = self.shape
        job = Job(
            world=self,
            token=f"g{self.jobs_before + len(self.jobs)}",
            leader=self.hosts[hosts[0]].known_as,
            rank_count=len(hosts) * shape.ranks_a_host,
            window=shape.window,
            every=shape.every,
            has_ram=shape.has_ram,
            takeover=takeover,
            interval_secs=shape.interval_secs,
            kind=shape.kind,
            started_at=self.now,
        )
        self.jobs[job.token] = self.job = job
        base_secs = shape.pace_secs
        rank = 0
        for name in hosts:
            for _ in range(shape.ranks_a_host):
                trainer = Trainer(job, rank, self.hosts[name])
                trainer.pace_secs = base_secs * (0.7 + 0.6 * self.rng.random())
                job.trainers.append(trainer)
                rank += 1
        for trainer in job.trainers:
            self.at(self.rng.random() * 0.5, self._attach, trainer)
        self.at(1.0, job.poll)
        return job

    def _attach(self, trainer: Trainer) -> None:
        if trainer.is_attached and not trainer.job.is_broken and trainer.host.is_up:
            trainer.attach()
        elif trainer.is_attached:
            trainer.die()

    def up_hosts(self) -> list[str]:
        return [name for name, host in self.hosts.items() if host.is_up]

    def job_broken(self, job: Job) -> None:
        """React to the end of a rank as a launcher: end the other ranks, and start again."""
        self.at(0.5 + self.rng.random() * 3, self._end_broken, job)

    def _end_broken(self, job: Job) -> None:
        for trainer in job.living:
            trainer.is_zombie = self.rng.random() < self.zombies
            if not trainer.is_zombie:
                trainer.die()
            else:
                self.at(5 + self.rng.random() * 20, trainer.die)
        if job is self.job:
            self._start_again(job)

    def job_over(self, job: Job) -> None:
        if job is self.job and self.restarts:
            self._start_again(job)

    def _start_again(self, job: Job) -> None:
        if self.restarts:
            self.at(0.2 + self.rng.random() * 4, self._start_next, job)

    def _start_next(self, job: Job) -> None:
        if job is not self.job or not self.restarts:
            return
        hosts = self.up_hosts()
        if not hosts:
            self.at(2.0, self._start_next, job)
            return
        if not self.is_calm and self.rng.random() < 0.3:
            self.rng.shuffle(hosts)
            hosts = hosts[: max(1, len(hosts) - self.rng.randrange(3))]
        takeover = bool(job.refused) and self.rng.random() < 0.7
        self.start_job(hosts, takeover=takeover)

    def group_refused(self, effect: ef.GroupRefused) -> None:
        job = self.jobs[effect.group]
        self.oracle.count("busy" if effect.kind is Refusal.BUSY else "refused")
        if not job.refused:
            job.refused = effect.reason
            self.at(0.1, job.kill)

    # Actions of users.

    def wish(self, host: str, kind: TargetKind) -> None:
        self.hosts[host].submit(fa.Wish(kind))
