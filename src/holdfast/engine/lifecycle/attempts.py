"""Attempts: numbered by the store's put-if-absent, so that no two starts get one number.

Without its record nobody knows what an attempt went on from, and so not what the timeline is. That
is why each record has a copy, which is read where the record itself is bad.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from holdfast.errors import CheckpointDamagedError, ObjectNotFoundError, StorageError
from holdfast.format.names import (
    ATTEMPT_MAX,
    ATTEMPTS,
    CheckpointId,
    attempt_keys,
    parse_attempt_name,
)
from holdfast.format.records import AttemptRecord
from holdfast.format.sealed import seal, unseal
from holdfast.store.contract import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """What an attempt says of itself when it begins."""

    run_id: str
    origin: CheckpointId | None
    host: str
    pid: int
    time: datetime


def attempt_numbers(store: Store) -> list[int]:
    """Return the numbers of all attempts, ascending."""
    numbers = set()
    for stored in store.list(ATTEMPTS):
        number = parse_attempt_name(stored.key.rpartition("/")[2])
        if number is not None and stored.key in attempt_keys(number):
            numbers.add(number)
    return sorted(numbers)


def newest_attempt(store: Store) -> int:
    """Return the number of the newest attempt; 0 where there was none."""
    return max(attempt_numbers(store), default=0)


def read_attempts(store: Store) -> dict[int, AttemptRecord]:
    """Return the records of the newest attempt and of those that it goes back to, by number.

    Raises:
        CheckpointDamagedError: one of them is damaged: the timeline cannot be told. A damaged
            record of an abandoned attempt does no harm.
    """
    found: dict[int, AttemptRecord] = {}
    number = newest_attempt(store)
    while number > 0 and number not in found:
        try:
            found[number] = read_attempt(store, number)
        except ObjectNotFoundError:
            break
        origin = found[number].origin
        number = origin[1] if origin is not None else 0
    return found


def read_attempt(store: Store, attempt: int) -> AttemptRecord:
    """One attempt's record, or its copy where the record is bad.

    Raises:
        ObjectNotFoundError: there is neither.
        CheckpointDamagedError, StorageError: neither is good; says what is wrong with the record.
        NewerFormatError.
    """
    problems: list[CheckpointDamagedError | StorageError] = []
    for key in attempt_keys(attempt):
        try:
            record = read_attempt_at(store, key, attempt)
        except (CheckpointDamagedError, StorageError) as error:
            problems.append(error)
        else:
            if problems:
                log.warning("%s; its copy is used", problems[0])
            return record
    raise next((e for e in problems if not isinstance(e, ObjectNotFoundError)), problems[0])


def read_attempt_at(store: Store, key: str, attempt: int) -> AttemptRecord:
    """Return the record, or the copy, of an attempt that stands at `key`.

    Raises:
        ObjectNotFoundError, CheckpointDamagedError, NewerFormatError.
    """
    record = unseal(store.get(key), AttemptRecord, key)
    if record.attempt != attempt:
        raise CheckpointDamagedError(f"read {key}: it is the record of attempt {record.attempt}")
    return record


def mend_attempts(store: Store) -> Iterator[str]:
    """Writes anew each record, and each copy, whose other one is good; yields their keys.

    Raises:
        StorageError: the rest is not done; the call may be repeated.
    """
    for number in attempt_numbers(store):
        yield from _mend_attempt(store, number)


def _mend_attempt(store: Store, number: int) -> Iterator[str]:
    good, bad = [], []
    for key in attempt_keys(number):
        try:
            read_attempt_at(store, key, number)
            good.append(key)
        except (CheckpointDamagedError, StorageError):
            bad.append(key)
    if good and bad:
        data = store.get(good[0])
        store.put(bad[0], len(data), [data])
        yield bad[0]


def begin_attempt(store: Store, number: int, start: AttemptStart) -> AttemptRecord | None:
    """Takes that number, if nobody has it: None where somebody has.

    Every older attempt is fenced from here on.

    Raises:
        StorageError: whether the record stands is not known; or there is no such number.
    """
    # Whoever began the one before may have been killed before its copy; only that may lack one.
    for key in _mend_attempt(store, number - 1):
        log.info("%s was missing or bad, and is written anew", key)
    if number > ATTEMPT_MAX:
        raise StorageError(
            f"begin an attempt: its number would be above {ATTEMPT_MAX}; a stray file in "
            f"{ATTEMPTS}/ may have the highest number, remove it"
        )
    record = AttemptRecord(
        run_id=start.run_id,
        attempt=number,
        origin=(start.origin.step, start.origin.attempt) if start.origin else None,
        host=start.host,
        pid=start.pid,
        time=start.time,
    )
    key, copy_key = attempt_keys(record.attempt)
    data = seal(record)
    if not store.put_if_absent(key, data):
        return None
    store.put(copy_key, len(data), [data])
    return record
