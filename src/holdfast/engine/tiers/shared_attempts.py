"""The attempts of a run with two durable tiers: the same records in both.

The remote tier decides. An attempt's record is created there first, by put-if-absent. So of two
starts that share nothing but the remote tier exactly one gets the number.

Invariants:
- Each tier has a prefix of the other one's attempts; a tier that lacks the last ones gets them
  before a new one begins.
- Tiers whose newest common attempts differ were trained apart. They are refused, and not changed.
"""

from __future__ import annotations

from holdfast.engine.lifecycle.attempts import (
    AttemptStart,
    attempt_numbers,
    begin_attempt,
    damaged_attempt_error,
    parse_attempt,
    read_attempt,
)
from holdfast.engine.lifecycle.run import read_run
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    NotARunError,
    ObjectNotFoundError,
    StorageError,
)
from holdfast.format.names import AttemptId, attempt_keys
from holdfast.format.records import AttemptRecord, RunRecord
from holdfast.store.durable import DurableStore


def begin_in_both(
    durable: DurableStore, remote: DurableStore, attempt: AttemptId, start: AttemptStart
) -> AttemptRecord | None:
    """Begin an attempt in both tiers, the remote one first.

    Returns:
        The attempt's record; None if another process took the number first.

    Raises:
        NotARunError: the tiers were trained apart.
        StorageError: it is unknown whether it has begun. The next start finds the record, if it was
            written, and copies it.
    """
    share_attempts(durable, remote)
    if begin_attempt(remote, attempt, start) is None:
        return None
    record = begin_attempt(durable, attempt, start)
    if record is None:
        raise StorageError(
            f"begin attempt {attempt}: it has begun in {_place(remote)}, and another process, "
            f"which does not use that remote tier, has taken the number in {_place(durable)}; stop "
            "that one, and start again"
        )
    return record


def share_attempts(durable: DurableStore, remote: DurableStore) -> None:
    """Give each tier the records of the attempts that only the other one has.

    Raises:
        NotARunError: the tiers were trained apart; nothing was changed.
        StorageError: some records may be missing still; the call may be repeated.
    """
    here, there = set(attempt_numbers(durable)), set(attempt_numbers(remote))
    _check_common(durable, remote, here, there)
    for source, target, numbers in (
        (remote, durable, there - here),
        (durable, remote, here - there),
    ):
        for number in sorted(numbers):
            data = _sealed(source, number)
            key, copy_key = attempt_keys(number)
            if not target.put_if_absent(key, data) and target.get(key) != data:
                raise StorageError(
                    f"copy attempt {number} from {_place(source)} to {_place(target)}: another "
                    "process has begun an attempt of that number there just now; start again"
                )
            target.put(copy_key, data)


def check_same_run(durable: DurableStore, remote: DurableStore, run_id: str) -> RunRecord:
    """Check that the remote tier belongs to the run: one id, and the same attempts.

    Returns the remote tier's record of the run.

    A place may hold another run by now, and a copy of a directory names the original's remote tier.

    Raises:
        NotARunError: It does not; or the two were trained apart.
        StorageError: One of them cannot be read.
    """
    place = _place(remote)
    record = read_run(remote, place)
    if record.run_id != run_id:
        raise NotARunError(
            f"use {place} as the remote tier of {_place(durable)}: expected run {run_id}, found "
            f"run {record.run_id}"
        )
    check_common(durable, remote)
    return record


def check_common(durable: DurableStore, remote: DurableStore) -> None:
    """Check that the newest attempt that both tiers have is the same one.

    Raises:
        NotARunError: the tiers were trained apart.
    """
    _check_common(durable, remote, set(attempt_numbers(durable)), set(attempt_numbers(remote)))


def _check_common(
    durable: DurableStore, remote: DurableStore, here: set[int], there: set[int]
) -> None:
    common = max(here & there, default=0)
    if not common:
        if here and there:
            raise NotARunError(
                f"use {_place(remote)} as the remote tier of {_place(durable)}: expected the same "
                f"attempts, found attempts {sorted(here)[:10]} here and {sorted(there)[:10]} there"
            )
        return
    ours, theirs = (_record_in(store, common) for store in (durable, remote))
    if ours != theirs:
        raise NotARunError(
            f"use {_place(remote)} as the remote tier of {_place(durable)}: attempt {common} was "
            f"begun on host {ours.host} at {ours.time:%Y-%m-%d %H:%M:%S} here, and on host "
            f"{theirs.host} at {theirs.time:%Y-%m-%d %H:%M:%S} there. The two were trained apart "
            "since, so neither "
            "continues the other; open one of them alone, or choose a new directory for the one "
            "or a new remote tier for the other"
        )


def _record_in(store: DurableStore, number: int) -> AttemptRecord:
    """Return an attempt's record; the error of a damaged one names its tier, and what to do."""
    try:
        return read_attempt(store, number)
    except CheckpointDamagedError as error:
        raise damaged_attempt_error(store, number, error) from error


def _sealed(store: DurableStore, number: int) -> bytes:
    """Return the bytes of an attempt's record, or of its copy if the record is damaged."""
    problem: HoldfastError | None = None
    for key in attempt_keys(number):
        try:
            data = store.get(key)
            parse_attempt(data, key, number)
            return data
        except (CheckpointDamagedError, ObjectNotFoundError) as error:
            problem = problem or error
    assert problem is not None
    if isinstance(problem, CheckpointDamagedError):
        raise damaged_attempt_error(store, number, problem) from problem
    raise problem


def _place(store: DurableStore) -> str:
    return store.home.location_text
