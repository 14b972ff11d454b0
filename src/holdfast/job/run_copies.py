"""Copy a run, or some of its checkpoints, between any two places: directories and buckets.

It writes in the order of a save: the record of the run, those of attempts, and for each checkpoint,
ascending, its images, part records and manifest. So whenever a copy ends, the target is a
run with the checkpoints that were copied until then, and the same copy made again continues there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.catalog import list_stores
from holdfast.engine.lifecycle.run import read_run
from holdfast.engine.reading.sources import find_sources
from holdfast.engine.reading.view import view_of
from holdfast.engine.transfer.copy import copy_part
from holdfast.errors import (
    HoldfastError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StepNotFoundError,
    StorageError,
)
from holdfast.format.names import ATTEMPTS, CheckpointId, manifest_key
from holdfast.job.opening import open_copy
from holdfast.store.contract import ReadableStore, Store
from holdfast.store.location import RunLocation, open_durable

PARTS_AT_ONCE = 4

Progress = Callable[[int, int], None]
"""Called with the step and the bytes of each part that was copied."""


@dataclass(frozen=True, slots=True)
class CopiedSteps:
    """The steps that a copy has written, those that the target had, and those deleted meanwhile."""

    copied: tuple[int, ...]
    present: tuple[int, ...]
    deleted: tuple[int, ...]


def copy_run(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    steps: Sequence[int] = (),
    progress: Progress = lambda step, size_bytes: None,
) -> CopiedSteps:
    """Copy the durable checkpoints of the run's timeline at `source` to `target`, ascending.

    Every digest is checked. The source may be trained meanwhile. Events and logs are not copied.

    Args:
        source: A path or a URL.
        target: A path or a URL: a new one, or that of an unfinished copy of this run.
        steps: The steps to copy; all if it is empty.
        progress: Called with the step and the bytes of each part that was copied.

    Raises:
        NotARunError: The source is no run, or the target is another one.
        StepNotFoundError: A given step has no committed checkpoint, or was deleted meanwhile.
        CheckpointDamagedError: A checkpoint of the source; those before it are copied.
        StorageError, NewerFormatError, InvalidArgumentError: A place.
    """
    clock = SystemClock()
    origin = RunLocation.parse(source)
    durable = open_durable(origin.text, clock)
    record = read_run(durable, origin.text)
    if durable.home.is_at(RunLocation.parse(target).text):
        raise InvalidArgumentError(
            f"copy {origin} to {target}: expected two places, found one and the same"
        )
    if record.place is None:
        # Without a place the copy would be taken for the run itself.
        record = msgspec.structs.replace(record, place=durable.home.place())
    view = view_of([durable], durable)
    found = [view.find(step) for step in sorted(set(steps))] if steps else [*view.timeline]
    written = open_copy(target, record, clock)
    _copy_attempts(durable, written)
    done: dict[str, list[int]] = {"copied": [], "present": [], "deleted": []}
    for checkpoint in found:
        try:
            is_new = _copy_checkpoint(durable, written, checkpoint, progress)
        except HoldfastError as error:
            if not _was_deleted(durable, checkpoint):
                raise
            if steps:
                raise StepNotFoundError(
                    f"copy step {checkpoint.step}: its checkpoint was deleted meanwhile"
                ) from error
            done["deleted"].append(checkpoint.step)
        else:
            done["copied" if is_new else "present"].append(checkpoint.step)
    return CopiedSteps(**{name: tuple(of_name) for name, of_name in done.items()})


def _copy_attempts(source: ReadableStore, target: Store) -> None:
    """Copy the records of all attempts, without which checkpoints are on no timeline."""
    keys = [stored.key for stored in source.list(ATTEMPTS)]
    for key, data in zip(keys, source.get_many(keys), strict=True):
        if isinstance(data, HoldfastError):
            raise data
        target.put(key, data)


def _copy_checkpoint(
    source: ReadableStore, target: Store, checkpoint: CheckpointId, progress: Progress
) -> bool:
    """Copy a committed checkpoint, unless the target has it; return whether it was copied.

    Raises:
        StorageError: the target has another checkpoint of this name.
    """
    key = manifest_key(checkpoint)
    manifest = source.get(key)
    try:
        if target.get(key) == manifest:
            return False
        raise StorageError(
            f"copy {checkpoint}: expected no checkpoint of that name in the target or the same "
            "one, found another one; choose a new place"
        )
    except ObjectNotFoundError:
        pass
    _copy_parts(source, target, checkpoint, progress)
    target.put_if_absent(key, manifest)
    return True


def _copy_parts(
    source: ReadableStore, target: Store, checkpoint: CheckpointId, progress: Progress
) -> None:
    listings, _ = list_stores([source])
    found = find_sources(checkpoint, [source], listings)
    parts = [copy.part for (copy,) in found.parts]

    def copy(index: int) -> int:
        copy_part(source, target, parts[index], found.layouts)
        return parts[index].image_size_bytes

    with ThreadPoolExecutor(PARTS_AT_ONCE, "holdfast-copy") as pool:
        jobs = [pool.submit(copy, index) for index in range(len(parts))]
        try:
            for job in jobs:
                progress(checkpoint.step, job.result())
        finally:
            for job in jobs:
                job.cancel()


def _was_deleted(source: ReadableStore, checkpoint: CheckpointId) -> bool:
    try:
        source.get(manifest_key(checkpoint))
    except ObjectNotFoundError:
        return True
    return False
