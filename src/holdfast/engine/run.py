"""A run: one training effort in one durable directory."""

from __future__ import annotations

from datetime import datetime

from holdfast.errors import CheckpointDamagedError, NotARunError, ObjectNotFoundError
from holdfast.format.names import RUN_FILE
from holdfast.format.records import RunRecord
from holdfast.format.sealed import seal, unseal
from holdfast.store.contract import Store


def read_run(store: Store, where: str) -> RunRecord:
    """The record of the run in `store`; `where` is what a person calls the place.

    Raises:
        NotARunError: there is none.
        NewerFormatError: it is of a newer format version.
        CheckpointDamagedError: its record is damaged.
    """
    try:
        data = store.get(RUN_FILE)
    except ObjectNotFoundError:
        raise NotARunError(
            f"open {where}: expected a run, with a file {RUN_FILE}, found none; check the path"
        ) from None
    try:
        return unseal(data, RunRecord, f"{where}/{RUN_FILE}")
    except CheckpointDamagedError as error:
        raise NotARunError(
            f"open {where}: its {RUN_FILE} is not a run's record: {error}"
        ) from error


def create_run(store: Store, where: str, run_id: str, time: datetime) -> RunRecord:
    """Makes a run in `store`, or reads the one that another process made first."""
    store.put_if_absent(RUN_FILE, seal(RunRecord(run_id=run_id, time=time)))
    return read_run(store, where)
