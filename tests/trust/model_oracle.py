"""Model a run as a plain dict, by the rules of the docs: the oracle of the model test.

It asks nothing of Holdfast. Its rules, and their sources:

- The timeline is followed as docs/format.md describes it ("The timeline").
- A checkpoint exists if it is committed, or if each rank's part is in RAM or durable (format.md).
- RAM of a complete checkpoint is freed only once a newer one of the present attempt is complete,
  and a checkpoint that has to become durable keeps its RAM until then (protocol.md, "Invariants",
  3).
- Parts are combined by step and attempt: an older step that a rank never sealed is dropped when the
  rank continues or has ended, and incomplete checkpoints of an older attempt when that attempt is
  over (protocol.md, "Missed").
- Without trainers the newest complete checkpoint becomes durable, against any policy (protocol.md,
  "Durable"); a new agent adopts the contents of RAM (architecture.md, "Failures").
- Checkpoints off the timeline are never committed; those that were due are dropped (protocol.md).
- On a commit the preservation policy is asked: on the timeline it decides and the newest stays;
  beside it each abandoned step stays as the policy decides on these alone, until the timeline has
  come as far (DESIGN.md, "Attempts never mix"; the module docstring of engine/retain).

Where the docs leave a choice:

- RAM that may be freed is freed at some time from then on, and at the latest once the agent has
  settled.
- A new agent without trainers so far has no policy, and removes nothing that is whole.
- A new agent makes everything durable that it finds whole in RAM, also what was meant for RAM
  alone.
- The parts of a due checkpoint may be there without a manifest. A commit clears them if they are
  older; an opening without trainers finishes them, if no newer one is committed
  (decisions/0031). What the agent began to make durable without
  trainers it may finish, or leave, once there are some.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """One checkpoint.

    `parts` are in RAM; `told` are those of them that the agent knows of. `wanted`: it had to become
    durable at some time; `written`: its parts are. `passed`: a rank has continued without its part.
    `loose`: its RAM might be freed when the present attempt began, and may have been freed just
    then.
    """

    count: int
    secs: float
    parts: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    due: bool = False
    wanted: bool = False
    written: bool = False
    committed: bool = False
    passed: bool = False
    loose: bool = False

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
        """The attempt of the living trainers."""
        self.led: int | None = None
        """The attempt of which the agent has known all ranks."""
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
        """Return whether it is on the present timeline."""
        return one.step <= self.limits().get(one.attempt, -1)

    def offered(self) -> list[Id]:
        """What a restore may choose from: the present timeline, ascending."""
        last = max((one.step for one in self.committed() if self.counts(one)), default=-1)
        by_step: dict[int, Id] = {}
        for one, kept in self.kept.items():
            # Parts on the disk below a newer commit may be what a delete has left.
            is_written = kept.written and one.step > last
            if self.counts(one) and (kept.committed or kept.whole or is_written):
                by_step[one.step] = max(one, by_step.get(one.step, one))
        return [by_step[step] for step in sorted(by_step)]

    def written(self) -> set[Id]:
        """What can be restored from its parts in the durable tier alone, without a manifest."""
        return {
            one for one in self.offered() if self.kept[one].written and not self.kept[one].parts
        }

    def is_begun(self, step: int) -> bool:
        """Return whether any part of that step is in any tier, on the timeline."""
        return any(one.step == step and self.counts(one) for one in self.kept)

    def committed(self) -> set[Id]:
        return {one for one, kept in self.kept.items() if kept.committed}

    def in_ram(self) -> dict[Id, set[int]]:
        return {one: set(kept.parts) for one, kept in self.kept.items() if kept.parts}

    def pending_count(self) -> int:
        """How many wait for the durable tier."""
        return sum(kept.pending for kept in self.kept.values())

    # What trainers do.

    def begin(self, origin: Id | None, policy: Policy | None = None) -> int:
        """A new attempt, of a new group where it brings a policy."""
        for one in self.going():
            self.kept[one].loose = True
        number = max(self.attempts, default=0) + 1
        self.attempts[number] = origin
        self.group = self.led = number
        if policy is not None:
            self.policy = policy
        return number

    def seal(self, one: Id, rank: int, count: int, secs: float) -> None:
        kept = self.kept.setdefault(one, Kept(count, secs))
        if rank == 0:
            kept.secs = secs
        kept.parts.add(rank)
        self.ever.add(one.step)

    def tell(self, one: Id, rank: int, due: bool) -> None:
        kept = self.kept[one]
        kept.told.add(rank)
        kept.due |= due
        kept.wanted |= due
        for other, half in self.kept.items():
            if other.attempt == one.attempt and other.step < one.step:
                half.passed |= rank not in half.told

    def delete(self, one: Id) -> None:
        del self.kept[one]

    # What the agent does.

    def settle(self, on_disk: Iterable[Id]) -> None:
        """The agent acts until it has nothing to do; these are committed then."""
        for one in self._finished(on_disk):
            self._commit(one)
        while waiting := self._waiting():
            self._commit(waiting[0])
        for one in self.going():
            self._drop_ram(one)

    def act_once(self, on_disk: Iterable[Id]) -> None:
        """The agent commits what is next, and dies before it learns that it has."""
        for one in self._finished(on_disk) or self._waiting()[:1]:
            self.kept[one].committed = True

    def _commit(self, one: Id) -> None:
        self.kept[one].committed = True
        self._preserve()

    def _finished(self, on_disk: Iterable[Id]) -> list[Id]:
        """What the agent began to make durable without trainers, and has since committed."""
        return [
            one
            for one in sorted(set(on_disk) & set(self.kept) - self.committed())
            if self.kept[one].wanted and not self.kept[one].due
            if (self.kept[one].whole or self.kept[one].written) and self.counts(one)
        ]

    def going(self) -> list[Id]:
        """Return what the agent may free in RAM from now on, and has freed once it has settled."""
        return [one for one, kept in self.kept.items() if kept.told and self._may_go(one, kept)]

    def learn_written(self, on_disk: Iterable[Id]) -> None:
        """Learn from the disk's contents which of the wanted checkpoints have their parts there."""
        last = max((one.step for one in self.committed()), default=-1)
        for one, kept in list(self.kept.items()):
            if kept.wanted and one in on_disk:
                kept.written = True
            elif kept.written and one.step < last and one not in on_disk:
                kept.written = False
                self._forget(one)

    def learn_gone(self, in_ram: Iterable[Id]) -> None:
        """Learn from RAM's contents which of the checkpoints that may go are gone by now."""
        loose = {one for one, kept in self.kept.items() if kept.loose and kept.parts}
        for one in (loose | set(self.going())) - set(in_ram):
            self._drop_ram(one)
        for kept in self.kept.values():
            kept.loose = False

    def _may_go(self, one: Id, kept: Kept) -> bool:
        floor = self._floor()
        is_overtaken = floor is not None and _age(one) < _age(floor)
        if not kept.known_whole:
            return is_overtaken or kept.passed or one.attempt != self.group
        if kept.pending:
            return not self.counts(one)
        return is_overtaken

    def _floor(self) -> Id | None:
        """The newest complete one of the attempt that the agent leads."""
        found = [c for c, k in self.kept.items() if k.known_whole and c.attempt == self.led]
        return max(found, key=_age, default=None)

    def _waiting(self) -> list[Id]:
        """What is to become durable, the next one first."""
        whole = [one for one, kept in self.kept.items() if kept.known_whole and self.counts(one)]
        due = {one for one in whole if self.kept[one].due}
        if self.group is None:
            due |= set(sorted(whole, key=_age)[-1:])
        return sorted((one for one in due if not self.kept[one].committed), key=_age)

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
        self.kept[one].parts.clear()
        self.kept[one].told.clear()
        self._forget(one)

    def _forget(self, one: Id) -> None:
        kept = self.kept[one]
        if not (kept.parts or kept.committed or kept.written):
            del self.kept[one]

    # What fails.

    def lose_trainers(self) -> None:
        """End the trainers; parts that they sealed and had not reported count too."""
        for one, kept in self.kept.items():
            if one.attempt == self.group:
                kept.told |= kept.parts
        self.group = None
        for one in self._waiting():
            self.kept[one].wanted = True

    def lose_agent(self) -> None:
        """What it knew is lost."""
        self.policy = None

    def start_agent(self) -> None:
        """Adopt RAM's contents; without trainers, clear and finish what they left."""
        if self.group is None:
            self.led = None
        newest = max((one.step for one in self.committed() if self.counts(one)), default=-1)
        for one, kept in list(self.kept.items()):
            is_left = self.group is None and not (kept.whole and self.counts(one))
            if is_left and one.step >= newest:
                kept.committed |= kept.written and self.counts(one)
                kept.written = False
            if self.group is None and not kept.whole:
                self._drop_ram(one)
                continue
            kept.told = set(kept.parts)
            kept.due = kept.whole
            kept.wanted |= kept.due

    def lose_power(self) -> None:
        """RAM is empty after it."""
        for one in list(self.kept):
            self._drop_ram(one)


def _age(one: Id) -> tuple[int, int]:
    return one.attempt, one.step
