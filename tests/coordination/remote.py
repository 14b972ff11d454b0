"""The remote tier of the simulator: a storage with faults of its own, and the policy that chooses.

The policy wants the newest committed checkpoint there, as an agent without trainers does. Its draws
have a generator of their own, so that schedules without a remote tier do not change.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.coordination import effects as ef
from holdfast.coordination import inputs as fa
from holdfast.format.names import NO_ATTEMPT, AttemptId, CheckpointId
from tests.coordination.storage import Storage

if TYPE_CHECKING:
    from tests.coordination.host import Host
    from tests.coordination.world import World

CHOOSE_SECS = 1.0
WATCH_SECS = 30.0
POLL_SECS = 0.5


@dataclass
class Remote:
    """The remote tier. `is_silent`: it answers no request until that ends."""

    world: World
    rng: random.Random
    storage: Storage = field(default_factory=Storage)
    failures: float = 0.0
    slow_secs: float = 0.2
    is_silent: bool = False
    is_lost: bool = False
    """Its objects are gone, and it takes no new ones."""
    cut_off: set[str] = field(default_factory=set)
    """The hosts that do not reach it."""
    seen: dict[str, AttemptId] = field(default_factory=dict)
    """The newer attempt that each host saw there when it looked last."""
    ended: dict[CheckpointId, str] = field(default_factory=dict)
    """Of each checkpoint, how its last try ended: the reason, empty where it is there."""
    committed_once: set[CheckpointId] = field(default_factory=set)
    """The checkpoints that were committed in the durable tier at some time."""

    def secs(self) -> float:
        return self.rng.random() * self.slow_secs

    def does_fail(self) -> bool:
        return self.is_lost or self.rng.random() < self.failures

    # The agent's policy, and its look for takeovers.

    def follow(self, host: Host) -> None:
        """Begin to choose on a host whose agent has just started."""
        self.world.at(self.rng.random() * CHOOSE_SECS, self._choose, host, host.life)
        self.world.at(self.rng.random() * WATCH_SECS, self._watch, host, host.life)

    def _choose(self, host: Host, life: int) -> None:
        if life != host.life:
            return
        self.world.at(CHOOSE_SECS, self._choose, host, life)
        storage = self.world.storage
        copies = host.view.lead.copies if host.agent is not None else None
        if copies is None or host.is_paused or host.is_halted:
            return
        newest = max(filter(storage.on_timeline, storage.manifests), default=None)
        there = max(filter(storage.on_timeline, self.storage.manifests), default=None)
        if copies.newest != there and not self.is_silent:
            host.submit(fa.MirrorFound(there))
        if newest is None or newest in self.storage.manifests or newest in copies.ids:
            return
        target = fa.MirrorTarget(newest, storage.manifests[newest])
        host.submit(fa.MirrorWanted(target))

    def _watch(self, host: Host, life: int) -> None:
        if life != host.life:
            return
        self.world.at(WATCH_SECS, self._watch, host, life)
        newest = self.storage.newest
        is_leading = host.agent is not None and host.view.is_leading
        if not is_leading or self.is_silent or newest <= host.attempt:
            return
        # One that is recorded here only may be this host's own, which begins in the next moment.
        if self.seen.get(host.name) == newest:
            host.submit(self.world.listing(0))
        self.seen[host.name] = newest

    # Attempts: this tier has the first word.

    def begin(self, host: Host, effect: ef.BeginAttempt) -> bool:
        """Share the attempts of both tiers, and put the attempt's record here."""
        durable = self.world.storage
        for number in sorted({*durable.attempts, *self.storage.attempts}):
            for store, other in ((durable, self.storage), (self.storage, durable)):
                if number not in store.attempts:
                    store.attempts[number] = other.attempts[number]
        return self.storage.begin(effect.attempt, host.known_as, effect.origin)

    def take_over(self) -> None:
        """Begin an attempt on a machine that has this tier alone; it never trains."""
        newest = self.storage.newest
        found = filter(self.storage.on_timeline, self.storage.manifests)
        token = AttemptId.of_start(newest.number + 1, f"elsewhere {self.world.now}")
        self.storage.begin(token, "elsewhere", max(found, default=None))
        self.world.oracle.count("remote takeovers")

    # The effects of hosts.

    def write_parts(self, host: Host, effect: ef.MirrorParts) -> None:
        host.mirror_job = effect.id, effect.round
        for rank in sorted(effect.ranks):
            self.world.at(self.secs(), self._write, host, host.life, effect, rank)

    def _write(self, host: Host, life: int, effect: ef.MirrorParts, rank: int) -> None:
        """Carry out a request that was sent, even if its agent is dead by now."""
        if self.is_silent:
            self.world.at(POLL_SECS, self._write, host, life, effect, rank)
            return
        storage, checkpoint = self.world.storage, effect.id
        token = storage.parts.get(checkpoint, {}).get(rank)
        newer, reason = self.storage.forbids(checkpoint), ""
        if newer:
            reason = f"attempt {newer} has taken the run over"
        elif self.does_fail() or host.name in self.cut_off:
            reason = "the service is away"
        elif token is None or checkpoint not in storage.manifests:
            reason = "it was deleted"
        else:
            count = storage.part_counts[checkpoint]
            self.storage.put_part(checkpoint, rank, count, token)
        if life != host.life or host.mirror_job != (effect.id, effect.round):
            return
        if reason:
            self._parts_failed(host, effect, reason, newer)
        else:
            host.submit(fa.MirrorPartWritten(checkpoint, effect.round, rank, 1))

    def _parts_failed(
        self, host: Host, effect: ef.MirrorParts, reason: str, newer: AttemptId
    ) -> None:
        self.world.oracle.count("remote writes failed")
        host.submit(fa.MirrorPartsFailed(effect.id, effect.round, reason, newer))

    def commit(self, host: Host, effect: ef.MirrorCommit) -> None:
        self.world.oracle.copy_commit_wanted(host, effect)
        self.world.at(self.secs(), self._commit, host, host.life, effect)

    def _commit(self, host: Host, life: int, effect: ef.MirrorCommit) -> None:
        if self.is_silent:
            self.world.at(POLL_SECS, self._commit, host, life, effect)
            return
        checkpoint, newer = effect.id, self.storage.forbids(effect.id)
        parts = self.storage.parts.get(checkpoint, {})
        reason = "no answer" if self.does_fail() else ""
        if newer:
            reason = f"attempt {newer} has taken the run over"
        elif not reason and len(parts) != effect.part_count:
            reason = "parts are missing"
        elif not reason:
            self.storage.manifests.setdefault(checkpoint, effect.part_count)
            self.world.oracle.copied(checkpoint)
            if self.rng.random() < self.failures / 2:
                reason = "no answer"
        if life != host.life:
            return
        host.busy.discard("copy commit")
        item: fa.Input = fa.MirrorCommitWritten(checkpoint)
        if reason:
            item = fa.MirrorCommitFailed(checkpoint, reason, newer or NO_ATTEMPT)
        host.submit(item)

    def copy_ended(self, host: Host, effect: ef.MirrorEnded) -> None:
        self.ended[effect.id] = effect.reason
        self.world.oracle.copy_ended(effect)
        if effect.reason:
            self.world.at(self.secs(), self._look_whether_there, host, host.life, effect.id)

    def _look_whether_there(self, host: Host, life: int, checkpoint: CheckpointId) -> None:
        if life == host.life and checkpoint not in self.world.storage.manifests:
            host.submit(fa.MirrorUnwanted(checkpoint))

    def remove(self, checkpoint: CheckpointId) -> None:
        self.storage.remove(checkpoint)
