"""Decide whether a training hangs, from what its agents know of its steps.

Pure: times are given. A gap is the time since the last step of a rank, or since it left a section
in which it may make none. Invariants:

- A rank that a person or a debugger holds is no hang, nor are ranks that wait for it.
- While a rank of the host is within the limit of its section, others may be waiting for it.
- Calls of the manager are bounded by themselves.

See docs/decisions/0057.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.host.wire.protocol import TrainerStatus

AUTO_SECS_MIN, AUTO_FACTOR = 30.0, 5.0
"""With `auto`, the least gap that is a hang, and how much longer than the longest one it is."""
PATIENT_SECS = 1800.0
"""The least limit before the second step of a start (compilation), and of evaluations by `auto`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Ranks of this host that make no step.

    Attributes:
        ranks: All ranks of the host, with their processes.
        secs: The longest gap of those beyond their limit.
        limit_secs: The limit that it has passed.
        steps: The last step of each rank of the host; None: none so far.
        busy: The ranks beyond their limit that are in a section, and which: a key of `BUSY_WORDS`.
    """

    ranks: dict[int, int]
    secs: float
    limit_secs: float
    steps: dict[int, int | None]
    busy: dict[int, str]

    @property
    def step(self) -> int | None:
        """The last step of the rank that is behind; None: it has made none."""
        steps = [step for step in self.steps.values() if step is not None]
        return min(steps) if len(steps) == len(self.steps) else None


@dataclass(slots=True)
class _Rank:
    step: int | None
    busy: str
    since_secs: float
    """When it made its last step, or left or entered a section."""


class HangDetector:
    """Follows the trainers of one host during one start of the command.

    Args:
        fixed_secs: The limit; None: `auto`.
        longest_secs: The longest gap that is known of the run, for `auto`.

    Attributes:
        longest_secs: That, or a longer one since.
    """

    def __init__(self, fixed_secs: float | None, longest_secs: float = 0.0) -> None:
        self.longest_secs = longest_secs
        self._fixed_secs = fixed_secs
        self._ranks: dict[tuple[int, int], _Rank] = {}

    def note(self, now_secs: float, trainers: Sequence[TrainerStatus]) -> Hang | None:
        """Take the present trainers; return their hang, if there is one."""
        ranks: dict[tuple[int, int], _Rank] = {}
        for trainer in trainers:
            key = trainer.rank, trainer.pid
            rank = self._ranks.get(key) or _Rank(trainer.step, trainer.busy, now_secs)
            if trainer.step != rank.step or trainer.busy != rank.busy:
                if not (trainer.busy or rank.busy):
                    self.longest_secs = max(self.longest_secs, now_secs - rank.since_secs)
                rank = _Rank(trainer.step, trainer.busy, now_secs)
            ranks[key] = rank
        self._ranks = ranks
        late = {key: rank for key, rank in ranks.items() if self._is_late(rank, now_secs)}
        if any(rank.busy for key, rank in ranks.items() if key not in late):
            # The others may wait for that one, and have their whole time when it is done.
            for rank in ranks.values():
                if not rank.busy:
                    rank.since_secs = now_secs
            return None
        if not late:
            return None
        return Hang(
            ranks=dict(ranks.keys()),
            secs=max(now_secs - rank.since_secs for rank in late.values()),
            limit_secs=max(self.limit_secs(rank.busy) for rank in late.values()),
            steps={rank: state.step for (rank, _), state in ranks.items()},
            busy={rank: state.busy for (rank, _), state in late.items() if state.busy},
        )

    def is_waiting(self, now_secs: float) -> bool:
        """Return whether a rank has used up more than half of its limit."""
        return any(
            2 * (now_secs - rank.since_secs) > self.limit_secs(rank.busy)
            for rank in self._ranks.values()
        )

    def held_ranks(self, now_secs: float) -> dict[int, int]:
        """Return the ranks that a person or a debugger has held beyond the limit, and processes."""
        return {
            rank: pid
            for (rank, pid), state in self._ranks.items()
            if state.busy == "held" and now_secs - state.since_secs >= self.limit_secs("")
        }

    def slow_starts(self, now_secs: float) -> dict[int, float]:
        """Return the ranks that make no first step for as long as would else be a hang: seconds."""
        return {
            rank: now_secs - state.since_secs
            for (rank, _), state in self._ranks.items()
            if state.busy == "starting" and now_secs - state.since_secs >= self.limit_secs("")
        }

    def postpone(self, now_secs: float) -> None:
        """Begin all gaps anew: the training waits for what is no hang."""
        for rank in self._ranks.values():
            rank.since_secs = now_secs

    def limit_secs(self, busy: str) -> float:
        """Return the limit of a gap in a section; empty: between steps."""
        if busy in ("call", "held"):
            return math.inf
        if busy == "starting" or (busy and self._fixed_secs is None):
            return max(PATIENT_SECS, self._fixed_secs or 0.0, AUTO_FACTOR * self.longest_secs)
        if self._fixed_secs is not None:
            return self._fixed_secs
        return max(AUTO_SECS_MIN, AUTO_FACTOR * self.longest_secs)

    def _is_late(self, rank: _Rank, now_secs: float) -> bool:
        return now_secs - rank.since_secs >= self.limit_secs(rank.busy)


def ranks_behind(steps: Iterable[tuple[int, int | None]], waiting: Iterable[int]) -> list[int]:
    """Return the ranks for which the others wait; empty: all are alike.

    Args:
        steps: The last step of each rank of the job; None: none so far.
        waiting: The ranks whose stacks show that they wait for others, as far as they are known.
    """
    reached = {rank: -1 if step is None else step for rank, step in steps}
    least = min(reached.values(), default=-1)
    behind = sorted(rank for rank, step in reached.items() if step == least)
    own = [rank for rank in behind if rank not in {*waiting}]
    if own and len(own) < len(behind):
        return own
    return behind if len(behind) < len(reached) else []
