"""The records of attempts beside this host's RAM: those begun here, and those with images here.

The record of an attempt is noted before it is put into the run. So an agent knows an attempt as one
of its own folder by the record, and not by the host's name, which agents of other users, of other
folders and of other containers share.

RAM is found by the run's id. A directory and its remote tier have one id. If they were trained
apart, they have attempts of one number that differ, and what one of them has in RAM is no
checkpoint of the other. So an agent notes each attempt in its folder, and the next agent, and every
reader, compare the records with those of the place that they have open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from holdfast.engine.lifecycle.attempts import read_attempt
from holdfast.errors import HoldfastError, ObjectNotFoundError
from holdfast.format.records import AttemptRecord
from holdfast.format.sealed import seal, unseal
from holdfast.store.durable import DurableStore

PLACE = "place"


def note_attempt(folder: Path, record: AttemptRecord) -> None:
    """Note an attempt in the agent's folder.

    Raises:
        OSError: It cannot be written.
    """
    path = _path(folder, record.attempt)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(seal(record))
    unfinished.replace(path)


def forget_attempts(folder: Path, others: Collection[int]) -> None:
    """Forget the noted attempts, except the `others`.

    Raises:
        OSError: Some of them may remain.
    """
    kept = {_path(folder, number) for number in others}
    for known in folder.glob("attempt-*"):
        if known not in kept:
            known.unlink(missing_ok=True)


def is_noted(folder: Path, record: AttemptRecord) -> bool:
    """Return whether this very record is noted in the agent's folder."""
    return _noted(folder, record.attempt) == record


def note_place(folder: Path, place: str) -> None:
    """Note in the agent's folder the path or URL of the run that its agent works on.

    Raises:
        OSError: It cannot be written.
    """
    (folder / PLACE).write_text(place)


def noted_place(folder: Path) -> str | None:
    """Return the path or URL of the run that the folder's last agent worked on, if it is noted."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (folder / PLACE).read_text()
    return None


def foreign_attempts(folder: Path, store: DurableStore, numbers: Iterable[int]) -> set[int]:
    """Return those of the attempts whose record here is not the one that `store` has.

    One that was not noted counts as the store's own, and so do all if this is the place that was
    noted.

    Raises:
        StorageError, CheckpointDamagedError, NewerFormatError: The store's record cannot be read.
    """
    found: set[int] = set()
    if noted_place(folder) == store.home.location_text:
        return found
    for number in numbers:
        noted = _noted(folder, number)
        if noted is None:
            continue
        try:
            is_own = read_attempt(store, number) == noted
        except ObjectNotFoundError:
            is_own = False
        if not is_own:
            found.add(number)
    return found


def _noted(folder: Path, number: int) -> AttemptRecord | None:
    path = _path(folder, number)
    with contextlib.suppress(OSError, HoldfastError):
        return unseal(path.read_bytes(), AttemptRecord, str(path))
    return None


def _path(folder: Path, number: int) -> Path:
    return folder / f"attempt-{number:09d}.json"
