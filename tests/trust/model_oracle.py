"""The oracle of the model: what a run should hold, as a plain dict, by the words of the docs.

It asks nothing of Holdfast. Its rules, and where they stand:

- The timeline is followed as docs/format.md says ("The timeline").
- A checkpoint exists where it is committed, or where each rank's part stands in RAM (format.md).
- The last part that is told completes a checkpoint, and the RAM of older ones is recycled, but of
  those that are still to become durable (architecture.md, "A save").
- Parts are put together by step and attempt: an older step that a rank never sealed, and what an
  older attempt left half, is dropped when the rank goes on (architecture.md, "When").
- Without trainers what is sealed and complete becomes durable, and the rest is dropped; a new agent
  adopts what stands in RAM (architecture.md, "Failures").
- What is off the timeline is never committed, and its RAM is given up ("Who may write").
- On a commit the preservation policy is asked: on the timeline it decides and the newest stays;
  beside it each abandoned step stays as the policy says of these alone, until the timeline has
  come as far (DESIGN.md, "Attempts never mix"; engine/retain's first words).

Where the docs leave a choice:

- A new agent to which no trainer came yet has no policy, and removes nothing.
- A new agent makes durable all that it finds whole in RAM, also what was meant for RAM alone.
- What trainers sealed and never told, who came and went between two looks of the agent, or were
  overtaken, stands in RAM until the next ones have gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Id(NamedTuple):
    """A checkpoint, named without Holdfast's own class."""

    step: int
    attempt: int


Policy = tuple
"""("latest", n), ("steps", n), ("seconds", n) or ("any", policy, policy, …)."""


@dataclass
class Kept:
    """One checkpoint. `parts` stand in RAM; `told` are those of them that the agent knows of."""

    count: int
    secs: float
    parts: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    due: bool = False
    committed: bool = False

    @property
    def whole(self) -> bool:
        return len(self.parts) == self.count

    @property
    def known_whole(self) -> bool:
        return len(self.told) == self.count

    @property
    def pending(self) -> bool:
        return self.due and not self.committed and bool(self.told)


def stays(policy: Policy, found: list[tuple[int, float]]) -> set[int]:
    """The steps of `found`, ascending (step, seconds), that a policy keeps; the last one always."""
    steps = [step for step, _ in found]
    kind, *arguments = policy
    if kind == "latest":
        kept = set(steps[-arguments[0] :])
    elif kind == "steps":
        kept = {step for step in steps if step % arguments[0] == 0}
    elif kind == "seconds":
        kept, last = set(), None
        for step, secs in found:
            if last is None or abs(secs - last) >= arguments[0]:
                kept.add(step)
                last = secs
    else:
        kept = set().union(*(stays(one, found) for one in arguments)) if found else set()
    return kept | set(steps[-1:])


class Oracle:
    """The run and its host."""

    def __init__(self) -> None:
        self.attempts: dict[int, Id | None] = {}
        self.kept: dict[Id, Kept] = {}
        self.policy: Policy | None = None
        self.group: int | None = None
        """The attempt of the living trainers that the agent knows of."""
        self.groups = 0
        self.seen: tuple[int, int | None] | None = None
        """The group, by its number, that the agent saw when it last acted."""
        self.ever: set[int] = set()
        """Every step that was ever begun."""

    # What can be restored.

    def limits(self) -> dict[int, float]:
        """For each attempt on the way back from the newest, the last step that counts."""
        found: dict[int, float] = {}
        number, limit = max(self.attempts, default=0), float("inf")
        while number in self.attempts:
            found[number] = limit
            origin = self.attempts[number]
            if origin is None or origin.attempt >= number:
                break
            limit, number = origin.step, origin.attempt
        return found

    def counts(self, one: Id) -> bool:
        """Whether it stands on the present timeline."""
        return one.step <= self.limits().get(one.attempt, -1)

    def offered(self) -> list[Id]:
        """What a restore may choose from: the present timeline, ascending."""
        by_step: dict[int, Id] = {}
        for one, kept in self.kept.items():
            if self.counts(one) and (kept.committed or kept.whole):
                by_step[one.step] = max(one, by_step.get(one.step, one))
        return [by_step[step] for step in sorted(by_step)]

    def is_begun(self, step: int) -> bool:
        """Whether something of that step stands somewhere, on the timeline."""
        return any(one.step == step and self.counts(one) for one in self.kept)

    def committed(self) -> set[Id]:
        return {one for one, kept in self.kept.items() if kept.committed}

    def in_ram(self) -> dict[Id, set[int]]:
        return {one: set(kept.parts) for one, kept in self.kept.items() if kept.parts}

    # What trainers do.

    def begin(self, origin: Id | None, policy: Policy | None = None) -> int:
        """A new attempt, of a new group where it brings a policy."""
        number = max(self.attempts, default=0) + 1
        self.attempts[number] = origin
        self.group = number
        if policy is not None:
            self.policy = policy
            self.groups += 1
        return number

    def seal(self, one: Id, rank: int, count: int, secs: float) -> None:
        kept = self.kept.setdefault(one, Kept(count, secs))
        if rank == 0:
            kept.secs = secs
        kept.parts.add(rank)
        self.ever.add(one.step)

    def tell(self, one: Id, rank: int, due: bool) -> None:
        kept = self.kept[one]
        was_whole = kept.known_whole
        kept.told.add(rank)
        kept.due |= due
        if kept.known_whole and not was_whole:
            self._recycle()
        for other, half in list(self.kept.items()):
            is_older = other.attempt < one.attempt or (
                other.attempt == one.attempt and other.step < one.step and rank not in half.told
            )
            if half.told and not half.known_whole and not half.committed and is_older:
                self._drop_ram(other)

    def delete(self, one: Id) -> None:
        del self.kept[one]

    # What the agent does.

    def settle(self) -> None:
        """The agent acts until it has nothing to do."""
        self._see_who_is_there()
        while (one := self._next()) is not None:
            if self.counts(one):
                self.kept[one].committed = True
                self._preserve()
            else:
                self._drop_ram(one)
            self._recycle()

    def act_once(self) -> None:
        """The agent commits what is next, and dies before it learns that it has."""
        self._see_who_is_there()
        one = self._next()
        if one is not None and self.counts(one):
            self.kept[one].committed = True

    def _next(self) -> Id | None:
        waiting = [one for one, kept in self.kept.items() if kept.pending and kept.known_whole]
        return min(waiting, key=_age, default=None)

    def _see_who_is_there(self) -> None:
        present = (self.groups, self.group) if self.group is not None else None
        if present != self.seen:
            self.seen = present
            self._take_stock()
        whole = [one for one, kept in self.kept.items() if kept.known_whole]
        if self.group is None and whole:
            self.kept[max(whole, key=_age)].due = True

    def _take_stock(self) -> None:
        for one, kept in list(self.kept.items()):
            if kept.told and one.attempt != self.group:
                # What was sealed and not told before its trainer ended counts too.
                kept.told |= set(kept.parts)
                if not kept.known_whole:
                    self._drop_ram(one)
        for one, kept in list(self.kept.items()):
            if self.group is None and kept.parts and not kept.told:
                self._adopt(one)

    def _adopt(self, one: Id) -> None:
        kept = self.kept[one]
        if not kept.whole and self.group is None:
            self._drop_ram(one)
            return
        kept.told = set(kept.parts)
        kept.due = kept.whole

    def _recycle(self) -> None:
        whole = [one for one, kept in self.kept.items() if kept.known_whole]
        for one, kept in list(self.kept.items()):
            is_older = bool(whole) and _age(one) < _age(max(whole, key=_age))
            if kept.told and is_older and not kept.pending:
                self._drop_ram(one)

    def _preserve(self) -> None:
        if self.policy is None:
            return
        present: dict[int, Id] = {}
        for one in sorted(self.committed()):
            if self.counts(one):
                present[one.step] = one
        if not present:
            return
        on_timeline = set(present.values())
        beside: dict[int, Id] = {}
        for one in sorted(self.committed() - on_timeline):
            if one.step > max(present):
                beside[one.step] = one
        good = set()
        for branch in (present, beside):
            found = [(step, self.kept[branch[step]].secs) for step in sorted(branch)]
            good |= {branch[step] for step in stays(self.policy, found)}
        for one in self.committed() - good:
            del self.kept[one]

    def _drop_ram(self, one: Id) -> None:
        kept = self.kept[one]
        kept.parts.clear()
        kept.told.clear()
        if not kept.committed:
            del self.kept[one]

    # What fails.

    def lose_trainers(self) -> None:
        self.group = None

    def lose_agent(self) -> None:
        """What it knew is lost."""
        self.policy = None

    def start_agent(self) -> None:
        """It adopts what stands in RAM."""
        self.seen = None
        for one, kept in list(self.kept.items()):
            kept.told.clear()
            kept.due = False
            if kept.parts:
                self._adopt(one)

    def lose_power(self) -> None:
        """RAM is empty after it."""
        for one in list(self.kept):
            self._drop_ram(one)


def _age(one: Id) -> tuple[int, int]:
    return one.attempt, one.step
