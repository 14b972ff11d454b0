"""One trainer of the simulator: it steps, publishes, reads the target cells, and saves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.coordination import effects as ef
from holdfast.coordination import inputs as fa
from holdfast.coordination.messages import CheckpointStatus, TargetKind
from holdfast.format.names import NO_ATTEMPT, AttemptId, CheckpointId

if TYPE_CHECKING:
    from tests.coordination.host import Host
    from tests.coordination.jobs import Job

NEVER = 1 << 62
STOP_WAIT_SECS = 40.0
POLL_SECS = 0.02
PAUSED_SECS = 0.1


@dataclass
class Trainer:
    """One rank. `window`: the most steps that it may be ahead of the slowest rank."""

    job: Job
    rank: int
    host: Host
    step: int = -1
    attempt: AttemptId = NO_ATTEMPT
    is_attached: bool = True
    is_stopped: bool = False
    is_zombie: bool = False
    served: dict[TargetKind, int] = field(default_factory=dict)
    met: set[tuple[TargetKind, int]] = field(default_factory=set)
    """The targets that the newest save met, of those saves that met one."""
    decided: int = -1
    """The newest step of which it has published whether it saves it."""
    begun: set[CheckpointId] = field(default_factory=set)
    filling: CheckpointId | None = None
    outstanding: dict[CheckpointId, bool] = field(default_factory=dict)
    reports: dict[CheckpointId, fa.PartSealed] = field(default_factory=dict)
    accepted_at: dict[CheckpointId, float] = field(default_factory=dict)
    sealing: list[CheckpointId] = field(default_factory=list)
    """When each save that has not ended was accepted."""
    untold: list[fa.Input] = field(default_factory=list)
    waits_since: float | None = None
    pace_secs: float = 0.1
    loop: int = 0

    @property
    def group(self) -> str:
        return self.job.token

    def has_met(self, kind: TargetKind, target: int) -> bool:
        """Whether the newest save meets a target; the only rank does so at a later step too."""
        return any(
            k is kind and (step == target or (self.job.is_single and step > target))
            for k, step in self.met
        )

    # Life cycle.

    def attach(self) -> None:
        self.host.trainers[self.group, self.rank] = self
        if self.host.agent is None:
            self.host.start_agent()
        self.host.submit(self._joined())

    def _joined(self) -> fa.RankJoined:
        return fa.RankJoined(
            group=self.group,
            rank=self.rank,
            rank_count=self.job.rank_count,
            leader=self.job.leader,
            takeover=self.job.takeover,
            hosts=tuple(sorted({t.host.known_as for t in self.job.trainers})),
        )

    def agent_returned(self) -> None:
        """Report again to a new agent what the previous one may not have processed."""
        if not self.is_attached:
            return
        if not self.attempt:
            self.host.submit(self._joined())
        untold, self.untold = self.untold, []
        for item in untold:
            self.host.submit(item)
        for checkpoint, report in list(self.reports.items()):
            if report.in_ram and self.rank not in self.host.ram.get(checkpoint, ()):
                # The previous agent dropped it, and may have ended before it notified this rank.
                self._end(checkpoint)
            else:
                self.host.submit(report)

    def attempt_joined(self, attempt: AttemptId, origin: CheckpointId | None) -> None:
        if not self.is_attached or attempt <= self.attempt:
            return
        self.attempt = attempt
        self.step = origin.step if origin is not None else -1
        self.served.clear()
        self.met = set()
        self.decided = self.step
        self.filling = None
        self.waits_since = None
        # A rank that went back with the others continues with them.
        self.is_stopped = False
        self.loop += 1
        self._next()

    def die(self, *, notify: bool = True) -> None:
        """End without detaching; the host learns of sealed parts before it learns of the end."""
        if not self.is_attached:
            return
        self.is_attached = False
        self.loop += 1
        self.host.trainers.pop((self.group, self.rank), None)
        self.job.lost(self)
        if not notify:
            return
        if self.host.file is not None and self.host.file.group == self.group:
            self.host.file.is_broken = True
            self.host.file.lost.add(self.rank)
            self.host.file.ended_attempt = self.host.file.attempt
        if self.host.agent is not None:
            for item in self.untold:
                self.host.submit(item)
            self.host.submit(fa.RankLost(self.group, self.rank))

    def notified(self, effect: ef.ReportOutcome) -> None:
        """Note the end of a save; one for RAM alone ends when its checkpoint is protected."""
        if effect.status is CheckpointStatus.PROTECTED and self.outstanding.get(effect.id):
            return
        self._end(effect.id)

    def released(self, checkpoint: CheckpointId) -> None:
        """Note that a checkpoint's RAM was released, which ends a save for RAM alone."""
        if not self.outstanding.get(checkpoint, True):
            self._end(checkpoint)

    def _end(self, checkpoint: CheckpointId) -> None:
        for known in (self.outstanding, self.accepted_at, self.reports):
            known.pop(checkpoint, None)

    def leave(self) -> None:
        """Detach."""
        if not self.is_attached:
            return
        self.is_attached = False
        self.loop += 1
        self.host.trainers.pop((self.group, self.rank), None)
        if self.host.file is not None and self.host.file.group == self.group:
            self.host.file.ended_attempt = self.host.file.attempt
        self.host.submit(fa.RankLeft(self.group, self.rank))

    def fenced(self) -> None:
        if not self.is_zombie:
            self.die()

    # Steps.

    def _next(self) -> None:
        world = self.host.world
        pace_secs = self.pace_secs * (0.5 + world.rng.random())
        world.at(pace_secs, self._step, self.loop)

    def _step(self, loop: int) -> None:
        world = self.host.world
        if loop != self.loop or not self.is_attached:
            return
        if self.host.is_paused or not self.job.may_step(self):
            world.at(self.pace_secs * 0.5, self._step, loop)
            return
        self.step += 1
        # Anything may happen between publishing a step and reading the cells.
        world.at(world.rng.random() * 0.003, self._read, loop)

    def _read(self, loop: int) -> None:
        if loop != self.loop or not self.is_attached:
            return
        if self.host.is_paused:
            self.host.world.at(PAUSED_SECS, self._read, loop)
            return
        host, step = self.host, self.step
        due = {k for k, target in host.cells.items() if step >= target} - self._missed()
        fresh = {k for k in due if self.served.get(k) != host.cells[k]}
        is_due_by_step = self.job.every > 0 and step % self.job.every == 0 and step > 0
        if fresh or is_due_by_step:
            meets = {k for k in fresh if self.job.is_single or host.cells[k] == step}
            self.met = {(k, step) for k in meets} or self.met
            for kind in fresh:
                self.served[kind] = host.cells[kind]
            self._save(is_due=bool(fresh - {TargetKind.RAM}) or is_due_by_step)
        self.decided = step
        host.world.oracle.read(self, step)
        if TargetKind.PREEMPTION in due:
            self.waits_since = host.world.now
            self._wait(loop, host.cells[TargetKind.PREEMPTION])
        else:
            self._next()

    def _missed(self) -> set[TargetKind]:
        """Return the targets that were written after this rank had passed their steps."""
        host = self.host
        return {
            kind
            for kind, target in host.cells.items()
            if target <= self.decided
            and self.served.get(kind) != target
            and not self.job.is_single
            and not (kind is TargetKind.PREEMPTION and host.confirmed == target)
        }

    def _wait(self, loop: int, target: int) -> None:
        """Wait at a preemption target until it is agreed, or another one is proposed."""
        if loop != self.loop or not self.is_attached:
            return
        host, world = self.host, self.host.world
        if host.is_paused:
            world.at(PAUSED_SECS, self._wait, loop, target)
            return
        if host.cells.get(TargetKind.PREEMPTION, NEVER) != target or self.step < target:
            self.waits_since = None
            self._next()
            return
        is_late = self.waits_since is not None and world.now - self.waits_since > STOP_WAIT_SECS
        if host.confirmed == target or is_late:
            self.is_stopped = True
            world.oracle.stopped(self, is_late=is_late)
            self.job.stopped(self)
            return
        world.at(POLL_SECS, self._wait, loop, target)

    # Saves.

    def _save(self, *, is_due: bool) -> None:
        world = self.host.world
        checkpoint = CheckpointId(self.step, self.attempt)
        if checkpoint in self.begun:
            return
        self.begun.add(checkpoint)
        self.outstanding[checkpoint] = is_due
        self.accepted_at[checkpoint] = world.now
        self.host.submit(fa.PartBegun(self.rank, checkpoint))
        self._offer()
        fill_secs = 0.01 + world.rng.random() * world.fill_secs_max
        at = max(world.now + fill_secs, getattr(self, "_sealed_at", 0.0) + 0.001)
        self._sealed_at = at
        self.sealing.append(checkpoint)
        world.at(at - world.now, self._sealed, checkpoint, is_due)

    def _offer(self) -> None:
        """Let some ranks offer replicas of the next ranks; which ones changes over time."""
        world, count = self.host.world, self.job.rank_count
        ahead = world.rng.randrange(4)
        parts = {(self.rank + i) % count for i in range(1, min(ahead, count))}
        self.host.submit(fa.CopiesOffered(self.rank, frozenset(parts)))

    def _sealed(self, checkpoint: CheckpointId, is_due: bool) -> None:
        world, host = self.host.world, self.host
        if not self.is_attached or not host.is_up:
            return
        if host.is_paused or self.sealing[0] != checkpoint:
            # A paused rank goes on in the order of its saves.
            world.at(PAUSED_SECS, self._sealed, checkpoint, is_due)
            return
        self.sealing.pop(0)
        count = self.job.rank_count
        item: fa.Input
        if world.rng.random() < world.abandons:
            item = fa.PartAbandoned(self.rank, checkpoint, count, "no room")
            world.oracle.abandoned(checkpoint)
            self._end(checkpoint)
        else:
            if self.job.has_ram:
                host.hold(checkpoint, self.rank, count, is_own=True)
            else:
                world.storage.put_part(checkpoint, self.rank, count, (checkpoint, self.rank))
                world.oracle.part_held(host, checkpoint, self.rank, count)
            item = fa.PartSealed(
                rank=self.rank,
                id=checkpoint,
                part_count=count,
                in_ram=self.job.has_ram,
                is_due=is_due,
            )
            self.reports[checkpoint] = item
        if host.agent is None:
            self.untold.append(item)
        else:
            host.submit(item)
