"""The oracle: checks the invariants against what happened, not against what the nodes report.

It observes every part that is held, every loss and every operation, and does not use the logic by
which the nodes decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.coordination import effects as ef
from holdfast.coordination.messages import Alive, CheckpointStatus, TargetKind
from holdfast.coordination.settings import HELD_MAX, LEASE_SECS, PULLS_MAX
from holdfast.format.names import AttemptId, CheckpointId

if TYPE_CHECKING:
    from tests.coordination.host import Host
    from tests.coordination.jobs import Job
    from tests.coordination.trainer import Trainer
    from tests.coordination.world import World

IN_FLIGHT_A_HOST_MAX = 400
SAVE_SECS = 60.0
"""The bound for a save to end in calm, once all ranks have reached its step."""
CHECK_SAVES_SECS = 5.0


class BrokenPromiseError(AssertionError):
    """An invariant was broken; the message names it."""


@dataclass
class Truth:
    """The true state of one checkpoint.

    `ever`: for each rank, the domains that ever held its part. `written`: the ranks whose parts
    were ever durable; a delete that the leader does not know yet may have removed them.
    """

    part_count: int
    required: int
    ever: dict[int, set[str]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    was_complete: bool = False
    was_protected: bool = False
    protected_at: float | None = None
    is_abandoned: bool = False
    notified: set[CheckpointStatus] = field(default_factory=set)
    is_due: bool = False


@dataclass
class Obligation:
    """A step that all ranks of a job have to save."""

    job: Job
    attempt: AttemptId
    step: int
    kind: TargetKind


@dataclass
class Oracle:
    world: World
    truths: dict[CheckpointId, Truth] = field(default_factory=dict)
    losses: list[tuple[float, str]] = field(default_factory=list)
    obligations: list[Obligation] = field(default_factory=list)
    agreed: set[tuple[str, AttemptId, int, TargetKind]] = field(default_factory=set)
    stops: dict[str, set[int]] = field(default_factory=dict)
    relied_on: dict[AttemptId, tuple[CheckpointId, frozenset[str], str]] = field(
        default_factory=dict
    )
    required: dict[AttemptId, int] = field(default_factory=dict)
    are_deleted: dict[CheckpointId, bool] = field(default_factory=dict)
    commits: int = 0
    passed_at: dict[CheckpointId, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    groups: dict[AttemptId, str] = field(default_factory=dict)
    """The group that began each attempt."""
    reported_ended: set[tuple[AttemptId, str]] = field(default_factory=set)
    """The attempts that their leader has reported as ended, each with the start that asked."""

    def fail(self, promise: str, what: str) -> None:
        raise BrokenPromiseError(f"{promise}: at {self.world.now:.3f} s: {what}")

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # Parts and their holders.

    def part_held(self, host: Host, checkpoint: CheckpointId, rank: int, count: int) -> None:
        truth = self.truths.get(checkpoint)
        if truth is None:
            required = self.required.get(checkpoint.attempt, self.world.settings.copies)
            truth = self.truths[checkpoint] = Truth(count, required)
        truth.ever.setdefault(rank, set()).add(host.domain)
        self._update(checkpoint, truth)

    def _update(self, checkpoint: CheckpointId, truth: Truth) -> None:
        truth.written.update(self.world.storage.parts.get(checkpoint, {}))
        if len(truth.ever.keys() | truth.written) == truth.part_count:
            truth.was_complete = True
            truth.was_protected |= all(
                rank in truth.written or len(truth.ever.get(rank, ())) >= truth.required
                for rank in range(truth.part_count)
            )
            if truth.protected_at is None and self.is_protected_now(checkpoint):
                truth.protected_at = self.world.now

    def written(self, checkpoint: CheckpointId) -> None:
        truth = self.truths.get(checkpoint)
        if truth is not None:
            self._update(checkpoint, truth)

    def is_protected_now(self, checkpoint: CheckpointId) -> bool:
        truth = self.truths[checkpoint]
        durable = self.world.storage.parts.get(checkpoint, {})
        held = self.domains_by_rank(checkpoint)
        return all(
            rank in durable or len(held.get(rank, ())) >= truth.required
            for rank in range(truth.part_count)
        )

    def is_copied_now(self, checkpoint: CheckpointId) -> bool:
        truth = self.truths[checkpoint]
        held = self.domains_by_rank(checkpoint)
        return all(len(held.get(r, ())) >= truth.required for r in range(truth.part_count))

    def domains_by_rank(self, checkpoint: CheckpointId) -> dict[int, set[str]]:
        """Return, for each rank, the domains that hold its part now."""
        found: dict[int, set[str]] = {}
        for host in self.world.hosts.values():
            for rank in host.ram.get(checkpoint, ()):
                found.setdefault(rank, set()).add(host.domain)
        return found

    def is_whole_now(self, checkpoint: CheckpointId) -> bool:
        storage = self.world.storage
        if checkpoint in storage.manifests:
            return True
        truth = self.truths.get(checkpoint)
        if truth is None:
            return False
        ranks = set(self.domains_by_rank(checkpoint)) | set(storage.parts.get(checkpoint, ()))
        return len(ranks) == truth.part_count

    def ram_lost(self, host: Host) -> None:
        self.losses.append((self.world.now, host.domain))

    def losses_since(self, at: float) -> int:
        return len({domain for when, domain in self.losses if when >= at})

    def abandoned(self, checkpoint: CheckpointId) -> None:
        if checkpoint in self.truths:
            self.truths[checkpoint].is_abandoned = True

    # I9: deletes.

    def deleted(self, checkpoint: CheckpointId) -> None:
        self.abandoned(checkpoint)
        self.are_deleted.setdefault(checkpoint, False)
        self.count("deletes")

    def is_deleted(self, checkpoint: CheckpointId) -> bool:
        return checkpoint in self.are_deleted

    def is_overtaken(self, checkpoint: CheckpointId) -> bool:
        """Return whether it was dropped for a newer one that was deleted after that."""
        return any(
            c.age > checkpoint.age and self.truths[c].was_protected
            for c in self.are_deleted
            if c in self.truths
        )

    def delete_confirmed(self, checkpoint: CheckpointId) -> None:
        """Check a delete that was confirmed; in calm all hosts of the attempt have reported.

        A host that had no rank in the attempt may not have reported yet.
        """
        self.count("deletes confirmed")
        if not self.world.is_calm:
            return
        self.are_deleted[checkpoint] = True
        job = self.world.job
        hosts = {t.host.name: t.host for t in job.living} if job is not None else {}
        holders = [name for name, host in hosts.items() if checkpoint in host.ram]
        if holders or checkpoint in self.world.storage.manifests:
            self.fail(
                "I9",
                f"{checkpoint} is confirmed as deleted; it is held by {holders}, or is committed",
            )

    # I1, I2: commits.

    def commit_wanted(self, host: Host, effect: ef.Commit) -> None:
        if self.is_deleted(effect.id):
            # It was removed a moment ago; the store checks again.
            return
        parts = self.world.storage.parts.get(effect.id, {})
        if set(parts) != set(range(effect.part_count)):
            missing = sorted(set(range(effect.part_count)) - set(parts))
            self.fail("I1", f"{host.name} commits {effect.id} without the parts of {missing}")
        if host.agent is not None and host.attempt > effect.id.attempt:
            known = host.agent.roles.leader
            if known is None or not known.table.on_timeline(effect.id):
                self.fail("I2", f"{host.name} knows a newer attempt and commits {effect.id}")

    def committing(self, effect: ef.Commit) -> None:
        for rank, token in self.world.storage.parts[effect.id].items():
            if token != (effect.id, rank):
                self.fail("I1", f"{effect.id} is committed with a part of {token}")
        known = self.world.storage.manifests.get(effect.id, effect.part_count)
        if known != effect.part_count:
            self.fail("I1", f"{effect.id} is committed twice, of {known} and {effect.part_count}")

    def committed(self, effect: ef.Commit) -> None:
        self.commits += 1
        self.count("commits")
        if self.world.remote is not None:
            self.world.remote.committed_once.add(effect.id)
        truth = self.truths.get(effect.id)
        if truth is not None:
            truth.was_complete = truth.was_protected = True
            truth.protected_at = (
                self.world.now if truth.protected_at is None else truth.protected_at
            )

    # I12: the remote tier.

    def copy_commit_wanted(self, host: Host, effect: ef.MirrorCommit) -> None:
        remote, checkpoint = self.world.remote, effect.id
        assert remote is not None
        if self.is_deleted(checkpoint):
            return
        missing = set(range(effect.part_count)) - remote.storage.parts.get(checkpoint, {}).keys()
        if missing:
            self.fail("I12", f"{host.name} commits a copy of {checkpoint} without {missing}")
        if host.agent is not None and host.attempt > checkpoint.attempt:
            leader = host.agent.roles.leader
            if leader is None or not leader.table.on_timeline(checkpoint):
                self.fail("I2", f"{host.name} knows a newer attempt and copies {checkpoint}")

    def copied(self, checkpoint: CheckpointId) -> None:
        remote = self.world.remote
        assert remote is not None
        self.count("copies")
        for rank, token in remote.storage.parts[checkpoint].items():
            if token != (checkpoint, rank):
                self.fail("I12", f"the copy of {checkpoint} has a part of {token}")
        if checkpoint not in remote.committed_once:
            self.fail("I12", f"{checkpoint} is in the remote tier and never was committed")

    def copy_ended(self, effect: ef.MirrorEnded) -> None:
        remote = self.world.remote
        assert remote is not None
        self.count("copies failed" if effect.reason else "copies reported")
        is_there = effect.id in remote.storage.manifests or self.is_deleted(effect.id)
        if not effect.reason and not is_there:
            self.fail("I12", f"{effect.id} is reported as copied, and is not there")

    def copy_known(self, host: Host, checkpoint: CheckpointId) -> None:
        """Check what the trainers of a host hear of the remote tier."""
        remote = self.world.remote
        assert remote is not None
        self.count("copies known")
        if checkpoint not in remote.storage.manifests and not self.is_deleted(checkpoint):
            self.fail(
                "I12", f"{host.name} reports that {checkpoint} is copied, and it is not there"
            )

    # I3: drops.

    def dropped(self, host: Host, effect: ef.Drop) -> None:
        world, checkpoint = self.world, effect.id
        self.count("drops")
        if checkpoint not in host.ram:
            return
        if f"already holds {HELD_MAX} checkpoints" in effect.reason:
            # A host has room for so many that wait for slower ranks; its rank is notified.
            return
        truth = self.truths[checkpoint]
        if not self.is_whole_now(checkpoint) or truth.is_abandoned:
            return
        if not world.storage.on_timeline(checkpoint):
            return
        newer = [
            t
            for c, t in self.truths.items()
            if c.age > checkpoint.age and t.was_protected and c.attempt >= checkpoint.attempt
        ]
        if not newer and checkpoint.attempt == world.storage.newest:
            self.fail(
                "I3", f"{host.name} drops {checkpoint} ({effect.reason}), no newer one exists"
            )
        is_over = checkpoint in world.storage.manifests or truth.notified & {
            CheckpointStatus.FAILED,
            CheckpointStatus.DROPPED,
            CheckpointStatus.COMMITTED,
        }
        if truth.is_due and not is_over and self.is_whole_now(checkpoint):
            self.fail("I3", f"{host.name} drops {checkpoint}, which is not durable yet")
        origin, hosts, group = self.relied_on.get(world.storage.newest, (None, frozenset(), ""))
        job = world.jobs.get(group)
        # No host knows of a start that died between its record and its first message.
        is_orphan = job is None or job.is_broken or bool(job.refused)
        if checkpoint == origin and host.name in hosts and not is_orphan:
            has_newer = any(
                t.was_protected and c.attempt >= world.storage.newest
                for c, t in self.truths.items()
            )
            if not has_newer:
                self.fail("I2", f"{host.name} drops {checkpoint}, the newest attempt's origin")

    def notified(self, host: Host, effect: ef.ReportOutcome) -> None:
        truth = self.truths.get(effect.id)
        if truth is not None:
            truth.notified.add(effect.status)
        self.count(f"notified {effect.status}")
        is_there = effect.id in self.world.storage.manifests or self.is_deleted(effect.id)
        if effect.status is CheckpointStatus.COMMITTED and not is_there:
            self.fail("I1", f"{effect.id} is reported as committed, and is not")

    def reached(self, host: Host, effect: ef.Reached) -> None:
        self.count(effect.status)
        truth = self.truths.get(effect.id)
        if self.is_deleted(effect.id):
            # The parts that its hosts reported may have been removed since.
            return
        if effect.status in (CheckpointStatus.COMPLETE, CheckpointStatus.PROTECTED):
            if truth is None or not truth.was_complete:
                self.fail(
                    "I1", f"{effect.id} is called {effect.status}; not all parts ever existed"
                )
            elif effect.status is CheckpointStatus.PROTECTED and not truth.was_protected:
                leader = host.agent.roles.leader if host.agent is not None else None
                if leader is None or leader.leadership.attempt != effect.id.attempt:
                    # Another attempt, of fewer hosts, requires fewer copies.
                    return
                self.fail("I3", f"{effect.id} is called protected; it never was")

    # I4: the checkpoint that an attempt continues from.

    def beginning(self, host: Host, effect: ef.BeginAttempt) -> None:
        """Check before the record is put, on the timeline until then."""
        if effect.attempt.number in self.world.storage.attempts or not self.world.is_calm:
            return
        expected = self.expected()
        job = self.world.jobs[effect.group]
        if job.is_rewind or expected is None:
            return
        if effect.origin is None or effect.origin < expected:
            self.fail("I4", f"attempt {effect.attempt} from {effect.origin}, not from {expected}")

    def expected(self) -> CheckpointId | None:
        """Return the newest that a start must find: committed, or protected and not lost."""
        world = self.world
        found = [
            c
            for c, t in self.truths.items()
            if world.storage.on_timeline(c)
            and (
                c in world.storage.manifests
                or (
                    t.protected_at is not None
                    and not t.is_abandoned
                    and self.losses_since(t.protected_at) < t.required
                    and not any(n.was_protected and o.age > c.age for o, n in self.truths.items())
                )
            )
        ]
        return max(found, default=None)

    def begun(self, host: Host, effect: ef.BeginAttempt) -> None:
        self.count("attempts")
        self.groups[effect.attempt] = effect.group
        self._check_takeover(host, effect)
        if effect.origin is None:
            return
        if self.are_deleted.get(effect.origin):
            self.fail("I9", f"attempt {effect.attempt} begins from {effect.origin}, deleted")
        if not self.is_whole_now(effect.origin) and self.world.is_calm:
            self.fail("I4", f"attempt {effect.attempt} begins from {effect.origin}, not whole")
        agent = host.agent
        assert agent is not None
        if agent.roles.bootstrap is not None:
            hosts = frozenset(
                h
                for h, report in agent.roles.bootstrap.hellos.items()
                if any(held.id == effect.origin for held in report.state.held)
            )
            self.relied_on[effect.attempt] = effect.origin, hosts, effect.group

    # I11: live attempts.

    def sent(self, effect: ef.Send) -> None:
        message = effect.message
        if isinstance(message, Alive) and not message.is_living:
            self.reported_ended.add((message.attempt, message.group))

    def _was_silent(self, job: Job) -> bool:
        """Return whether a host of a job could not reach its leader, now or a short time ago."""
        world, leader = self.world, job.trainers[0].host.name
        since = world.now - world.settings.lost_secs
        pairs = [(trainer.host.name, leader) for trainer in job.trainers]
        network = world.network
        return any(not network.reaches(*p) or network.healed_at.get(p, 0.0) > since for p in pairs)

    def _check_takeover(self, host: Host, effect: ef.BeginAttempt) -> None:
        """Check that the attempt before has ended, or that its agent missed its lease meanwhile."""
        world = self.world
        record = world.storage.attempts.get(effect.attempt.number - 1)
        if record is None:
            return
        before = record.attempt
        group = self.groups.get(before, effect.group)
        job, new = world.jobs[group], world.jobs[effect.group]
        lease = world.storage.lease(before, world.now)
        if job is new or new.takeover or lease is None or before in world.storage.lapsed:
            return
        if (before, effect.group) in self.reported_ended and self._was_silent(job):
            # The leader has heard from all hosts again since, and the start goes on by its answer.
            self.count("attempts that were broken when a start asked")
            return
        leader = job.trainers[0].host
        is_whole = job.is_running and len(job.living) == job.rank_count
        is_renewing = leader.agent is not None and not leader.is_halted and not leader.is_paused
        if is_whole and is_renewing and lease.age_secs < LEASE_SECS:
            self.fail("I11", f"{host.name} begins {effect.attempt} while attempt {before} is live")

    def given_up(self, effect: ef.GivenUp) -> None:
        """Check that a checkpoint that is reported as lost had been complete."""
        self.count("given up")
        truth = self.truths.get(effect.id)
        if truth is None or not truth.was_complete:
            self.fail("I4", f"{effect.id} is given up as {effect.status}, and never was complete")

    def joined(self, host: Host, effect: ef.AttemptJoined) -> None:
        domains = {t.host.domain for t in self.world.jobs[effect.group].trainers}
        self.required[effect.attempt] = min(self.world.settings.copies, len(domains))
        record = self.world.storage.attempts.get(effect.attempt.number)
        if record is None or record.attempt != effect.attempt:
            self.fail("I2", f"{host.name} joins attempt {effect.attempt}, which has no record")
        if record is not None and record.origin != effect.origin:
            self.fail("I2", f"{host.name} joins attempt {effect.attempt} from {effect.origin}")

    # I5, I7: targets.

    def check_turn(self, host: Host) -> None:
        """Check a node after each turn: its agreed targets, and its bounds."""
        agent = host.agent
        if agent is None:
            return
        self._bounds(host)
        leader = agent.roles.leader
        if leader is None or not leader.leadership.is_first:
            return
        for kind in TargetKind:
            step = leader.targets.agreed(kind)
            if step is None:
                continue
            key = leader.leadership.group, leader.leadership.attempt, step, kind
            if key in self.agreed:
                continue
            self.agreed.add(key)
            self.count("agreed")
            if leader.leadership.attempt != self.world.storage.newest:
                continue
            job = self.world.jobs[leader.leadership.group]
            self.obligations.append(Obligation(job, leader.leadership.attempt, step, kind))
            for trainer in job.living:
                # A rank that has just published may not have read the cells yet.
                if trainer.step > step and not job.is_single:
                    self._check(self.obligations[-1], trainer)

    def read(self, trainer: Trainer, step: int) -> None:
        """Check a rank that has read the cells at `step`, and begun its part if it was due."""
        for obligation in self.obligations:
            if obligation.job is trainer.job and step >= obligation.step:
                self._check(obligation, trainer)

    def _check(self, obligation: Obligation, trainer: Trainer) -> None:
        if not trainer.attempt == obligation.attempt == self.world.storage.newest:
            return
        wanted = CheckpointId(obligation.step, obligation.attempt)
        is_later = obligation.job.is_single and any(
            checkpoint.attempt == wanted.attempt and checkpoint.step > wanted.step
            for checkpoint in trainer.begun
        )
        if wanted not in trainer.begun and not is_later:
            self.fail(
                "I5",
                f"rank {trainer.rank} of {trainer.group} is at {trainer.step} and did not save "
                f"{wanted}, which was agreed ({obligation.kind})",
            )

    def agent_lost(self, host: Host) -> None:
        """Forget targets of a lost leader: the next one may agree on others, except to stop."""
        self.obligations = [
            o
            for o in self.obligations
            if o.job.leader != host.name or o.kind is TargetKind.PREEMPTION
        ]

    def was_lost(self, host: Host) -> None:
        """Forget targets of a host that was paused until its leader counted its ranks as lost.

        A target that they have not reached is withdrawn then, and the checkpoint is dropped.
        """
        self.obligations = [
            o
            for o in self.obligations
            if o.kind is TargetKind.PREEMPTION or all(t.host is not host for t in o.job.trainers)
        ]

    def stopped(self, trainer: Trainer, *, is_late: bool) -> None:
        self.count("stops late" if is_late else "stops")
        if is_late:
            if self.world.is_calm:
                self.fail("I5", f"rank {trainer.rank} waited for a verdict for too long")
            return
        steps = self.stops.setdefault(f"{trainer.group}.{trainer.attempt}", set())
        steps.add(trainer.step)
        if len(steps) > 1:
            self.fail("I7", f"ranks of {trainer.group} stop at {sorted(steps)}")

    # I10: every save ends.

    def check_saves(self) -> None:
        """Check, in calm, that saves of living ranks end soon after all reached their step."""
        world = self.world
        living = world.job.living if world.job is not None else []
        lowest = min((trainer.step for trainer in living), default=-1)
        for trainer in living:
            for checkpoint, accepted_at in trainer.accepted_at.items():
                if checkpoint.attempt == trainer.attempt and checkpoint.step > lowest:
                    continue
                since = self.passed_at.setdefault(checkpoint, max(accepted_at, world.now))
                if world.now - since > SAVE_SECS:
                    self.fail(
                        "I10",
                        f"rank {trainer.rank} of {trainer.group} has accepted {checkpoint} "
                        f"{world.now - accepted_at:.0f} s ago and is not notified of its end",
                    )
        world.at(CHECK_SAVES_SECS, self.check_saves)

    def begin_calm(self) -> None:
        """Start the checks of saves: faults have stopped, so saves end in bounded time."""
        self.check_saves()

    # I8: bounds.

    def _bounds(self, host: Host) -> None:
        agent, world = host.agent, self.world
        assert agent is not None
        if len(agent.roles.follower.inventory) > HELD_MAX:
            self.fail("I8", f"{host.name} holds {len(agent.roles.follower.inventory)} checkpoints")
        if agent.roles.follower.inventory.under_way > PULLS_MAX + 1:
            self.fail(
                "I8",
                f"{host.name} has {agent.roles.follower.inventory.under_way} operations under way",
            )
        if agent.roles.leader is not None and agent.roles.leader.checkpoint_count > 2 * HELD_MAX:
            self.fail("I8", f"{host.name} tracks {agent.roles.leader.checkpoint_count} checkpoints")
        if world.network.in_flight > IN_FLIGHT_A_HOST_MAX * len(world.hosts):
            self.fail("I8", f"{world.network.in_flight} messages are in flight")
