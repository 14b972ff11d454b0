"""The attempts beside this host's RAM: those begun here, and those that are not the run's.

An attempt is noted in the agent's folder before its record is put into the run. So an agent knows
an attempt as one of its own folder by its identity, and not by the host's name, which agents of
other users, of other folders and of other containers share.

RAM is found by the run's id. A directory and its remote tier have one id, and a directory that was
put back to an earlier state keeps it. If one of them was trained apart, its attempts have other
identities, and what RAM has of them is no checkpoint of the other. RAM of an attempt whose record
is missing was made for another place (`host.tiers.ram_place`), or the place has lost the record.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from pathlib import Path

from holdfast.engine.lifecycle.attempts import read_attempt
from holdfast.errors import CheckpointDamagedError, ObjectNotFoundError
from holdfast.format.names import AttemptId
from holdfast.format.records import AttemptRecord
from holdfast.host.tiers.ram_place import noted_place
from holdfast.store.durable import DurableStore

NOTE = "attempt-"


def note_attempt(folder: Path, attempt: AttemptId) -> None:
    """Note an attempt in the agent's folder.

    Raises:
        OSError: It cannot be written.
    """
    _note(folder, attempt).touch()


def forget_attempts(folder: Path, others: Collection[AttemptId]) -> None:
    """Forget the noted attempts, except the `others`.

    Raises:
        OSError: Some of them may remain.
    """
    kept_notes = {_note(folder, attempt) for attempt in others}
    for note in folder.glob(f"{NOTE}*"):
        if note not in kept_notes:
            note.unlink(missing_ok=True)


def is_noted(folder: Path, attempt: AttemptId) -> bool:
    """Return whether this very attempt is noted in the agent's folder."""
    return _note(folder, attempt).exists()


def _note(folder: Path, attempt: AttemptId) -> Path:
    return folder / f"{NOTE}{attempt.name}"


def foreign_attempts(
    folder: Path,
    store: DurableStore,
    attempts: Collection[AttemptId],
    records: MutableMapping[int, AttemptRecord] | None = None,
) -> set[AttemptId]:
    """Return those of the attempts that are not the attempts of `store`.

    One that `store` has no record of is foreign if the last agent worked on another place. At this
    place its record was lost, and whoever finds it decides. The same holds for a damaged record,
    which a reader of the timeline reports with what to do. The records that are read are added to
    `records`.

    Raises:
        StorageError, NewerFormatError: The store's record cannot be read.
        CheckpointDamagedError: It is damaged, and the last agent worked on another place.
    """
    place = noted_place(folder)
    is_here = place is None or place.is_at(store.home)
    foreign = set()
    for attempt in attempts:
        try:
            record = read_attempt(store, attempt.number)
        except ObjectNotFoundError:
            is_foreign = not is_here
        except CheckpointDamagedError:
            if not is_here:
                raise
            is_foreign = False
        else:
            is_foreign = record.attempt != attempt
            if records is not None:
                records[attempt.number] = record
        if is_foreign:
            foreign.add(attempt)
    return foreign
