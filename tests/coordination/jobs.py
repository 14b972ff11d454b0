"""Jobs of the simulator: the trainers of one start, and their launcher."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from holdfast.coordination import inputs as fa
from holdfast.coordination.messages import TargetKind
from holdfast.coordination.survivability import Lead, check_lead, standings
from holdfast.format.names import CheckpointId
from tests.coordination.trainer import Trainer

if TYPE_CHECKING:
    from tests.coordination.world import World

MANY_RANKS = 64
CLOSE_SECS = 30.0
LOOK_SECS = 0.05
"""Of many ranks the slowest one is not looked for at every step of each."""


@dataclass
class Job:
    """One start of the training."""

    world: World
    token: str
    leader: str
    rank_count: int
    window: int
    every: int
    has_ram: bool
    takeover: bool
    interval_secs: float
    kind: TargetKind
    trainers: list[Trainer] = field(default_factory=list)
    is_broken: bool = False
    is_over: bool = False
    is_rewind: bool = False
    refused: str = ""
    started_at: float = 0.0
    steps: int | None = None
    """Each rank takes so many steps and then waits for its saves; None: until the job is ended."""
    is_finishing: bool = False
    finish_at: float = 0.0
    looked_at: float = -1.0
    lowest: int = -1
    halted: list[int] = field(default_factory=list)

    @property
    def is_single(self) -> bool:
        """Whether the job has only one rank, which meets a target at whichever step it reads it."""
        return self.rank_count == 1

    @property
    def living(self) -> list[Trainer]:
        return [t for t in self.trainers if t.is_attached]

    @property
    def is_running(self) -> bool:
        is_going = not (self.is_broken or self.is_over or self.is_finishing)
        return is_going and all(t.attempt for t in self.trainers)

    def may_step(self, trainer: Trainer) -> bool:
        """Return whether the ranks that `trainer` has to wait for have come far enough."""
        if self.steps is not None and trainer.step + 1 >= self.steps:
            return False
        if self.world.now >= self.looked_at + LOOK_SECS or self.rank_count < MANY_RANKS:
            self.looked_at = self.world.now
            self.lowest = min(t.step for t in self.trainers if t.attempt == trainer.attempt)
            self.halted = [
                t.step
                for t in self.trainers
                if not t.is_attached or t.is_stopped or t.waits_since is not None
            ]
        halted = self.halted
        # A rank that has ended, or waits, takes no part in the next collective.
        if halted and trainer.step + 1 - min(halted) > self.window - 1:
            return False
        return trainer.step + 1 - self.lowest <= self.window

    def lost(self, trainer: Trainer) -> None:
        if not self.is_over:
            self.is_broken = True
            self.world.job_broken(self)

    def stopped(self, trainer: Trainer) -> None:
        if all(t.is_stopped for t in self.trainers):
            self.finish()

    def finish(self) -> None:
        """Let all ranks wait until their saves are durable, then detach."""
        self.is_finishing = True
        self.finish_at = self.world.now + CLOSE_SECS
        for trainer in self.trainers:
            trainer.loop += 1
        self._leave_when_durable()

    def _leave_when_durable(self) -> None:
        if self.is_broken or self.is_over:
            return
        is_waiting = any(due for t in self.trainers for due in t.outstanding.values())
        if is_waiting and self.world.now < self.finish_at:
            self.world.at(0.05, self._leave_when_durable)
            return
        self.is_over = True
        for trainer in self.trainers:
            trainer.leave()
        self.world.job_over(self)

    def rewind(self, origin: CheckpointId) -> None:
        """Let all ranks go back to an earlier checkpoint; each of them reports it."""
        self.is_rewind = True
        for trainer in self.living:
            trainer.host.submit(fa.BranchWanted(trainer.attempt, origin))

    def kill(self) -> None:
        self.is_broken = True
        for trainer in self.living:
            trainer.die()

    def poll(self) -> None:
        """Evaluate the policy on the leader's agent; it wants a checkpoint at each interval."""
        world = self.world
        if self.is_broken or self.is_over or self.interval_secs <= 0:
            return
        host = self.trainers[0].host
        agent = host.agent
        leader = agent.roles.leader if agent is not None else None
        if (
            leader is not None
            and leader.leadership.group == self.token
            and not leader.targets.is_under_way(self.kind)
            and not leader.is_saving
        ):
            host.submit(fa.Wish(self.kind))
        world.at(self.interval_secs, self.poll)


def survives(world: World, leader: str) -> tuple[CheckpointId, int | None] | None:
    """Return the newest checkpoint and the losses that it survives, from all hosts' statuses."""
    agent = world.hosts[leader].agent
    assert agent is not None
    found = agent.survey(world.now)
    assert found is not None
    data = msgspec.json.encode(found)
    decoded = msgspec.json.decode(data, type=Lead)
    check_lead(decoded)
    hosts = {name: host for name, host in world.hosts.items() if host.agent is not None}
    holds = {name: tuple(o.held for o in host.view.held) for name, host in hosts.items()}
    whole = standings(decoded, holds, {name: host.domain for name, host in hosts.items()})
    newest = next(iter(whole), None)
    if newest is None:
        return None
    attempt = world.storage.attempts[newest.attempt].attempt
    return CheckpointId(newest.step, attempt), newest.survives
