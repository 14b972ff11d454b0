"""Which rank's replica differs from the others, from the events of the ranks that compared.

Every holder of a block compares it with what its owner has saved, and reports a difference alone.
So holders that report nothing have the owner's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.observe.events.schema import ReplicasDiffer
from holdfast.quantities import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDifference:
    """The ranks that disagree on a block of one checkpoint.

    Attributes:
        step: The step.
        array: The array, or its chunk.
        start_bytes: Where the block begins in it.
        stop_bytes: Where it ends.
        groups: The ranks that agree with each other, the largest group first.
        hosts: The host of each rank that reported.
    """

    step: int
    array: str
    start_bytes: int
    stop_bytes: int
    groups: tuple[tuple[int, ...], ...]
    hosts: dict[int, str]

    @property
    def alone(self) -> int | None:
        """The rank that differs from several which agree; None: it cannot be known."""
        smallest = self.groups[-1]
        is_known = len(self.groups) == 2 and len(smallest) == 1 < len(self.groups[0])
        return smallest[0] if is_known else None

    @property
    def text(self) -> str:
        """The difference in words."""
        place = f"{self.array}, bytes [{self.start_bytes}, {self.stop_bytes})"
        if self.alone is not None:
            host = self.hosts.get(self.alone)
            where = f" on host {host}" if host else ""
            others = counted(len(self.groups[0]), "other")
            return f"step {self.step}: {place}: rank {self.alone}{where} differs from {others}"
        groups = " from ".join(
            f"rank {of[0]}" if len(of) == 1 else f"ranks {', '.join(map(str, of))}"
            for of in self.groups
        )
        return f"step {self.step}: {place}: {groups}: which one is right is not known"

    @property
    def document(self) -> dict[str, object]:
        """The difference as JSON has it."""
        return {
            "step": self.step,
            "array": self.array,
            "start_bytes": self.start_bytes,
            "stop_bytes": self.stop_bytes,
            "groups": self.groups,
            "alone": self.alone,
            "hosts": {str(rank): host for rank, host in self.hosts.items()},
        }


def last_difference(events: Sequence[ReplicasDiffer]) -> ReplicaDifference | None:
    """Return the difference that was reported last; None: there was none.

    Args:
        events: The events of all hosts, in any order.
    """
    if not events:
        return None
    # A restart may have saved the step again.
    last = max(events, key=lambda event: (event.attempt, event.step, event.time))
    same = [
        event
        for event in events
        if (event.attempt, event.step, event.owner, event.arrays[:1], event.start_bytes)
        == (last.attempt, last.step, last.owner, last.arrays[:1], last.start_bytes)
    ]
    digest_of = dict.fromkeys(last.holders, last.owner_digest)
    digest_of |= {event.rank: event.digest for event in same}
    groups: dict[str, list[int]] = {}
    for rank, digest in digest_of.items():
        groups.setdefault(digest, []).append(rank)
    by_size = sorted((tuple(sorted(of)) for of in groups.values()), key=lambda of: (-len(of), of))
    return ReplicaDifference(
        step=last.step,
        array=last.arrays[0] if last.arrays else "",
        start_bytes=last.start_bytes,
        stop_bytes=last.stop_bytes,
        groups=tuple(by_size),
        hosts={event.rank: event.host for event in same},
    )
