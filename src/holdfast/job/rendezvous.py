"""What the processes of a job decide together: each gives a value, rank 0 judges, all are answered.

The words of a decision stand in the framework's key-value service. There is no collective.

Invariants:
- All processes take the same decisions in the same order. Decisions are numbered, and the number
  leads to their words.
- A decision has one answer. That word is put once, by whoever is the first, and never changed: a
  rank that gives up puts its error there, and then every rank raises it.
- Only rank 0 reads the values; the others read one word each, however many they are.
- Nobody waits beyond a bound. A rank that waits asks again and again, at most once a second, so
  that signals are handled meanwhile.
- No words pile up: once rank 0 has all values of one decision, every rank has done with the
  decision before, whose words are removed then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import TracebackType

import msgspec

from holdfast.adapt.contract import KeyValues, Processes
from holdfast.clock import Clock
from holdfast.coordination.rank_runs import ranks_text
from holdfast.errors import (
    HoldfastError,
    InvalidArgumentError,
    ProcessLostError,
    error_named,
)
from holdfast.format.json_codec import decode

ROOT = "holdfast"
LEADER = 0

POLL_SECS_MIN = 0.002
POLL_SECS_MAX = 1.0
POLL_SHARE = 0.1
"""Of the time that was waited: how long until the next look, so that asking stays cheap."""
GRACE_SECS = 5.0
"""By so much the other ranks outwait rank 0, which knows best who is missing."""
LINGER_SECS = 2.0
"""Rank 0's process holds the words: it keeps an error for so long before it raises it itself, which
may end the process. Everybody else has looked by then."""


class _Value(msgspec.Struct, frozen=True):
    """What one rank gives, and to which decision."""

    name: str
    value: str


class _Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was decided, or the error, by its class, of the rank that ended it."""

    value: str = ""
    rank: int = LEADER
    error: str | None = None


@dataclass(slots=True)
class Numbers:
    """Counts one process's decisions. `first_kept` is the oldest of which words may stand."""

    next: int = 0
    first_kept: int = 0

    def next_number(self) -> int:
        """The number of the next decision."""
        self.next += 1
        return self.next - 1


# All managers of a process count together: the processes open and use them in one order.
_numbers = Numbers()


def _no_trouble() -> HoldfastError | None:
    return None


class OneProcess:
    """The processes of a job of one; see `holdfast.adapt.contract.Processes`."""

    rank = 0
    count = 1
    slice_index = None

    def key_values(self) -> KeyValues:
        raise AssertionError("a process alone has nobody to share words with")


class Rendezvous:
    """One process's part in what its job decides; for the training thread alone.

    Args:
        processes: the processes of the job, this one among them.
        clock: for the bounds.
        numbers: the process's own count.

    Raises:
        InvalidArgumentError: there are several processes, and nothing by which they find each
            other.
    """

    def __init__(self, processes: Processes, clock: Clock, numbers: Numbers = _numbers) -> None:
        self.rank = processes.rank
        self.count = processes.count
        self.clock = clock
        self._numbers = numbers
        self._words = processes.key_values() if processes.count > 1 else None

    def decide(
        self,
        name: str,
        value: str,
        judge: Callable[[list[str]], str],
        timeout_secs: float,
        trouble: Callable[[], HoldfastError | None] = _no_trouble,
    ) -> str:
        """The answer that `judge` gives on rank 0 to the values of all ranks, in their order.

        Every process has to call it. What ends it on one rank ends it on all of them.

        Args:
            name: what is decided, as a person calls it; the same on every rank.
            value: what this rank has to say.
            judge: called on rank 0 alone; an error that it raises is raised on every rank.
            timeout_secs: how long rank 0 waits for the others; they wait `GRACE_SECS` longer.
            trouble: asked while this rank waits; an error that it gives ends the waiting.

        Raises:
            ProcessLostError: a rank did not come in time (it is named), or gave up, or the service
                has ended.
            InvalidArgumentError: another rank decides something else.
            HoldfastError: what `judge` or another rank raised, as the same class.
        """
        if self._words is None:
            return judge([value])
        decision = _Decision(self, self._words, self._numbers.next_number(), name)
        with decision:
            decision.give(value)
            if self.rank == LEADER:
                values = decision.collect(timeout_secs, trouble)
                self._remove_past(decision)
                decision.put(_Answer(judge(values)))
            return decision.answer(timeout_secs + GRACE_SECS * (self.rank != LEADER), trouble)

    def propagating_errors(self, name: str) -> contextlib.AbstractContextManager[object]:
        """For what comes before a decision: an error that leaves the block ends the next one.

        This rank does not come to that decision any more, so the others are told, and raise the
        same. `name` tells them what was done here.
        """
        return _Telling(self, name)

    def give_up(self, name: str, error: BaseException) -> None:
        """Ends the next decision by `error`, which this rank raises instead of coming to it."""
        if self._words is not None:
            _Decision(self, self._words, self._numbers.next_number(), name).fail(error)

    def _remove_past(self, present: _Decision) -> None:
        assert self._words is not None
        for number in range(self._numbers.first_kept, present.number):
            self._words.delete(f"{ROOT}/{number}")
        self._numbers.first_kept = present.number
        self._words.delete(present.values)

    def pauses(self, timeout_secs: float) -> _Pauses:
        """How a wait of this process goes."""
        return _Pauses(self.clock, timeout_secs)


@dataclass(frozen=True, slots=True)
class _Telling:
    _rendezvous: Rendezvous
    _name: str

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._rendezvous.give_up(self._name, error)


class _Pauses:
    """The pauses of one wait, and its end."""

    def __init__(self, clock: Clock, timeout_secs: float) -> None:
        self._clock = clock
        self._timeout_secs = timeout_secs
        self._started = clock.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self._waited_secs >= self._timeout_secs

    @property
    def _waited_secs(self) -> float:
        return self._clock.monotonic() - self._started

    def pause(self) -> None:
        """Sleeps for a share of the time that was waited."""
        secs = min(max(self._waited_secs * POLL_SHARE, POLL_SECS_MIN), POLL_SECS_MAX)
        self._clock.sleep(secs)


class _Decision:
    """One decision, as one rank takes part in it. An error that leaves the block is told to all."""

    def __init__(self, rendezvous: Rendezvous, words: KeyValues, number: int, name: str) -> None:
        self._of = rendezvous
        self._words = words
        self._name = name
        self.number = number
        self.values = f"{ROOT}/{number}/values"
        self._answer = f"{ROOT}/{number}/answer"

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)

    def give(self, value: str) -> None:
        """Puts this rank's value.

        Raises:
            ProcessLostError: another process has put one as this rank.
        """
        key = f"{self.values}/{self._of.rank}"
        said = json_text(_Value(self._name, value))
        if not self._words.put_if_absent(key, said) and self._words.get(key) != said:
            raise ProcessLostError(
                f"{self._name}: rank {self._of.rank} has said something already; was this process "
                "started anew beside the others? Start all processes of the job together"
            )

    def collect(
        self, timeout_secs: float, trouble: Callable[[], HoldfastError | None]
    ) -> list[str]:
        """The values of all ranks."""
        pauses = self._of.pauses(timeout_secs)
        while True:
            # Asked before the look, so that what came just before the trouble still counts.
            found_trouble = trouble()
            found = self._words.below(self.values)
            if len(found) == self._of.count:
                break
            self._raise_failure()
            if found_trouble is not None:
                raise found_trouble
            if pauses.is_over:
                raise self._missing(found, timeout_secs)
            pauses.pause()
        said = [decode(found[str(rank)], _Value) for rank in range(self._of.count)]
        self._check_names(said)
        return [each.value for each in said]

    def answer(self, timeout_secs: float, trouble: Callable[[], HoldfastError | None]) -> str:
        """The answer, once it stands."""
        pauses = self._of.pauses(timeout_secs)
        while True:
            found_trouble = trouble()
            is_over = pauses.is_over
            found = self._answer_now()
            if found is not None:
                return found
            if found_trouble is not None:
                raise found_trouble
            if is_over:
                raise self._missing(self._words.below(self.values), timeout_secs)
            pauses.pause()

    def put(self, answer: _Answer) -> None:
        """Puts the answer, unless one stands."""
        self._words.put_if_absent(self._answer, json_text(answer))

    def fail(self, error: BaseException) -> None:
        """Ends the decision by `error`, unless it has an answer; lets the others see that."""
        kind, message = type(error).__name__, plain_text(str(error))
        if not isinstance(error, HoldfastError):
            kind, message = ProcessLostError.__name__, f"{self._name}: {kind}: {message}"
        # Where nobody can be told, the error itself is what this rank raises.
        with contextlib.suppress(ProcessLostError):
            self.put(_Answer(message, self._of.rank, kind))
            if self._of.rank == LEADER:
                self._of.clock.sleep(LINGER_SECS)

    def _answer_now(self) -> str | None:
        found = self._words.get(self._answer)
        if found is None:
            return None
        answer = decode(found, _Answer)
        if answer.error is not None:
            raise error_named(answer.error, f"rank {answer.rank}: {answer.value}")
        return answer.value

    def _raise_failure(self) -> None:
        # Before rank 0 has judged, the answer can only be a rank's error.
        self._answer_now()

    def _check_names(self, said: list[_Value]) -> None:
        for rank, each in enumerate(said):
            if each.name != self._name:
                raise InvalidArgumentError(
                    f"decide together: rank {LEADER} is to {self._name}, and rank {rank} is to "
                    f"{each.name}; all processes have to make the same calls in the same order"
                )

    def _missing(self, found: Collection[str], timeout_secs: float) -> ProcessLostError:
        advice = "look at their logs, stop this process and start the job again"
        missing = [rank for rank in range(self._of.count) if str(rank) not in found]
        # Rank 0 removes the values when it has them all.
        if not missing or self._of.rank in missing:
            return ProcessLostError(
                f"{self._name}: rank {LEADER} has heard all ranks, and has not answered for "
                f"{timeout_secs:g} s; {advice}"
            )
        return ProcessLostError(
            f"{self._name}: {ranks_text(missing)} of {self._of.count} did not come within "
            f"{timeout_secs:g} s; {advice}"
        )


def json_text(word: msgspec.Struct) -> str:
    """`word` as a value or an answer can have it."""
    return msgspec.json.encode(word).decode()


def plain_text(text: str) -> str:
    """`text` as JSON can have it: a path may hold bytes that are no characters."""
    return text.encode("utf-8", "backslashreplace").decode()
