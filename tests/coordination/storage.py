"""The durable tier of the simulator: attempts, parts and manifests, each put if absent."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from holdfast.coordination.inputs import DurableListed, LeaseSeen, Listed
from holdfast.coordination.settings import LEASE_SECS
from holdfast.format.names import CheckpointId
from holdfast.format.records import AttemptRecord
from holdfast.format.timeline import last_steps

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Storage:
    """The durable objects. `manifests` has the number of parts of each commit."""

    attempts: dict[int, AttemptRecord] = field(default_factory=dict)
    parts: dict[CheckpointId, dict[int, tuple[int, int, int]]] = field(default_factory=dict)
    part_counts: dict[CheckpointId, int] = field(default_factory=dict)
    manifests: dict[CheckpointId, int] = field(default_factory=dict)
    leases: dict[int, tuple[str, str, float]] = field(default_factory=dict)
    """Of each attempt: the host that wrote its lease, what it wrote, and when."""
    lapsed: set[int] = field(default_factory=set)
    """The attempts whose lease was renewed after it had expired, or was removed."""

    @property
    def newest(self) -> int:
        return max(self.attempts, default=0)

    def limits(self) -> dict[int, int]:
        return last_steps(self.attempts)

    def on_timeline(self, checkpoint: CheckpointId) -> bool:
        return checkpoint.step <= self.limits().get(checkpoint.attempt, -1)

    def begin(self, attempt: int, host: str, origin: CheckpointId | None) -> bool:
        if attempt in self.attempts:
            return False
        self.attempts[attempt] = AttemptRecord(
            run_id="run",
            attempt=attempt,
            origin=(origin.step, origin.attempt) if origin else None,
            host=host,
            pid=1,
            time=EPOCH,
        )
        return True

    def lease(self, attempt: int, now: float) -> LeaseSeen | None:
        """Return the attempt's lease, with its age by this storage's clock."""
        if attempt not in self.leases:
            return None
        host, stamp, written_at = self.leases[attempt]
        return LeaseSeen(host=host, pid=1, user="u", stamp=stamp, age_secs=now - written_at)

    def write_lease(self, attempt: int, host: str, stamp: str, now: float) -> None:
        if self.is_over(now).get(attempt):
            self.lapsed.add(attempt)
        self.leases[attempt] = host, stamp, now

    def is_over(self, now: float) -> dict[int, bool]:
        """Return for each attempt whether it has no valid lease."""
        seen = {number: self.lease(number, now) for number in self.attempts}
        return {n: s is None or s.age_secs >= LEASE_SECS for n, s in seen.items()}

    def put_part(self, checkpoint: CheckpointId, rank: int, count: int, token: tuple) -> None:
        self.parts.setdefault(checkpoint, {})[rank] = token
        self.part_counts[checkpoint] = count

    def remove(self, checkpoint: CheckpointId) -> None:
        self.manifests.pop(checkpoint, None)
        self.parts.pop(checkpoint, None)

    def is_whole(self, checkpoint: CheckpointId) -> bool:
        return len(self.parts.get(checkpoint, ())) == self.part_counts[checkpoint]

    def forbids(self, checkpoint: CheckpointId) -> int:
        """Return the attempt that fences `checkpoint`, as `check_not_fenced` does; else 0."""
        if self.newest == checkpoint.attempt or self.on_timeline(checkpoint):
            return 0
        return self.newest

    def listing(self, since_step: int) -> DurableListed:
        """List what the newest committed checkpoint and later ones have, and from `since_step`."""
        record = self.attempts.get(self.newest)
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
