"""Make common decisions in a job: each process submits a value, rank 0 answers, all return that.

The entries of a decision are stored in the framework's key-value service. There is no collective.

Invariants:
- All processes make the same decisions in the same order. Decisions are numbered, and the number is
  in the keys of their entries.
- A decision has one answer. Its entry is put once, by the first rank that does so, and never
  changed. A rank that fails puts its error there, and then every rank raises it.
- Only rank 0 reads the values. Each other rank reads one entry, whatever the number of ranks.
- Every wait is bounded. A waiting rank polls, at most once a second, so that Python handles signals
  in between.
- Entries do not accumulate: once rank 0 has all values of a decision, every rank has finished the
  previous one, and rank 0 removes the entries of that.

Assumes that `put_if_absent` of the key-value service is atomic.

See docs/decisions/0013.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import msgspec

from holdfast import waits
from holdfast.adapt.contract import KeyValues, Processes
from holdfast.clock import Clock
from holdfast.errors import (
    HoldfastError,
    InvalidArgumentError,
    ProcessLostError,
    error_named,
)
from holdfast.format.json_codec import decode
from holdfast.launchers import NO_LAUNCH, Launch
from holdfast.trainer.ranks.bounded_entries import BoundedEntries
from holdfast.trainer.ranks.heartbeats import Heartbeats
from holdfast.trainer.ranks.rank_reports import RankReports

ROOT = "holdfast"
ANSWER = "answer"
LEADER = 0

POLL_SECS_MIN = 0.002
POLL_SECS_MAX = 1.0
POLL_SHARE = 0.1
"""The pause until the next poll, as a share of the time waited so far: it keeps polling cheap."""
LOG_SECS = 30.0
"""After how long rank 0 logs whom it waits for, and again each time that this has doubled."""
GRACE_SECS = 5.0
"""How much longer the other ranks wait than rank 0, whose error names the missing ranks."""
LINGER_SECS = 2.0
"""How long rank 0 delays raising an error, which may end its process and the key-value service with
it. Every other rank has polled by then."""


log = logging.getLogger(__name__)


class _Value(msgspec.Struct, frozen=True):
    """One rank's value, and the name of the decision for which it was submitted."""

    name: str
    value: str


class _Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer, or the class name and message of the error of the rank that failed."""

    value: str = ""
    rank: int = LEADER
    error: str | None = None


@dataclass(slots=True)
class Numbers:
    """Count one process's decisions. `first_kept` is the oldest whose entries may still exist."""

    next: int = 0
    first_kept: int = 0

    def next_number(self) -> int:
        """Return the number of the next decision, and count it."""
        self.next += 1
        return self.next - 1


# All managers of a process share one count, because all processes use them in the same order.
_numbers = Numbers()


def begin_numbers_anew() -> None:
    """Count decisions from 0 again: the job's processes meet in another key-value service."""
    _numbers.next = _numbers.first_kept = 0


def _no_trouble() -> HoldfastError | None:
    return None


class Rendezvous:
    """One process's participation in its job's decisions. Owned by the training thread.

    Args:
        processes: The processes of the job, including this one.
        clock: The clock for waits.
        numbers: The count of this process's decisions.
        launch: What has started this process.

    Raises:
        InvalidArgumentError: There are several processes, but no key-value service.
    """

    def __init__(
        self,
        processes: Processes,
        clock: Clock,
        numbers: Numbers = _numbers,
        launch: Launch = NO_LAUNCH,
    ) -> None:
        self.rank = processes.rank
        self.count = processes.count
        self.clock = clock
        self.names = [str(rank) for rank in range(processes.count)]
        self.reports = RankReports(processes.count, launch)
        """What is known of the ranks, for messages."""
        self._numbers = numbers
        self._entries = BoundedEntries(processes.key_values()) if processes.count > 1 else None

    def decide(
        self,
        name: str,
        value: str,
        judge: Callable[[list[str]], str],
        timeout_secs: float,
        trouble: Callable[[], HoldfastError | None] = _no_trouble,
    ) -> str:
        """Submit this rank's value and return the answer, which `judge` computes on rank 0.

        Every process must call it. An error that ends the call on one rank ends it on all ranks.

        Args:
            name: A readable name of the decision, the same on every rank.
            value: This rank's value.
            judge: Computes the answer from the values of all ranks, in the order of ranks. Called
                on rank 0 only; every rank raises an error that it raises.
            timeout_secs: How long rank 0 waits for the others; these wait `GRACE_SECS` longer.
            trouble: Called while this rank waits; if it returns an error, the call raises it.

        Returns:
            The answer, the same on every rank.

        Raises:
            ProcessLostError: A rank did not join in time (the message names it) or failed, or the
                key-value service has ended.
            InvalidArgumentError: Another rank makes a different decision.
            HoldfastError: `judge` or another rank raised it; the class is the same on every rank.
        """
        if self._entries is None:
            return judge([value])
        decision = _Decision(self, self._entries, self._numbers.next_number(), name)
        with decision:
            decision.give(value)
            if self.rank == LEADER:
                values = decision.collect(timeout_secs, trouble)
                self._remove_past(decision)
                decision.put(_Answer(judge(values)))
            return decision.answer(timeout_secs + GRACE_SECS * (self.rank != LEADER), trouble)

    def propagating_errors(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Send an error that leaves the block to the other ranks, as the answer of their decision.

        Use it around the operations before a decision. After an error this rank does not join the
        next decision; without this, the others would wait for it until their timeout.

        Args:
            name: The operation in the block, for the other ranks' message.
        """
        return _PropagatedErrors(self, name)

    def watching_ranks(
        self,
    ) -> contextlib.AbstractContextManager[Callable[[], HoldfastError | None]]:
        """Send heartbeats within the block, which every rank enters before the same decision.

        Returns:
            A context, whose value is the `trouble` of decisions in the block: it finds ranks that
            ended there.
        """
        if self._entries is None:
            return contextlib.nullcontext(_no_trouble)
        folder = f"{ROOT}/heartbeats-{self._numbers.next}"
        reports = self.reports
        return Heartbeats(
            self._entries, folder, self.rank, self.count, reports.named, reports.quiet_ranks
        ).running()

    def fail_next(self, name: str, error: BaseException) -> None:
        """End the next decision with `error`, which this rank raises in place of joining it."""
        if self._entries is not None:
            _Decision(self, self._entries, self._numbers.next_number(), name).put_error(error)

    def _remove_past(self, present: _Decision) -> None:
        assert self._entries is not None
        for number in range(self._numbers.first_kept, present.number):
            self._entries.delete(f"{ROOT}/{number}/values", self.names)
            self._entries.delete(f"{ROOT}/{number}", [ANSWER])
        self._numbers.first_kept = present.number
        self._entries.delete(present.values, self.names)

    def pauses(self, timeout_secs: float) -> _Pauses:
        """Return the pauses of one wait, whose limit is `timeout_secs`."""
        return _Pauses(self.clock, timeout_secs)


@dataclass(frozen=True, slots=True)
class _PropagatedErrors:
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
            self._rendezvous.fail_next(self._name, error)


class _Pauses:
    """The pauses and the time limit of one wait."""

    def __init__(self, clock: Clock, timeout_secs: float) -> None:
        self._clock = clock
        self._timeout_secs = timeout_secs
        self._started = clock.monotonic()
        self._log_after_secs = LOG_SECS

    def is_log_due(self) -> bool:
        """Return whether the wait is to be logged now."""
        if self.waited_secs < self._log_after_secs:
            return False
        self._log_after_secs *= 2
        return True

    @property
    def is_over(self) -> bool:
        """Whether the timeout has passed."""
        return self.waited_secs >= self._timeout_secs

    @property
    def waited_secs(self) -> float:
        """How long the wait has lasted."""
        return self._clock.monotonic() - self._started

    def pause(self) -> None:
        """Sleep for a share of the time waited so far.

        Raises:
            WaitInterruptedError: A signal has ended the wait.
        """
        waits.check()
        secs = min(max(self.waited_secs * POLL_SHARE, POLL_SECS_MIN), POLL_SECS_MAX)
        waits.sleep(self._clock, secs)


class _Decision:
    """One rank's part in one decision. An error that leaves its block is sent to all ranks."""

    def __init__(self, rendezvous: Rendezvous, entries: KeyValues, number: int, name: str) -> None:
        self._of = rendezvous
        self._entries = entries
        self._name = name
        self.number = number
        self.values = f"{ROOT}/{number}/values"
        self._answer = f"{ROOT}/{number}/{ANSWER}"

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.put_error(error)

    def give(self, value: str) -> None:
        """Put this rank's value.

        Raises:
            ProcessLostError: Another process has put a value for this rank.
        """
        key = f"{self.values}/{self._of.rank}"
        entry = json_text(_Value(self._name, value))
        # An equal value is no conflict: the decision is the same whichever of the two counts.
        if not self._entries.put_if_absent(key, entry) and self._entries.get(key) != entry:
            raise ProcessLostError(
                f"{self._name}: rank {self._of.rank} has already submitted another value; this "
                "process may have been restarted beside the others. Start all processes of the job "
                "together"
            )

    def collect(
        self, timeout_secs: float, trouble: Callable[[], HoldfastError | None]
    ) -> list[str]:
        """Wait for the values of all ranks and return them in the order of ranks."""
        pauses = self._of.pauses(timeout_secs)
        while True:
            # Called before the values are read, so that a value put just before the error counts.
            problem = trouble()
            values_by_rank = self._entries.get_many(self.values, self._of.names)
            if len(values_by_rank) == self._of.count:
                break
            self._raise_failure()
            if problem is not None:
                raise problem
            if pauses.is_over:
                raise self._missing(values_by_rank, timeout_secs)
            if pauses.is_log_due():
                names = self._of.reports.named(self._missing_from(values_by_rank))
                log.info("%s: waiting for %s: %.0f s so far", self._name, names, pauses.waited_secs)
            pauses.pause()
        values = [decode(values_by_rank[str(rank)], _Value) for rank in range(self._of.count)]
        self._check_names(values)
        return [each.value for each in values]

    def answer(self, timeout_secs: float, trouble: Callable[[], HoldfastError | None]) -> str:
        """Wait for the answer and return it."""
        pauses = self._of.pauses(timeout_secs)
        while True:
            problem = trouble()
            is_over = pauses.is_over
            text = self._answer_now()
            if text is not None:
                return text
            if problem is not None:
                raise problem
            if is_over:
                raise self._missing(
                    self._entries.get_many(self.values, self._of.names), timeout_secs
                )
            pauses.pause()

    def put(self, answer: _Answer) -> None:
        """Put the answer, unless there is one."""
        self._entries.put_if_absent(self._answer, json_text(answer))

    def put_error(self, error: BaseException) -> None:
        """End the decision with `error`, unless it has an answer, and let the others read that."""
        kind, message = type(error).__name__, plain_text(str(error))
        if not isinstance(error, HoldfastError):
            kind, message = ProcessLostError.__name__, f"{self._name}: {kind}: {message}"
        # If the service has ended, the error cannot be sent; this rank raises it in any case.
        with contextlib.suppress(ProcessLostError):
            self.put(_Answer(message, self._of.rank, kind))
            if self._of.rank == LEADER:
                self._of.clock.sleep(LINGER_SECS)

    def _answer_now(self) -> str | None:
        text = self._entries.get(self._answer)
        if text is None:
            return None
        answer = decode(text, _Answer)
        if answer.error is not None:
            raise error_named(answer.error, f"rank {answer.rank}: {answer.value}")
        return answer.value

    def _raise_failure(self) -> None:
        # Until rank 0 has answered, the entry of the answer can only hold a rank's error.
        self._answer_now()

    def _check_names(self, values: list[_Value]) -> None:
        for rank, each in enumerate(values):
            if each.name != self._name:
                raise InvalidArgumentError(
                    f"decide together: rank {LEADER} calls for {self._name!r}, and rank {rank} for "
                    f"{each.name!r}; all processes must make the same calls in the same order"
                )

    def _missing_from(self, present: Collection[str]) -> list[int]:
        return [rank for rank in range(self._of.count) if str(rank) not in present]

    def _missing(self, present: Collection[str], timeout_secs: float) -> ProcessLostError:
        reports = self._of.reports
        since = self._of.clock.now() - timedelta(seconds=timeout_secs)
        waited = f"{timeout_secs:g} s, since {since:%H:%M:%S} UTC"
        missing = self._missing_from(present)
        # No values are left once rank 0 has read them all and removed them.
        if not missing or self._of.rank in missing:
            missing = [LEADER]
            problem = f"all ranks have joined, but {reports.named(missing)} has not answered for"
        else:
            problem = f"{reports.named(missing)} of {self._of.count} did not join within"
        advice = "see their logs, stop this process and restart the job"
        texts = (f"{self._name}: {problem} {waited}", reports.described(missing), advice)
        return ProcessLostError("; ".join(filter(None, texts)))


def json_text(message: msgspec.Struct) -> str:
    """Return `message` as the JSON text of a value or an answer."""
    return msgspec.json.encode(message).decode()


def plain_text(text: str) -> str:
    """Return `text` with surrogates escaped, which JSON cannot hold; paths may contain them."""
    return text.encode("utf-8", "backslashreplace").decode()
