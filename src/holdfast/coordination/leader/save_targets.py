"""The leader's targets: for each kind, one step that all ranks will save.

A target is proposed above all known published steps. Each host accepts it only if none of its ranks
has reached it. Once all hosts have accepted, it is agreed: every rank will save that step. If one
host refuses, a later step is proposed. Ranks may already have saved a target that was refused;
their parts are dropped. Parts of two steps are never combined, because parts are combined by step.

A rank that must stop at a target waits there until it is agreed, or another one is proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from holdfast.coordination.messages import NO_STEP, TargetKind, TargetProposal, TargetState
from holdfast.coordination.settings import MARGIN_MAX

FIRST_MARGIN = 1
EASE_AFTER = 16
"""How many targets in a row must need less than half of a small margin before it is lowered."""


@dataclass(slots=True)
class _Slot:
    """The target of one kind.

    Attributes:
        is_wanted: a target has been wished for and not been agreed yet.
        step: the proposed or agreed step; None if none is under way.
        basis: the highest step that was published when `step` was proposed.
        highest: the highest step that a host reported since.
        last_step: the last step that was proposed; later proposals are above it.
        accepted, served: the hosts that have accepted the target, and whose ranks have reached it.
    """

    is_wanted: bool = False
    step: int | None = None
    basis: int = NO_STEP
    is_agreed: bool = False
    highest: int = NO_STEP
    last_step: int = NO_STEP
    accepted: set[str] = field(default_factory=set)
    served: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The hosts that have ranks, and the highest known step that was published there."""

    hosts: frozenset[str]
    highest: int


class TargetAgreement:
    """Proposes targets, counts the hosts' answers, and proposes again after a refusal."""

    def __init__(self) -> None:
        self._slots = {kind: _Slot() for kind in TargetKind}
        self._margin = FIRST_MARGIN
        self._met_count = 0
        self.is_changed = False

    def targets(self) -> tuple[TargetProposal, ...]:
        """Return the targets that the hosts have to write to their cells."""
        return tuple(
            TargetProposal(kind, slot.step, slot.is_agreed)
            for kind, slot in self._slots.items()
            if slot.step is not None
        )

    def agreed(self, kind: TargetKind) -> int | None:
        """Return the target of `kind` that every host has accepted; None if there is none."""
        slot = self._slots[kind]
        return slot.step if slot.is_agreed else None

    def is_under_way(self, kind: TargetKind) -> bool:
        """Return whether a target of `kind` is under way: not reached by all ranks yet."""
        return self._slots[kind].step is not None

    def wish(self, kind: TargetKind) -> None:
        """Request a target of `kind`, unless one is under way."""
        slot = self._slots[kind]
        if slot.step is None:
            slot.is_wanted = True

    def withdraw(self) -> None:
        """Withdraw the targets that are not agreed: some ranks are missing, so none can be met."""
        for slot in self._slots.values():
            if slot.step is not None and not slot.is_agreed:
                slot.step = None
                self.is_changed = True

    def recover(self, states: Iterable[tuple[str, TargetState]]) -> None:
        """Adopt the targets of a previous leader from the states that all hosts report."""
        reports = list(states)
        for kind, slot in self._slots.items():
            steps = [state.step for _, state in reports if state.kind is kind]
            confirmed = [s.step for _, s in reports if s.kind is kind and s.is_confirmed]
            if not steps:
                continue
            # Ranks may have stopped at a confirmed target. Of the others, the highest is the last
            # proposal, since steps only ascend.
            slot.step = confirmed[0] if confirmed else max(steps)
            slot.last_step = max(steps)
            slot.is_agreed = bool(confirmed)
            slot.basis = slot.step - 1
            self.is_changed = True

    def accept_states(
        self, host: str, states: Iterable[TargetState], count_ranks: Callable[[], Ranks]
    ) -> None:
        """Apply what a host reports of the targets; `count_ranks` is costly."""
        for state in states:
            slot = self._slots[state.kind]
            if state.step != slot.step:
                continue
            slot.highest = max(slot.highest, state.highest)
            if state.is_accepted is False and not slot.is_agreed:
                # The ranks were this much faster than the margin allowed.
                shortfall = max(0, state.highest - state.step + 1)
                self._margin = min(MARGIN_MAX, 2 * self._margin + shortfall)
                ranks = count_ranks()
                self._propose(state.kind, Ranks(ranks.hosts, max(ranks.highest, state.highest)))
                continue
            hosts = count_ranks().hosts
            if state.is_accepted:
                slot.accepted.add(host)
            if state.is_served:
                slot.served.add(host)
            if not slot.is_agreed and _has_all(slot.accepted, hosts):
                self._agree(slot)
            is_over = slot.is_agreed and _has_all(slot.served, hosts)
            # A preemption target stays set: ranks that stopped at it are waiting there, and a
            # restarted leader has to find it.
            if is_over and state.kind is not TargetKind.PREEMPTION:
                slot.step, slot.is_agreed = None, False
                self.is_changed = True

    def propose(self, count_ranks: Callable[[], Ranks]) -> None:
        """Propose the targets that are wanted; all ranks of the attempt live."""
        for kind, slot in self._slots.items():
            if not slot.is_wanted or slot.step is not None:
                continue
            if kind is TargetKind.RAM and self.is_under_way(TargetKind.DURABLE):
                continue
            self._propose(kind, count_ranks())

    def _propose(self, kind: TargetKind, ranks: Ranks) -> None:
        slot = self._slots[kind]
        # On a single host the published steps are read right before the proposal, so it needs no
        # margin, unless its agent is held up.
        margin = self._margin if len(ranks.hosts) > 1 else max(0, self._margin - FIRST_MARGIN)
        step = max(ranks.highest + 1 + margin, slot.last_step + 1)
        for other in self._slots.values():
            # Use the later step of another kind, so that one checkpoint serves both.
            if other is not slot and other.step is not None and other.step > step:
                step = other.step
        slot.step = slot.last_step = step
        slot.basis, slot.highest, slot.is_agreed = ranks.highest, NO_STEP, False
        slot.accepted.clear()
        slot.served.clear()
        self.is_changed = True

    def _agree(self, slot: _Slot) -> None:
        # A checkpoint in the durable tier is in RAM first, so it serves a wish for RAM as well.
        slot.is_agreed, slot.is_wanted = True, False
        if slot is not self._slots[TargetKind.RAM]:
            self._slots[TargetKind.RAM].is_wanted = False
        self._ease(used=max(0, slot.highest - slot.basis))
        self.is_changed = True

    def _ease(self, used: int) -> None:
        """Lower the margin slowly: too low a margin costs refused targets and useless saves."""
        if 2 * used >= self._margin:
            self._met_count = 0
            return
        self._met_count += 1
        if self._margin >= 8:
            self._margin -= self._margin // 8
        elif self._met_count >= EASE_AFTER:
            self._margin -= 1
            self._met_count = 0


def _has_all(found: set[str], hosts: frozenset[str]) -> bool:
    return len(found) >= len(hosts) and found >= hosts
