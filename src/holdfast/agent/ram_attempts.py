"""The records of the attempts whose checkpoints are in this host's RAM, as these attempts began.

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

from holdfast.agent.ram_place import noted_place
from holdfast.engine.lifecycle.attempts import read_attempt
from holdfast.errors import HoldfastError, ObjectNotFoundError
from holdfast.format.records import AttemptRecord
from holdfast.format.sealed import seal, unseal
from holdfast.store.durable import DurableStore


def note_attempt(folder: Path, record: AttemptRecord, others: Collection[int]) -> None:
    """Note an attempt in the agent's folder, and forget all but that and the `others`.

    Raises:
        OSError: It cannot be written.
    """
    path = _path(folder, record.attempt)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(seal(record))
    unfinished.replace(path)
    kept = {_path(folder, number) for number in (record.attempt, *others)}
    for known in folder.glob("attempt-*"):
        if known not in kept:
            known.unlink(missing_ok=True)


def foreign_attempts(folder: Path, store: DurableStore, numbers: Iterable[int]) -> set[int]:
    """Return those of the attempts whose record here is not the one that `store` has.

    One that was not noted counts as the store's own, and so do all if this is the place that was
    noted, and the same directory.

    Raises:
        StorageError, CheckpointDamagedError, NewerFormatError: The store's record cannot be read.
    """
    found: set[int] = set()
    place = noted_place(folder)
    if place is not None and place.is_at(store.home):
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
