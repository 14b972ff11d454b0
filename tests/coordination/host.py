"""One host of the simulator: its RAM, target cells and processes, and the shell for effects.

The node of an agent ends with the agent. RAM, target cells and the group's file stay until the host
itself is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from holdfast.coordination import effects as ef
from holdfast.coordination import inputs as fa
from holdfast.coordination.messages import AnyMessage, TargetKind
from holdfast.coordination.node import Node, Ready
from holdfast.coordination.node_view import NodeView
from holdfast.coordination.turn import AgentIdentity
from holdfast.format.names import NO_ATTEMPT, AttemptId, CheckpointId
from tests.coordination.storage import STORING

if TYPE_CHECKING:
    from tests.coordination.trainer import Trainer
    from tests.coordination.world import World

NEVER = 1 << 62
MESSAGES_MAX = 4
"""The most messages that wait in the sockets of a stopped agent; the newest are kept."""
TICK_SECS_MIN = 0.001
LOOK_SECS, LOOKS_MAX = 0.02, 200
"""How often and how many times an agent looks whether ranks that have come to a target save it."""


@dataclass
class GroupFile:
    """The state that an agent leaves for the next one on its host."""

    group: str
    attempt: AttemptId
    leader: str
    successors: tuple[str, ...]
    origin: CheckpointId | None
    rank_count: int
    is_broken: bool = False
    lost: set[int] = field(default_factory=set)
    ended_attempt: AttemptId = NO_ATTEMPT


@dataclass
class Host:
    world: World
    name: str
    domain: str
    known_as: str = ""
    """The name that its agent and its records have; a twin has that of another host."""
    noted: set[AttemptId] = field(default_factory=set)
    """The attempts that its agents wanted to begin; kept in RAM."""
    is_up: bool = True
    agent: Node | None = None
    ready: Ready = field(init=False)
    """What the agent's last input has led to."""
    life: int = 0
    is_halted: bool = False
    """Its agent was stopped: inputs wait, messages only for a short time."""
    waiting: list[fa.Input] = field(default_factory=list)
    ram: dict[CheckpointId, dict[int, bool]] = field(default_factory=dict)
    counts: dict[CheckpointId, int] = field(default_factory=dict)
    cells: dict[TargetKind, int] = field(default_factory=dict)
    confirmed: int | None = None
    trainers: dict[tuple[str, int], Trainer] = field(default_factory=dict)
    file: GroupFile | None = None
    save_cost_secs: float | None = None
    armed_at: float = math.inf
    busy: set[str] = field(default_factory=set)
    deleting: set[CheckpointId] = field(default_factory=set)
    kept_steps: set[int] = field(default_factory=set)
    is_asking: bool = False
    ended: list[tuple[str, int, str]] = field(default_factory=list)
    is_paused: bool = False
    paused_at: float = 0.0
    backlog: list[tuple[int, fa.Input]] = field(default_factory=list)
    given_up: list[ef.GivenUp] = field(default_factory=list)
    outages: list[ef.Effect] = field(default_factory=list)
    awaited: list[ef.LeaseAwaited] = field(default_factory=list)
    ram_given_up: list[ef.RamGivenUp] = field(default_factory=list)
    mirror_job: tuple[CheckpointId, int] | None = None
    """The checkpoint and the round whose parts this host writes to the remote tier."""

    def __post_init__(self) -> None:
        self.known_as = self.known_as or self.name

    # The agent's life cycle.

    def start_agent(self) -> None:
        if self.agent is not None or not self.is_up:
            return
        world = self.world
        self.life += 1
        self.armed_at = math.inf
        incarnation = 1 + int(world.now * 1000) + self.life
        self.agent = Node(
            AgentIdentity(
                run="run",
                host=self.known_as,
                domain=self.domain,
                incarnation=incarnation,
                settings=world.settings,
            )
        )
        self.mirror_job = None
        self.submit(self._found())
        if world.remote is not None:
            world.remote.follow(self)
        for trainer in list(self.trainers.values()):
            trainer.agent_returned()
        for checkpoint in sorted(self.deleting):
            self.delete(checkpoint)

    def pause(self) -> None:
        """Pause all processes of the host; their inputs wait, or are lost."""
        self.is_paused, self.paused_at = True, self.world.now

    def unpause(self) -> None:
        self.is_paused = False
        if self.world.now - self.paused_at >= self.world.settings.lost_secs:
            self.world.oracle.was_lost(self)
        backlog, self.backlog = self.backlog, []
        for life, item in backlog:
            self._submit_to_life(life, item)

    def kill_agent(self) -> None:
        self.world.oracle.agent_lost(self)
        self.agent = None
        self.life += 1
        self.busy.clear()
        self.is_halted = False
        self.waiting.clear()

    def halt(self) -> None:
        """Stop the agent's process (SIGSTOP); the trainers continue."""
        self.is_halted = self.agent is not None

    def go_on(self) -> None:
        """Continue the agent with the inputs that waited; senders of older messages timed out."""
        if not self.is_halted:
            return
        self.is_halted = False
        waiting, self.waiting = self.waiting, []
        newest = [f for f in waiting if isinstance(f, fa.Received)][-MESSAGES_MAX:]
        for item in waiting:
            if not isinstance(item, fa.Received) or any(item is one for one in newest):
                self.submit(item)
        self.submit(fa.Tick())

    def delete(self, checkpoint: CheckpointId) -> None:
        """Delete a checkpoint here; the caller repeats it if the agent ends meanwhile."""
        self.deleting.add(checkpoint)
        self.world.oracle.deleted(checkpoint)
        self._remove(checkpoint)
        self.submit(fa.Deleted(checkpoint))

    def _remove(self, checkpoint: CheckpointId) -> None:
        self.world.storage.remove(checkpoint)
        if self.world.remote is not None:
            self.world.remote.remove(checkpoint)
        self.ram.pop(checkpoint, None)

    def crash(self) -> None:
        self.kill_agent()
        self.is_up = self.is_paused = False
        self.backlog.clear()
        for trainer in list(self.trainers.values()):
            trainer.die(notify=False)
        self.trainers.clear()
        self.world.oracle.ram_lost(self)
        self.ram.clear()
        self.counts.clear()
        self.cells.clear()
        self.deleting.clear()
        self.noted.clear()
        self.confirmed = self.file = None

    def reboot(self) -> None:
        self.is_up = True
        self.start_agent()

    def _found(self) -> fa.Found:
        file = self.file
        ram = {
            c: fa.Listed(part_count=self.counts[c], ranks=frozenset(parts))
            for c, parts in self.ram.items()
        }
        replicas = {
            c: frozenset(r for r, is_own in parts.items() if not is_own)
            for c, parts in self.ram.items()
        }
        if file is None:
            return fa.Found(ram=ram, replicas=replicas)
        mine = [t for t in self.trainers.values() if t.group == file.group and t.is_attached]
        due = {c for t in mine for c, is_due in t.outstanding.items() if is_due}
        return fa.Found(
            ram=ram,
            replicas=replicas,
            due=frozenset(due),
            attempt=file.attempt,
            group=file.group,
            rank_count=file.rank_count,
            ranks=frozenset(t.rank for t in mine),
            is_broken=file.is_broken,
            lost=frozenset(file.lost),
            leader=file.leader,
            successors=file.successors,
            origin=file.origin,
            targets={k: s for k, s in self.cells.items() if s != NEVER} if mine else {},
            is_confirmed=self.confirmed is not None,
            ended_attempt=file.ended_attempt,
        )

    # The agent's node.

    @property
    def view(self) -> NodeView:
        """What the agent's node knows now."""
        assert self.agent is not None
        return self.agent.view(self.world.now)

    @property
    def attempt(self) -> AttemptId:
        """The newest attempt that the agent knows."""
        assert self.agent is not None
        return self.agent.roles.follower.attempt

    # The agent's inputs.

    def _own_trainers(self) -> list[Trainer]:
        """Return the attached trainers of the group that trains here."""
        if self.file is None:
            return []
        mine = [t for t in self.trainers.values() if t.group == self.file.group]
        return [t for t in mine if t.is_attached]

    def published(self) -> fa.Published:
        steps = [trainer.step for trainer in self._own_trainers()]
        if not steps:
            return fa.Published()
        return fa.Published(max(steps), min(steps), self.save_cost_secs)

    def submit(self, item: fa.Input) -> None:
        """Give an input to the agent, if it lives, and carry out its effects."""
        if self.agent is None:
            return
        if self.is_paused:
            self.backlog.append((self.life, item))
            return
        if self.is_halted:
            self.waiting.append(item)
            return
        life = self.life
        self.ready = self.agent.handle(item, self.world.now, self.published())
        for effect in self.ready.effects:
            # An agent may die between any two effects.
            if self.life != life:
                return
            self.do(effect)
        if self.life == life:
            leader = self.agent.roles.leader if self.agent is not None else None
            if leader is not None and leader.wants_preserved and not self.is_asking:
                self.is_asking = True
                self.world.at(self.world.rng.random() * 0.1, self._ask_policy)
            self.world.oracle.check_turn(self)
            self._arm()

    def _ask_policy(self) -> None:
        """Evaluate the RAM tier's policy, which the agent gets when rank 0 has attached again."""
        self.is_asking = False
        if self.agent is not None and self.view.lead.wants_preserved and self.trainers:
            complete = (c.id for c in self.view.lead.checkpoints if c.was_complete)
            kept = {c for c in complete if c.step in self.kept_steps}
            self.submit(fa.Preserved(frozenset(kept)))

    def later(self, secs: float, item: fa.Input) -> None:
        """Give an input to the present agent later, if it still lives."""
        self.world.at(secs, self._submit_to_life, self.life, item)

    def _submit_to_life(self, life: int, item: fa.Input) -> None:
        if life == self.life:
            self.submit(item)

    def _arm(self) -> None:
        assert self.agent is not None
        at = max(self.ready.next_at_secs, self.world.now + TICK_SECS_MIN)
        if at < self.armed_at or self.armed_at <= self.world.now:
            self.armed_at = at
            self.world.at(at - self.world.now, self._tick, self.life, at)

    def _tick(self, life: int, at: float) -> None:
        if life == self.life and self.armed_at == at:
            self.armed_at = math.inf
            self.submit(fa.Tick())

    # The agent's effects.

    def do(self, effect: ef.Effect) -> None:
        world, rng = self.world, self.world.rng
        match effect:
            case ef.Send():
                world.oracle.sent(effect)
                world.network.send(self.known_as, effect.host, effect.message)
            case ef.SetTarget():
                self.cells[effect.kind] = effect.step
                world.at(rng.random() * 0.002, self._read_steps, self.life, effect)
            case ef.ConfirmTarget():
                self.confirmed = effect.step
            case ef.ClearTarget():
                self.cells[effect.kind] = NEVER
                if effect.kind is TargetKind.PREEMPTION:
                    self.confirmed = None
            case ef.Persist():
                self._claim("persist")
                world.at(world.storage_secs(), self._check_fence, self.life, effect)
            case ef.Commit():
                self._claim(f"commit {effect.id.attempt} {self.attempt}")
                world.oracle.commit_wanted(self, effect)
                world.at(world.storage_secs(), self._check_fence, self.life, effect)
            case ef.MirrorParts():
                assert world.remote is not None
                world.remote.write_parts(self, effect)
            case ef.MirrorCommit():
                assert world.remote is not None
                self._claim("copy commit")
                world.remote.commit(self, effect)
            case ef.MirrorEnded():
                assert world.remote is not None
                world.remote.copy_ended(self, effect)
            case ef.ReportMirrored():
                world.oracle.copy_known(self, effect.id)
            case ef.Pull():
                world.at(0.01 + rng.random() * 0.2, self._pull, self.life, effect)
            case ef.Drop():
                world.oracle.dropped(self, effect)
                self.ram.pop(effect.id, None)
                for trainer in list(self.trainers.values()):
                    trainer.released(effect.id)
            case ef.DeleteConfirmed():
                if effect.id in self.deleting:
                    self.deleting.discard(effect.id)
                    self._remove(effect.id)
                    world.oracle.delete_confirmed(effect.id)
            case ef.ListDurable():
                # The lease is read first.
                is_over = world.storage.is_over(world.now)
                world.at(world.storage_secs(), self._list, self.life, effect.since_step, is_over)
            case ef.BeginAttempt():
                world.at(world.storage_secs(), self._begin, self.life, effect)
            case ef.RenewLease() | ef.ReleaseLease():
                self._claim("lease")
                world.at(world.storage_secs(), self._write_lease, self.life, effect)
            case ef.ReadLease():
                world.at(world.storage_secs(), self._read_lease, self.life, effect)
            case ef.LeaseAwaited():
                self.awaited.append(effect)
                if effect.is_storing:
                    world.oracle.count("waits for what is stored")
            case ef.RamGivenUp():
                self.ram_given_up.append(effect)
            case ef.GivenUp():
                self.given_up.append(effect)
                world.oracle.given_up(effect)
            case ef.Reached():
                world.oracle.reached(self, effect)
            case _:
                self._do_for_trainers(effect)

    def _do_for_trainers(self, effect: ef.Effect) -> None:
        match effect:
            case ef.AttemptJoined():
                assert self.agent is not None
                job = self.world.jobs[effect.group]
                self.file = GroupFile(
                    effect.group,
                    effect.attempt,
                    job.leader,
                    effect.successors,
                    effect.origin,
                    job.rank_count,
                    ended_attempt=self.file.ended_attempt if self.file is not None else NO_ATTEMPT,
                )
                self.world.oracle.joined(self, effect)
                for trainer in list(self.trainers.values()):
                    if trainer.group == effect.group:
                        trainer.attempt_joined(effect.attempt, effect.origin)
            case ef.ReportOutcome():
                self.world.oracle.notified(self, effect)
                for trainer in list(self.trainers.values()):
                    trainer.notified(effect)
            case ef.GroupRefused():
                self.world.group_refused(effect)
            case ef.Fenced():
                for trainer in list(self.trainers.values()):
                    if trainer.group == effect.group:
                        trainer.fenced()
            case ef.HostSilent() | ef.HostHeard() | ef.LeaderChanged() | ef.ProtectionLate():
                self.outages.append(effect)
            case ef.RanksEnded():
                self.ended.extend((effect.group, rank, effect.host) for rank in effect.ranks)

    def _claim(self, what: str) -> None:
        assert what not in self.busy, f"two of {what} at a time on {self.name}"
        self.busy.add(what)

    def _release(self, is_commit: bool) -> None:
        kind = "commit" if is_commit else "persist"
        for what in [w for w in self.busy if w.startswith(kind)]:
            self.busy.discard(what)

    def _read_steps(self, life: int, effect: ef.SetTarget, looks: int = 1) -> None:
        if life == self.life:
            step, own = effect.step, self._own_trainers()
            late = [t for t in own if t.step >= step and not t.has_met(effect.kind, step)]
            is_missed = any(not trainer.job.is_single for trainer in late)
            if is_missed and looks < LOOKS_MAX and any(t.decided < step for t in late):
                self.world.at(LOOK_SECS, self._read_steps, life, effect, looks + 1)
                return
            read_from = max([step, *(t.step + 1 for t in late)])
            highest = self.published().highest
            self.submit(fa.TargetWritten(effect.kind, step, highest, is_missed, read_from))

    # Storage: the check and the put are two requests, with time between them.

    def _check_fence(self, life: int, effect: ef.Persist | ef.Commit) -> None:
        world = self.world
        newer = world.storage.forbids(effect.id)
        is_bad = world.rng.random() < world.storage_failures or world.are_writes_refused
        if newer or is_bad:
            reason = f"attempt {newer} has taken the run over" if newer else "the disk is full"
            self._storage_failed(life, effect, reason, newer)
        else:
            world.at(world.storage_secs(), self._put, life, effect)

    def _storage_failed(
        self, life: int, effect: ef.Persist | ef.Commit, reason: str, newer: AttemptId
    ) -> None:
        if life != self.life:
            return
        is_commit = isinstance(effect, ef.Commit)
        self._release(is_commit)
        failed = fa.CommitFailed if is_commit else fa.WriteFailed
        self.submit(failed(effect.id, reason, newer))

    def _put(self, life: int, effect: ef.Persist | ef.Commit) -> None:
        """Carry out a request that was sent, even if its agent is dead by now."""
        world, storage = self.world, self.world.storage
        item: fa.Input
        if isinstance(effect, ef.Persist):
            held = self.ram.get(effect.id, {}) if self.is_up else {}
            if not effect.ranks <= held.keys():
                self._storage_failed(life, effect, "its RAM is gone", NO_ATTEMPT)
                return
            for rank in effect.ranks:
                storage.put_part(effect.id, rank, self.counts[effect.id], (effect.id, rank))
            world.oracle.written(effect.id)
            item = fa.PartsWritten(effect.id, effect.ranks)
        elif world.oracle.is_deleted(effect.id) and not storage.is_whole(effect.id):
            self._storage_failed(life, effect, "parts are missing", NO_ATTEMPT)
            return
        else:
            world.oracle.committing(effect)
            storage.manifests.setdefault(effect.id, effect.part_count)
            world.oracle.committed(effect)
            item = fa.CommitWritten(effect.id)
        if world.rng.random() < world.storage_failures / 2:
            self._storage_failed(life, effect, "no answer", NO_ATTEMPT)
        elif life == self.life:
            self._release(isinstance(effect, ef.Commit))
            self.submit(item)

    def _list(self, life: int, since_step: int, is_over: dict[AttemptId, bool]) -> None:
        if life != self.life:
            return
        world = self.world
        if world.rng.random() < world.storage_failures:
            self.submit(fa.ListingFailed("no answer"))
        elif world.remote is not None and world.remote.is_silent and not since_step:
            self.submit(fa.ListingFailed("the remote tier does not answer"))
        else:
            listed = world.listing(since_step)
            newest = listed.newest_attempt
            self.submit(
                replace(
                    listed,
                    is_begun_here=newest in self.noted,
                    is_over=listed.leader == self.known_as and is_over.get(newest, False),
                )
            )

    def _write_lease(self, life: int, effect: ef.RenewLease | ef.ReleaseLease) -> None:
        """Carry out a request that was sent, even if its agent is dead by now."""
        world = self.world
        if world.rng.random() >= world.storage_failures:
            if isinstance(effect, ef.RenewLease):
                stamp = f"{effect.incarnation}.{effect.counter}{STORING * effect.is_storing}"
                world.storage.write_lease(effect.attempt, self.known_as, stamp, world.now)
            else:
                world.storage.leases.pop(effect.attempt.number, None)
        if life == self.life:
            self.busy.discard("lease")
            newest = world.storage.newest
            newer = newest if newest > effect.attempt else NO_ATTEMPT
            self.submit(fa.LeaseWritten(effect.attempt, newer))

    def _read_lease(self, life: int, effect: ef.ReadLease) -> None:
        world = self.world
        if life != self.life:
            return
        if world.rng.random() < world.storage_failures:
            self.submit(fa.LeaseNotRead(effect.attempt, "no answer"))
        else:
            self.submit(
                fa.LeaseRead(effect.attempt, world.storage.lease(effect.attempt, world.now))
            )

    def _begin(self, life: int, effect: ef.BeginAttempt) -> None:
        world = self.world
        if life != self.life:
            return
        if world.remote is not None and (world.remote.is_silent or world.remote.does_fail()):
            self.submit(fa.BeginFailed(effect, "the remote tier does not answer"))
        elif world.rng.random() < world.storage_failures:
            if world.rng.random() < 0.5:
                self._put_attempt(effect)
            self.submit(fa.BeginFailed(effect, "no answer"))
        elif self._put_attempt(effect):
            self.later(world.answer_secs, fa.AttemptBegun(effect))
        else:
            self.submit(fa.AttemptTaken(effect))

    def _put_attempt(self, effect: ef.BeginAttempt) -> bool:
        oracle, remote = self.world.oracle, self.world.remote
        self.noted.add(effect.attempt)
        self.world.storage.write_lease(effect.attempt, self.known_as, "begun", self.world.now)
        if remote is not None and not remote.begin(self, effect):
            return False
        oracle.beginning(self, effect)
        is_put = self.world.storage.begin(effect.attempt, self.known_as, effect.origin)
        if is_put:
            oracle.begun(self, effect)
        return is_put

    def _pull(self, life: int, effect: ef.Pull) -> None:
        world = self.world
        if life != self.life or self.agent is None:
            return
        source = world.hosts[effect.source]
        is_there = (
            source.is_up
            and source.agent is not None
            and world.network.reaches(self.name, source.name)
            and source.attempt <= self.attempt
            and effect.rank in source.ram.get(effect.id, {})
            and world.rng.random() >= world.pull_failures
        )
        if not is_there:
            self.submit(fa.PullFailed(effect.id, effect.rank))
            return
        self.hold(effect.id, effect.rank, effect.part_count, is_own=False)
        self.submit(fa.ReplicaSealed(effect.id, effect.rank, effect.part_count))

    def hold(self, checkpoint: CheckpointId, rank: int, count: int, *, is_own: bool) -> None:
        """Add a part to this host's RAM."""
        self.ram.setdefault(checkpoint, {})[rank] = is_own
        self.counts[checkpoint] = count
        self.world.oracle.part_held(self, checkpoint, rank, count)

    def receive(self, sender: str, message: AnyMessage) -> None:
        if self.agent is not None and not self.is_paused:
            self.submit(fa.Received(sender, message))
