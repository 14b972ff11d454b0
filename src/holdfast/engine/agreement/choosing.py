"""What a new attempt goes on from, and where its parts are: pure functions.

A checkpoint can be restored where it is committed, or where each of its parts stands in some host's
RAM or is durable. The newest such one on the timeline is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.engine.agreement.entry import Entry
from holdfast.engine.agreement.facts import DurableListed
from holdfast.engine.agreement.messages import HostState, PartHolders
from holdfast.engine.agreement.runs import ranks_in
from holdfast.format.names import CheckpointId

PAGE_RANKS = 4096
"""The ranks that one message tells of."""


@dataclass(slots=True)
class _Stand:
    """Where one checkpoint stands."""

    part_count: int
    ranks: set[int] = field(default_factory=set)
    has_other_count: bool = False

    def add(self, part_count: int, ranks: Iterable[int]) -> None:
        self.has_other_count |= part_count != self.part_count
        self.ranks.update(ranks)

    @property
    def is_whole(self) -> bool:
        return len(self.ranks) == self.part_count and not self.has_other_count


def choose_checkpoint(states: Iterable[HostState], durable: DurableListed) -> CheckpointId | None:
    """The newest checkpoint on the timeline that RAM, peers and the durable tier have whole."""
    states = list(states)
    whole = {c for c in durable.committed if _counts(c, durable.limits)}
    whole -= {c for state in states for c in state.deleted}
    whole |= {c for c, stand in _stands(states, durable).items() if stand.is_whole}
    # Where a step stands on the timeline twice, the newest attempt's counts.
    return max(whole, key=lambda c: (c.step, c.attempt), default=None)


def newest_begun(states: Iterable[HostState], durable: DurableListed) -> CheckpointId | None:
    """The newest on the timeline of which anything stands, be it whole or not."""
    return max(_stands(states, durable), key=lambda c: (c.step, c.attempt), default=None)


def holders_of(entry: Entry, first: int) -> tuple[tuple[PartHolders, ...], int | None]:
    """One page of where a checkpoint's parts are, from rank `first` on, and the next page's first.

    Ranks whose parts stand in the same places are told together.
    """
    end = min(first + PAGE_RANKS, entry.part_count)
    parts: list[PartHolders] = []
    for rank in range(first, end):
        hosts = tuple(sorted(entry.holders.get(rank, ())))
        is_durable = rank in entry.durable
        last = parts[-1] if parts else None
        if last is not None and (last.hosts, last.is_durable) == (hosts, is_durable):
            run_first, count = last.ranks[0]
            parts[-1] = PartHolders(((run_first, count + 1),), hosts, is_durable)
        else:
            parts.append(PartHolders(((rank, 1),), hosts, is_durable))
    return tuple(parts), end if end < entry.part_count else None


def sources_in_order(
    part: PartHolders, host: str, domain: str, domains: Mapping[str, str]
) -> list[str]:
    """The hosts to read a part from, the nearest first: this one, its domain, the others.

    Hosts of one distance are turned by this host's name, so that not all read from the same one.
    The durable tier comes after them.
    """
    turn = sum(host.encode())
    ordered = sorted(part.hosts)
    if ordered:
        ordered = ordered[turn % len(ordered) :] + ordered[: turn % len(ordered)]
    return sorted(ordered, key=lambda h: (h != host, domains.get(h) != domain))


def _stands(states: Iterable[HostState], durable: DurableListed) -> dict[CheckpointId, _Stand]:
    states = list(states)
    deleted = {c for state in states for c in state.deleted}
    stands: dict[CheckpointId, _Stand] = {}
    for checkpoint, part_count, ranks in _found(states, durable):
        if _counts(checkpoint, durable.limits) and checkpoint not in deleted:
            stand = stands.setdefault(checkpoint, _Stand(part_count))
            stand.add(part_count, ranks)
    return stands


def _found(
    states: Iterable[HostState], durable: DurableListed
) -> Iterator[tuple[CheckpointId, int, Iterable[int]]]:
    for checkpoint, listed in durable.parts.items():
        yield checkpoint, listed.part_count, listed.ranks
    for state in states:
        for held in state.held:
            yield held.id, held.part_count, (*ranks_in(held.own), *ranks_in(held.replicas))


def _counts(checkpoint: CheckpointId, limits: Mapping[int, int]) -> bool:
    return checkpoint.step <= limits.get(checkpoint.attempt, -1)


def limits_after(
    limits: Mapping[int, int], attempt: int, origin: CheckpointId | None, step_max: int
) -> dict[int, int]:
    """The timeline once `attempt` has begun from `origin`: for each attempt its last step."""
    after = {attempt: step_max}
    if origin is not None:
        after.update({a: step for a, step in limits.items() if a < origin.attempt})
        after[origin.attempt] = origin.step
    return after
