"""Attempts: numbered by the store's put-if-absent, so that no two starts get one number."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from holdfast.errors import CheckpointDamagedError, ObjectNotFoundError, StorageError
from holdfast.format.names import ATTEMPTS, CheckpointId, attempt_key, parse_attempt_name
from holdfast.format.records import AttemptRecord
from holdfast.format.sealed import seal, unseal
from holdfast.store.contract import Store

TRIES_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """What an attempt says of itself when it begins."""

    run_id: str
    origin: CheckpointId | None
    host: str
    pid: int
    time: datetime


def attempt_numbers(store: Store) -> list[int]:
    """The numbers of all attempts, ascending."""
    keys = (stored.key for stored in store.list(ATTEMPTS))
    numbers = ((key, parse_attempt_name(key.rpartition("/")[2])) for key in keys)
    return sorted(n for key, n in numbers if n is not None and key == attempt_key(n))


def newest_attempt(store: Store) -> int:
    """The number of the newest attempt; 0 where there was none."""
    return max(attempt_numbers(store), default=0)


def read_attempts(store: Store) -> dict[int, AttemptRecord]:
    """The records of the newest attempt and of those that it goes back to, by number.

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
    """One attempt's record.

    Raises:
        ObjectNotFoundError, CheckpointDamagedError, NewerFormatError.
    """
    key = attempt_key(attempt)
    record = unseal(store.get(key), AttemptRecord, key)
    if record.attempt != attempt:
        raise CheckpointDamagedError(f"read {key}: it is the record of attempt {record.attempt}")
    return record


def begin_attempt(store: Store, start: AttemptStart) -> AttemptRecord:
    """Takes the next number; every older attempt is fenced from here on.

    Raises:
        StorageError: other processes took numbers as fast as this one could ask for them.
    """
    for _ in range(TRIES_MAX):
        record = AttemptRecord(
            run_id=start.run_id,
            attempt=newest_attempt(store) + 1,
            origin=(start.origin.step, start.origin.attempt) if start.origin else None,
            host=start.host,
            pid=start.pid,
            time=start.time,
        )
        if store.put_if_absent(attempt_key(record.attempt), seal(record)):
            return record
    raise StorageError(
        f"begin an attempt: {TRIES_MAX} numbers in a row were taken by others; is something "
        "restarting in a loop?"
    )
