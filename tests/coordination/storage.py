"""The durable tier of the simulator: attempts, parts and manifests, each put if absent."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from holdfast.coordination.inputs import DurableListed, Listed
from holdfast.coordination.lease_seen import LeaseSeen
from holdfast.coordination.settings import LEASE_SECS
from holdfast.format.names import NO_ATTEMPT, AttemptId, CheckpointId
from holdfast.format.records import AttemptRecord
from holdfast.format.timeline import last_steps

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
STORING = " storing"
"""The end of what a lease has while its attempt, which has ended, is being stored."""


@dataclass
class Storage:
    """The durable objects; `attempts` and `leases` by number.

    `manifests` has the number of parts of each commit.
    """

    attempts: dict[int, AttemptRecord] = field(default_factory=dict)
    parts: dict[CheckpointId, dict[int, tuple[CheckpointId, int]]] = field(default_factory=dict)
    part_counts: dict[CheckpointId, int] = field(default_factory=dict)
    manifests: dict[CheckpointId, int] = field(default_factory=dict)
    leases: dict[int, tuple[str, str, float]] = field(default_factory=dict)
    """Of each attempt: the host that wrote its lease, what it wrote, and when."""
    lapsed: set[AttemptId] = field(default_factory=set)
    """The attempts whose lease was renewed after it had expired, or was removed."""

    @property
    def newest(self) -> AttemptId:
        number = max(self.attempts, default=0)
        return self.attempts[number].attempt if number else NO_ATTEMPT

    def limits(self) -> dict[AttemptId, int]:
        return last_steps(self.attempts)

    def on_timeline(self, checkpoint: CheckpointId) -> bool:
        return checkpoint.step <= self.limits().get(checkpoint.attempt, -1)

    def begin(self, attempt: AttemptId, host: str, origin: CheckpointId | None) -> bool:
        if attempt.number in self.attempts:
            return False
        self.attempts[attempt.number] = AttemptRecord(
            run_id="run",
            attempt=attempt,
            origin=origin,
            host=host,
            pid=1,
            time=EPOCH,
        )
        return True

    def lease(self, attempt: AttemptId, now: float) -> LeaseSeen | None:
        """Return the attempt's lease, with its age by this storage's clock."""
        if attempt.number not in self.leases:
            return None
        host, stamp, written_at = self.leases[attempt.number]
        return LeaseSeen(
            host=host,
            pid=1,
            user="u",
            stamp=stamp,
            age_secs=now - written_at,
            is_storing=stamp.endswith(STORING),
        )

    def write_lease(self, attempt: AttemptId, host: str, stamp: str, now: float) -> None:
        if self.is_over(now).get(attempt):
            self.lapsed.add(attempt)
        self.leases[attempt.number] = host, stamp, now

    def is_over(self, now: float) -> dict[AttemptId, bool]:
        """Return for each attempt whether it has no valid lease."""
        seen = {r.attempt: self.lease(r.attempt, now) for r in self.attempts.values()}
        return {a: s is None or s.age_secs >= LEASE_SECS for a, s in seen.items()}

    def put_part(
        self, checkpoint: CheckpointId, rank: int, count: int, token: tuple[CheckpointId, int]
    ) -> None:
        self.parts.setdefault(checkpoint, {})[rank] = token
        self.part_counts[checkpoint] = count

    def remove(self, checkpoint: CheckpointId) -> None:
        self.manifests.pop(checkpoint, None)
        self.parts.pop(checkpoint, None)

    def put_back(self, number: int) -> None:
        """Lose all attempts after that number, as if an old copy were put in the run's place."""
        for records in (self.attempts, self.leases):
            for lost in [lost for lost in records if lost > number]:
                del records[lost]
        for checkpoint in {*self.manifests, *self.parts}:
            if checkpoint.attempt.number > number:
                self.remove(checkpoint)

    def is_whole(self, checkpoint: CheckpointId) -> bool:
        return len(self.parts.get(checkpoint, ())) == self.part_counts[checkpoint]

    def forbids(self, checkpoint: CheckpointId) -> AttemptId:
        """Return the attempt that fences `checkpoint`, as `check_not_fenced` does."""
        if self.newest.number == checkpoint.attempt.number or self.on_timeline(checkpoint):
            return NO_ATTEMPT
        return self.newest

    def listing(self, since_step: int) -> DurableListed:
        """List what the newest committed checkpoint and later ones have, and from `since_step`."""
        record = self.attempts.get(self.newest.number)
        steps = [one.step for one in self.manifests if self.on_timeline(one)]
        since_step = min(since_step, max(steps, default=0))
        return DurableListed(
            newest_attempt=self.newest,
            leader=record.host if record is not None else "",
            limits=self.limits(),
            committed=frozenset(one for one in self.manifests if one.step >= since_step),
            parts={
                c: Listed(part_count=self.part_counts[c], ranks=frozenset(parts))
                for c, parts in self.parts.items()
                if c.step >= since_step
            },
        )
