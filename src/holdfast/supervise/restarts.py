"""Decide after each end whether the command is started again, and after how long.

Pure: a state machine over the ends of one `holdfast run`. Invariants:

- A command that has opened no run is restarted after every failure until its budget is used up.
- Each reason to stop before that is told.
- A start that is refused because another one has the run uses up no restart for ten minutes.
- A wait grows only while no checkpoint is made: the first restart after one waits for nothing.

See docs/decisions/0057.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.quantities import counted
from holdfast.supervise.ends import End, EndCause

BACKOFF_SECS, BACKOFF_SECS_MAX = 0.5, 10.0
HOST_FAILURES, HOST_SECS = 3, 3600.0
"""A host with so many failures within that time is named."""
BUSY_SECS = 600.0
"""How long restarts while another start has the run are not counted."""
STUCK_COUNT = 2
"""After so many ends in a row without a new checkpoint it is not restarted."""

BUDGETED = (
    EndCause.PREEMPTED,
    EndCause.LOST,
    EndCause.KILLED,
    EndCause.MEMORY,
    EndCause.NAN,
    EndCause.DISK,
    EndCause.HANG,
    EndCause.ERROR,
)
OF_HOST = (EndCause.LOST, EndCause.KILLED, EndCause.DISK, EndCause.HANG)
"""Ends that may be the fault of a host."""
OF_OTHERS = (EndCause.PREEMPTED, EndCause.LOST)
"""Ends that say nothing of what this command would do next."""
ADVICE = {
    EndCause.ERROR: "mend the line, or pass over that step's batch",
    EndCause.NAN: (
        "go back to an older checkpoint (`holdfast ls`, `manager.resume(state, step=…)`), with a "
        "lower learning rate or without that batch"
    ),
    EndCause.MEMORY: "make the batch or the state smaller, or pass over that step's batch",
    EndCause.HANG: (
        "look at the stacks; if that step takes so long, mark its part with `manager.waiting`, or "
        "give a longer --hang-timeout"
    ),
}

OWN_ADVICE = "mend what the message of Holdfast names; the traceback has all of it"
"""For errors of Holdfast, which are raised before the first step too."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """How often the command is restarted: in all, and after the ends of some classes.

    Attributes:
        total: After all ends whose class has no number of its own.
        by_cause: The numbers of classes.
    """

    total: float = 0
    by_cause: Mapping[EndCause, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Budgets:
        """Return the budgets in `3`, `error=3,lost=inf` or `5,lost=100`.

        Raises:
            ValueError: The text is none; the message says why.
        """
        totals: list[float] = []
        by_cause: dict[EndCause, float] = {}
        for entry in text.split(","):
            name, is_named, number = entry.strip().rpartition("=")
            if not is_named:
                totals.append(_count(number))
                continue
            cause = next((cause for cause in BUDGETED if cause.value == name.strip()), None)
            names = ", ".join(cause.value for cause in BUDGETED)
            if cause is None:
                raise ValueError(f"expected one of {names}, found {name.strip()!r}")
            if cause in by_cause:
                raise ValueError(f"expected {cause.value} once, found it twice")
            by_cause[cause] = _count(number)
        if len(totals) > 1:
            raise ValueError(f"expected one number without a class, found {len(totals)}")
        return cls(totals[0] if totals else 0, by_cause)


def _count(text: str) -> float:
    text = text.strip()
    if text == "inf":
        return math.inf
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"expected a number of restarts or inf, found {text!r}")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows an end.

    Attributes:
        restart_in_secs: When to start the command again; None: not at all.
        count_text: Which restart of how many it is; empty without one.
        reason: Why it is not started again, if that needs to be told; else empty.
        named_host: A host that fails again and again; empty: none does.
    """

    restart_in_secs: float | None = None
    count_text: str = ""
    reason: str = ""
    named_host: str = ""


class Restarts:
    """The decisions of one `holdfast run`.

    Args:
        budgets: How often it may restart.
        host: This host.

    Attributes:
        count: The restarts so far.
    """

    def __init__(self, budgets: Budgets, host: str) -> None:
        self.count = 0
        self._budgets = budgets
        self._host = host
        self._used: Counter[EndCause | None] = Counter()
        """The restarts of each budget; None: of the total."""
        self._waits = 0
        """The restarts since the last new checkpoint."""
        self._busy_since_secs: float | None = None
        """Since when another start has the run; None: none was found to at the last end."""
        self._stuck = 0
        """The ends since then that this command itself has caused."""
        self._repeatable: set[tuple[str, int]] = set()
        self._failures: dict[str, deque[float]] = {}

    def decide(
        self, end: End, now_secs: float, *, has_progress: bool | None, gone_run: str = ""
    ) -> Decision:
        """Return what follows an end.

        Args:
            end: The end.
            now_secs: The time, by the monotonic clock.
            has_progress: A newer checkpoint was made since the end before; None: the command has
                opened no run.
            gone_run: Which run is not where the command opens it any more, and where it is, in
                words; empty: none.
        """
        is_over = end.cause in (EndCause.FINISHED, EndCause.STOPPED) or end.is_told_to
        budget = end.cause if end.cause in self._budgets.by_cause else None
        if is_over or (end.code == 0 and budget is None and end.cause is EndCause.PREEMPTED):
            return Decision()
        if not end.is_refused:
            self._busy_since_secs = None
        elif self._may_wait_for_other(budget, now_secs):
            self.count += 1
            secs = min(BACKOFF_SECS_MAX, BACKOFF_SECS * 2**self._waits)
            self._waits += 1
            text = "restart, not counted while another start has the run,"
            return Decision(restart_in_secs=secs, count_text=text)
        named_host = self._note_host(end, now_secs)
        reason = self._reason_to_stop(end, has_progress)
        if gone_run:
            reason = (
                f"{gone_run}, so that a restart would not continue it: move it back, or start the "
                "command with its new place, or again if another run is wanted"
            )
        limit = self._limit(budget)
        if self._used[budget] >= limit:
            return Decision(reason=self._used_up(end.cause, limit), named_host=named_host)
        if reason:
            return Decision(reason=reason, named_host=named_host)
        self._used[budget] += 1
        self.count += 1
        secs = min(BACKOFF_SECS_MAX, BACKOFF_SECS * 2**self._waits)
        if has_progress:
            secs, self._waits = 0.0, 0
        else:
            self._waits += 1
        of = "" if math.isinf(limit) else f" of {limit:.0f}"
        count_text = (
            f"restart {self._used[budget]}{of}{'' if budget is None else f' ({budget.value})'}"
        )
        return Decision(restart_in_secs=secs, count_text=count_text, named_host=named_host)

    def _may_wait_for_other(self, budget: EndCause | None, now_secs: float) -> bool:
        """Note that another start has the run; return whether to wait for its end."""
        if self._busy_since_secs is None:
            self._busy_since_secs = now_secs
        return self._limit(budget) > 0 and now_secs - self._busy_since_secs < BUSY_SECS

    def _limit(self, budget: EndCause | None) -> float:
        return self._budgets.total if budget is None else self._budgets.by_cause[budget]

    def _reason_to_stop(self, end: End, has_progress: bool | None) -> str:
        repeated = end.repeats_as
        if repeated is not None:
            if repeated in self._repeatable:
                if end.error is not None and "HoldfastError" in end.error.kinds:
                    return f"it failed twice alike after step {repeated[1]}: {OWN_ADVICE}"
                advice = ADVICE.get(end.cause, ADVICE[EndCause.ERROR])
                return f"it failed twice alike in the step after step {repeated[1]}: {advice}"
            self._repeatable.add(repeated)
        if has_progress:
            self._stuck = 0
        elif has_progress is not None and end.cause not in OF_OTHERS:
            self._stuck += 1
        if self._stuck < STUCK_COUNT:
            return ""
        return (
            f"{STUCK_COUNT} attempts in a row ended without a new checkpoint, so that a restart "
            "repeats the same steps: mend the cause, or save more often"
        )

    def _used_up(self, cause: EndCause, limit: float) -> str:
        if limit:
            return f"{limit:.0f} of {counted(int(limit), 'restart')} made"
        if not self._budgets.by_cause:
            return ""
        return f"--max-restarts gives no restart for `{cause.value}`"

    def _note_host(self, end: End, now_secs: float) -> str:
        """Count a failure of a host, and return the host if it is to be named now."""
        if end.cause not in OF_HOST:
            return ""
        host = end.lost_host or self._host
        failures = self._failures.setdefault(host, deque(maxlen=HOST_FAILURES))
        failures.append(now_secs)
        if len(failures) < HOST_FAILURES or now_secs - failures[0] > HOST_SECS:
            return ""
        failures.clear()
        return host
