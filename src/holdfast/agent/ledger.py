"""The ledger: the checkpoints in the agent's care, and what may be done with each.

Pure bookkeeping, no I/O. Invariants:
- The newest complete checkpoint's RAM is never given up before a newer one is complete.
- A checkpoint that is to be durable keeps its RAM until it is committed or has failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from holdfast.format.names import CheckpointId


@dataclass(slots=True)
class Entry:
    """One checkpoint; `ram` and `durable` are the ranks whose part stands there."""

    id: CheckpointId
    part_count: int
    time: datetime
    ram: set[int] = field(default_factory=set)
    durable: set[int] = field(default_factory=set)
    is_durable_due: bool = False
    is_committed: bool = False
    failure: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every rank's part stands in some tier."""
        return len(self.ram | self.durable) == self.part_count

    @property
    def is_complete_in_ram(self) -> bool:
        """Whether every rank's part stands in RAM."""
        return len(self.ram) == self.part_count

    @property
    def is_pending(self) -> bool:
        """Whether it still has to become durable."""
        return self.is_durable_due and not self.is_committed and self.failure is None

    @property
    def age(self) -> tuple[int, int]:
        """An order of when checkpoints were taken: by attempt, then step."""
        return self.id.attempt, self.id.step


class Ledger:
    """All entries, by id."""

    def __init__(self) -> None:
        self.entries: dict[CheckpointId, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(sorted(self.entries.values(), key=lambda entry: entry.age))

    def entry(self, checkpoint: CheckpointId, part_count: int, time: datetime) -> Entry:
        """The entry of `checkpoint`, made where there is none."""
        return self.entries.setdefault(checkpoint, Entry(checkpoint, part_count, time))

    def newest_complete(self) -> Entry | None:
        """The newest checkpoint that every rank has sealed."""
        return max(
            (e for e in self.entries.values() if e.is_complete), key=lambda e: e.age, default=None
        )

    def next_to_persist(self) -> Entry | None:
        """The oldest complete checkpoint that has to become durable and is not."""
        return next((e for e in self if e.is_pending and e.is_complete), None)

    def want_newest_durable(self) -> None:
        """Makes the newest complete checkpoint due, also where it failed before."""
        newest = self.newest_complete()
        if newest is not None and not newest.is_committed:
            newest.is_durable_due, newest.failure = True, None

    def is_saving(self) -> bool:
        """Whether a checkpoint is on its way to the durable tier."""
        return any(e.is_pending for e in self.entries.values())

    def recyclable(self, preserved: set[CheckpointId]) -> list[Entry]:
        """Entries whose RAM may be given up, oldest first; `preserved` is kept besides.

        A step above the newest one's is of a branch that was left: no policy keeps its RAM.
        """
        newest = self.newest_complete()
        if newest is None:
            return []
        return [
            e
            for e in self
            if e.ram
            and e.age < newest.age
            and not e.is_pending
            and (e.id not in preserved or e.id.step > newest.id.step)
        ]

    def missed(self, rank: int, step: int, attempt: int) -> list[Entry]:
        """Entries that can never be complete, now that `rank` has saved `step` of `attempt`.

        Nobody goes on with what an older attempt left incomplete, whoever came to it.
        """
        return [
            e
            for e in self
            if not e.is_complete
            and (
                e.id.attempt < attempt
                or (e.id.attempt == attempt and e.id.step < step and rank not in e.ram | e.durable)
            )
        ]
