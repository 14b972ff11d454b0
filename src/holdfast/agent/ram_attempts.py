"""Which attempts in this host's RAM are not those of the place that is open.

RAM is found by the run's id. A directory and its remote tier have one id, and a directory that was
put back to an earlier state keeps it. If one of them was trained apart, its attempts have other
identities, and what RAM has of them is no checkpoint of the other. An agent notes the place that it
works on in its folder: RAM of an attempt whose record is missing there was made elsewhere, or the
place has lost the record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from holdfast.engine.lifecycle.attempts import read_attempt
from holdfast.errors import CheckpointDamagedError, ObjectNotFoundError
from holdfast.format.names import AttemptId
from holdfast.store.durable import DurableStore

PLACE = "place"


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


def foreign_attempts(
    folder: Path, store: DurableStore, attempts: Collection[AttemptId]
) -> set[AttemptId]:
    """Return those of the attempts that are not the attempts of `store`.

    One that `store` has no record of is foreign if the last agent worked on another place. At this
    place its record was lost, and whoever finds it decides. The same holds for a damaged record,
    which a reader of the timeline reports with what to do.

    Raises:
        StorageError, NewerFormatError: The store's record cannot be read.
        CheckpointDamagedError: It is damaged, and the last agent worked on another place.
    """
    is_here = noted_place(folder) in (None, store.home.location_text)
    foreign = set()
    for attempt in attempts:
        try:
            is_foreign = read_attempt(store, attempt.number).attempt != attempt
        except ObjectNotFoundError:
            is_foreign = not is_here
        except CheckpointDamagedError:
            if not is_here:
                raise
            is_foreign = False
        if is_foreign:
            foreign.add(attempt)
    return foreign
