"""A run: one training effort in one durable directory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from datetime import datetime

from holdfast.engine.attempts import attempt_numbers, read_attempt
from holdfast.errors import CheckpointDamagedError, NotARunError, ObjectNotFoundError, StorageError
from holdfast.format.names import RUN_FILE
from holdfast.format.records import RunRecord
from holdfast.format.sealed import seal, unseal
from holdfast.store.contract import Store

log = logging.getLogger(__name__)


def read_run(store: Store, where: str) -> RunRecord:
    """The record of the run in `store`; `where` is what a person calls the place.

    Where the record is bad or gone, what it said is taken from the attempts, which say it too.

    Raises:
        NotARunError: there is no run.
        NewerFormatError: it is of a newer format version.
    """
    try:
        return read_run_record(store, where)
    except ObjectNotFoundError:
        problem = f"expected a run, with a file {RUN_FILE}, found none; check the path"
    except (CheckpointDamagedError, StorageError) as error:
        problem = f"its {RUN_FILE} is not a run's record: {error}"
    found = _as_attempts_say(store)
    if found is None:
        raise NotARunError(f"open {where}: {problem}")
    log.warning("%s: %s; the run's attempts tell its id", where, problem)
    return found


def read_run_record(store: Store, where: str) -> RunRecord:
    """The run's record itself.

    Raises:
        ObjectNotFoundError, CheckpointDamagedError, NewerFormatError.
    """
    return unseal(store.get(RUN_FILE), RunRecord, f"{where}/{RUN_FILE}")


def mend_run(store: Store) -> Iterator[str]:
    """Writes the run's record anew where it is bad and the attempts tell it; yields its key."""
    try:
        read_run_record(store, "")
    except (CheckpointDamagedError, StorageError):
        found = _as_attempts_say(store)
        if found is not None:
            data = seal(found)
            store.put(RUN_FILE, len(data), [data])
            yield RUN_FILE


def _as_attempts_say(store: Store) -> RunRecord | None:
    """The run's record, with the time of the oldest attempt that can be read."""
    for number in attempt_numbers(store):
        with contextlib.suppress(CheckpointDamagedError, StorageError):
            attempt = read_attempt(store, number)
            return RunRecord(run_id=attempt.run_id, time=attempt.time)
    return None


def create_run(store: Store, where: str, run_id: str, time: datetime) -> RunRecord:
    """Makes a run in `store`, or reads the one that another process made first."""
    store.put_if_absent(RUN_FILE, seal(RunRecord(run_id=run_id, time=time)))
    return read_run(store, where)
