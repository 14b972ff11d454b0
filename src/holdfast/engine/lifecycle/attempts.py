"""Attempts: numbered by the store's put-if-absent, so that no two starts get the same number.

Without an attempt's record its origin is unknown, and with it the timeline. So each record has a
copy, which is read if the record is damaged. See docs/decisions/0001.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from holdfast.errors import CheckpointDamagedError, HoldfastError, ObjectNotFoundError, StorageError
from holdfast.format.names import (
    ATTEMPT_MAX,
    ATTEMPTS,
    NO_ATTEMPT,
    AttemptId,
    CheckpointId,
    attempt_keys,
    parse_attempt_name,
)
from holdfast.format.records import AttemptRecord
from holdfast.format.sealed import seal, unseal
from holdfast.store.contract import ReadableStore, Store
from holdfast.store.durable import DurableStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """The fields of an attempt's record that are known before its number."""

    run_id: str
    origin: CheckpointId | None
    host: str
    pid: int
    time: datetime

    def record(self, attempt: AttemptId) -> AttemptRecord:
        """Return the record of the attempt if it gets its number."""
        return AttemptRecord(
            run_id=self.run_id,
            attempt=attempt,
            origin=self.origin,
            host=self.host,
            pid=self.pid,
            time=self.time,
        )


def attempt_numbers(store: ReadableStore) -> list[int]:
    """Return the numbers of all attempts, ascending."""
    return [*attempt_sizes_bytes(store)]


def attempt_sizes_bytes(store: ReadableStore) -> dict[int, list[int]]:
    """Return the sizes of the records of all attempts and of their copies, by ascending number."""
    sizes_bytes: dict[int, list[int]] = {}
    for stored in store.list(ATTEMPTS):
        number = parse_attempt_name(stored.key.rpartition("/")[2])
        if number is not None and stored.key in attempt_keys(number):
            sizes_bytes.setdefault(number, []).append(stored.size_bytes)
    return {number: sizes_bytes[number] for number in sorted(sizes_bytes)}


def newest_number(store: ReadableStore) -> int:
    """Return the number of the newest attempt; 0 if there is none."""
    return max(attempt_numbers(store), default=0)


def newest_attempt(store: ReadableStore) -> AttemptId:
    """Return the newest attempt, as its record names it; `NO_ATTEMPT` if there is none.

    Raises:
        CheckpointDamagedError, StorageError, NewerFormatError: the record cannot be read.
    """
    number = newest_number(store)
    return read_attempt(store, number).attempt if number else NO_ATTEMPT


def newest_tier(stores: Sequence[DurableStore]) -> DurableStore:
    """Return the store with the newest attempt, the first of equals: it knows the timeline."""
    return max(stores, key=newest_number) if len(stores) > 1 else stores[0]


def read_attempts(
    store: DurableStore,
    numbers: Sequence[int] | None = None,
    known: MutableMapping[int, AttemptRecord] | None = None,
    damaged: set[int] | None = None,
) -> dict[int, AttemptRecord]:
    """Return the records of the newest attempt and of the attempts it continues from, by number.

    Args:
        store: the run's store.
        numbers: the numbers of all attempts; None: they are listed.
        known: records that were read before, which never change; those read now are added.
        damaged: the numbers of those whose copy was read instead are added.

    Raises:
        CheckpointDamagedError: one of them is damaged, so the timeline is unknown; the error says
            what can be done. A damaged record of an abandoned attempt is not read.
    """
    numbers = attempt_numbers(store) if numbers is None else numbers
    known = {} if known is None else known
    unread = [number for number in numbers if number not in known]
    data = dict(zip(unread, store.get_many([attempt_keys(n)[0] for n in unread]), strict=True))
    records: dict[int, AttemptRecord] = {}
    number = max(numbers, default=0)
    while number > 0 and number not in records:
        try:
            record = known.get(number) or _parsed(number, data.get(number))
            if record is None and damaged is not None:
                damaged.add(number)
            records[number] = record or read_attempt(store, number)
        except ObjectNotFoundError:
            break
        except CheckpointDamagedError as error:
            raise damaged_attempt_error(store, number, error) from error
        known[number] = records[number]
        origin = records[number].origin
        number = origin.attempt.number if origin is not None else 0
    return records


def damaged_attempt_error(
    store: DurableStore, number: int, error: Exception
) -> CheckpointDamagedError:
    """Return the error of an attempt whose record and its copy are damaged: where, what to do."""
    place, names = store.home.location_text, " and ".join(attempt_keys(number))
    return CheckpointDamagedError(
        f"read the attempts in {place}: {error}; its copy is damaged too, so it is unknown what "
        f"attempt {number} continued from. If the run's other tier has the attempt intact "
        f"(`holdfast verify`), remove {names} in {place}, and the next start copies them from "
        "there. Else put one of them back from a backup. With neither, copy "
        f"{place} to another place before you remove them, and open it with takeover=True: without "
        "these records checkpoints may count as abandoned, and the next saves delete those"
    )


def _parsed(number: int, data: bytes | HoldfastError | None) -> AttemptRecord | None:
    """Return the record in `data`, if it is intact."""
    if isinstance(data, bytes):
        with contextlib.suppress(CheckpointDamagedError):
            return parse_attempt(data, attempt_keys(number)[0], number)
    return None


def read_attempt(store: ReadableStore, number: int) -> AttemptRecord:
    """Return an attempt's record, or its copy if the record is damaged.

    Raises:
        ObjectNotFoundError: neither exists.
        CheckpointDamagedError, StorageError: neither is readable; the error is the record's.
        NewerFormatError: the record has a newer format version.
    """
    problems: list[CheckpointDamagedError | StorageError] = []
    for key in attempt_keys(number):
        try:
            record = read_attempt_at(store, key, number)
        except (CheckpointDamagedError, StorageError) as error:
            problems.append(error)
        else:
            if problems:
                log.warning("%s; its copy is used", problems[0])
            return record
    raise next((e for e in problems if not isinstance(e, ObjectNotFoundError)), problems[0])


def read_attempt_at(store: ReadableStore, key: str, number: int) -> AttemptRecord:
    """Return the record of an attempt, or its copy, from `key`.

    Raises:
        ObjectNotFoundError, CheckpointDamagedError, NewerFormatError.
    """
    return parse_attempt(store.get(key), key, number)


def parse_attempt(data: bytes, key: str, number: int) -> AttemptRecord:
    """Return the attempt's record in `data`, which was read from `key`.

    Raises:
        CheckpointDamagedError, NewerFormatError.
    """
    record = unseal(data, AttemptRecord, key)
    if record.attempt.number != number:
        raise CheckpointDamagedError(f"read {key}: it is the record of attempt {record.attempt}")
    ids = [record.attempt, *([record.origin.attempt] if record.origin is not None else [])]
    if not all(attempt.is_valid for attempt in ids):
        raise CheckpointDamagedError(f"read {key}: an attempt in it has no token")
    return record


def mend_attempts(
    store: Store, numbers: Sequence[int], known: MutableMapping[int, AttemptRecord]
) -> Iterator[str]:
    """Rewrite each damaged record or copy from the intact other one; yield the rewritten keys.

    Args:
        store: the run's store.
        numbers: the attempts.
        known: each record with an intact object is added.

    Raises:
        StorageError: the remaining ones are not repaired; the call may be repeated.
    """
    keys = [key for number in numbers for key in attempt_keys(number)]
    read = iter(store.get_many(keys))
    for number in numbers:
        good, bad = [], []
        for key, data in zip(attempt_keys(number), (next(read), next(read)), strict=True):
            try:
                if isinstance(data, HoldfastError):
                    raise data
                known[number] = parse_attempt(data, key, number)
                good.append(data)
            except (CheckpointDamagedError, StorageError):
                bad.append(key)
        if good and bad:
            store.put(bad[0], good[0])
            yield bad[0]


def begin_attempt(
    store: Store, attempt: AttemptId, start: AttemptStart, *, is_previous_whole: bool = False
) -> AttemptRecord | None:
    """Begin an attempt, and fence every older one.

    Args:
        store: the run's store.
        attempt: the attempt.
        start: the fields of its record.
        is_previous_whole: whether the record of the previous attempt and its copy were found whole.

    Returns:
        The attempt's record; None if another process took the number first.

    Raises:
        StorageError: it is unknown whether the record was written; or the number is too high.
    """
    # The process that began the previous attempt may have been killed before it wrote the copy; the
    # copies of older attempts exist.
    number = attempt.number
    previous = () if is_previous_whole else range(max(1, number - 1), number)
    for key in mend_attempts(store, previous, {}):
        log.info("%s was missing or damaged; it was rewritten", key)
    if number > ATTEMPT_MAX:
        raise StorageError(
            f"begin an attempt: its number would be above {ATTEMPT_MAX}; a stray file in "
            f"{ATTEMPTS}/ may have the highest number, remove it"
        )
    record = start.record(attempt)
    key, copy_key = attempt_keys(number)
    data = seal(record)
    if not store.put_if_absent(key, data):
        return None
    store.put(copy_key, data)
    return record
