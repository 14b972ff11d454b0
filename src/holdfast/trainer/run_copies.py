"""Copy a run, or some of its checkpoints, between any two places: directories and buckets.

It writes in the order of a save: the record of the run, those of attempts, and for each checkpoint,
ascending, its images, part records and manifest. So whenever a copy ends, the target is a
run with the checkpoints that were copied until then, and the same copy made again continues there.
Until the last checkpoint is copied, the record says so, and the target is not opened for training.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from holdfast import waits
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import newest_tier
from holdfast.engine.lifecycle.catalog import list_folder, list_stores
from holdfast.engine.lifecycle.commit import is_committed
from holdfast.engine.lifecycle.run import noted_remote, read_run, read_run_record
from holdfast.engine.reading.sources import CheckpointSources, PartSource, find_sources
from holdfast.engine.reading.view import LISTINGS_MAX, View, view_of
from holdfast.engine.tiers.checkpoint_copy import commit_copy, copy_part_once
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    InvalidArgumentError,
    NotARunError,
    ObjectNotFoundError,
    OutOfSpaceError,
    StepNotFoundError,
    StorageError,
)
from holdfast.format.names import ATTEMPTS, CheckpointId, manifest_key
from holdfast.format.records import Manifest
from holdfast.format.sealed import unseal
from holdfast.store.contract import ReadableStore, Store
from holdfast.store.durable import DurableStore
from holdfast.store.location import RunLocation, open_durable
from holdfast.trainer.opening.opening import end_copy, open_copy
from holdfast.trainer.opening.run_access import remote_of

PARTS_AT_ONCE = 4

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the step and the bytes of each part that was copied."""


@dataclass(frozen=True, slots=True)
class CopiedSteps:
    """The steps that a copy has written, those that the target had, and those deleted meanwhile.

    `unread_remote` is the remote tier of the source, which may have further steps that were not
    copied; None: there is none, or the steps were given.
    """

    copied: tuple[int, ...]
    present: tuple[int, ...]
    deleted: tuple[int, ...]
    unread_remote: str | None = None


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
        steps: The steps to copy, of which those that `source` lacks are read from its remote tier;
            all of `source` if it is empty. What is damaged in `source` is read from its remote tier
            in either case.
        progress: Called with the step and the bytes of each part that was copied.

    Raises:
        NotARunError: The source is no run, or the target is another one.
        StepNotFoundError: A given step has no committed checkpoint, or was deleted meanwhile; no
            step is given, and all that were listed were deleted, `LISTINGS_MAX` times.
        CheckpointDamagedError: A checkpoint of the source, in its remote tier too if it has one;
            those before it are copied.
        StorageError, NewerFormatError, InvalidArgumentError: A place.
    """
    clock = SystemClock()
    origin = RunLocation.parse(source)
    durable = open_durable(origin.text, clock)
    record = read_run(durable, origin.text)
    place = RunLocation.parse(target)
    if durable.home.is_at(place.text):
        raise InvalidArgumentError(
            f"copy {origin} to {target}: expected two places, found one and the same"
        )
    if origin.overlaps(place):
        raise InvalidArgumentError(
            f"copy {origin} to {target}: expected two places, found that one is inside the other: "
            "what removes or copies the outer one does so with the inner one too"
        )
    if record.is_unfinished_copy:
        record = msgspec.structs.replace(record, is_unfinished_copy=msgspec.UNSET)
    if record.place is None:
        # Without a place the copy would be taken for the run itself.
        record = msgspec.structs.replace(record, place=durable.home.recorded_place())
    tiers = _Tiers(durable, lambda: remote_of(durable, record.run_id, clock))
    view = tiers.load_view(steps)
    checkpoints = [view.find(step) for step in sorted(set(steps))] if steps else [*view.timeline]
    written = open_copy(target, record, clock)
    deleted: list[int] = []
    for _ in range(LISTINGS_MAX):
        done = _copy_listed(tiers, written, checkpoints, progress, record.run_id)
        deleted += [step for step in done.deleted if step not in deleted]
        shown = ", ".join(map(str, deleted[-10:]))
        if steps and deleted:
            raise StepNotFoundError(f"copy step {shown}: its checkpoint was deleted meanwhile")
        if done.copied or done.present or not deleted:
            end_copy(written, record)
            unread = noted_remote(durable) if not steps else None
            return replace(done, deleted=tuple(deleted), unread_remote=unread)
        # A run that keeps few checkpoints may delete all that were listed before they are copied.
        checkpoints = [*view_of([durable], durable).timeline]
    raise StepNotFoundError(
        f"copy {origin}: expected a committed checkpoint that stays until it is copied, found none "
        f"in {LISTINGS_MAX} listings; steps deleted meanwhile: {shown}; let the run keep more "
        "checkpoints, or copy it again"
    )


class _Tiers:
    """The tiers that are copied from: the run's directory, and its remote tier once it is needed.

    Args:
        durable: The directory.
        find_remote: Opens the remote tier; None: there is none that belongs to the run.
    """

    def __init__(
        self, durable: DurableStore, find_remote: Callable[[], DurableStore | None]
    ) -> None:
        self.stores = [durable]
        self._find_remote = find_remote

    def load_view(self, steps: Sequence[int]) -> View:
        """Return the view of the directory; of the remote tier too if the directory lacks a step.

        Raises:
            StorageError, InvalidArgumentError: The remote tier is needed and cannot be read.
        """
        view = view_of(self.stores, self.stores[0])
        if {*steps} <= {checkpoint.step for checkpoint in view.timeline}:
            return view
        try:
            self.add_remote()
            return view_of(self.stores, newest_tier(self.stores))
        except (StorageError, InvalidArgumentError) as error:
            raise type(error)(
                f"copy {self.stores[0].home.location_text}: it lacks some of the steps, and its "
                f"remote tier cannot be read: {error}"
            ) from error

    def add_remote(self) -> bool:
        """Read from the remote tier too, from now on; return whether that is new.

        Raises:
            StorageError, InvalidArgumentError: It cannot be read.
        """
        remote = self._find_remote() if len(self.stores) == 1 else None
        self.stores += [remote] if remote is not None else []
        return remote is not None


def _copy_listed(
    tiers: _Tiers,
    target: DurableStore,
    listed: Sequence[CheckpointId],
    progress: Progress,
    run_id: str,
) -> CopiedSteps:
    """Copy the attempts and the listed checkpoints, except those that are deleted meanwhile.

    Raises:
        NotARunError: The target was opened meanwhile.
    """
    _copy_attempts(newest_tier(tiers.stores), target)
    copied, present, deleted = list[int](), list[int](), list[int]()
    for checkpoint in listed:
        try:
            is_new = _copy_from_any(tiers, target, checkpoint, progress)
        except HoldfastError:
            _check_not_opened(target, run_id)
            if any(is_committed(source, checkpoint) for source in tiers.stores):
                raise
            deleted.append(checkpoint.step)
        else:
            (copied if is_new else present).append(checkpoint.step)
        _check_not_opened(target, run_id)
    return CopiedSteps(tuple(copied), tuple(present), tuple(deleted))


def _check_not_opened(target: DurableStore, run_id: str) -> None:
    """Check that no program has opened the copy, which then continues as a run of its own.

    Raises:
        NotARunError: One has, after another copy to here had ended. What is copied from then on
            may be removed there.
    """
    place = target.home.location_text
    present_id = read_run_record(target, place).run_id
    if present_id != run_id:
        raise NotARunError(
            f"copy to {place}: expected the unfinished copy of run {run_id}, found that it was "
            f"opened meanwhile and continues as run {present_id} with what was copied until then; "
            "copy to a new place"
        )


def _copy_attempts(source: ReadableStore, target: Store) -> None:
    """Copy the records of all attempts, without which checkpoints are on no timeline."""
    keys = [stored.key for stored in source.list(ATTEMPTS)]
    for key, data in zip(keys, source.get_many(keys), strict=True):
        if isinstance(data, HoldfastError):
            raise data
        target.put(key, data)


def _copy_from_any(
    tiers: _Tiers, target: DurableStore, checkpoint: CheckpointId, progress: Progress
) -> bool:
    """Copy a checkpoint as `_copy_checkpoint` does; what is damaged, from the remote tier."""
    try:
        return _copy_checkpoint(tiers.stores, target, checkpoint, progress)
    except OutOfSpaceError:
        raise
    except (CheckpointDamagedError, StorageError) as error:
        if not is_committed(tiers.stores[0], checkpoint):
            raise
        try:
            is_added = tiers.add_remote()
        except (StorageError, InvalidArgumentError) as remote_error:
            raise type(error)(
                f"{error}; its remote tier cannot be read: {remote_error}"
            ) from remote_error
        if not is_added:
            raise
        log.warning("%s; the remote tier is read too", error)
    return _copy_checkpoint(tiers.stores, target, checkpoint, progress)


def _copy_checkpoint(
    sources: Sequence[DurableStore],
    target: DurableStore,
    checkpoint: CheckpointId,
    progress: Progress,
) -> bool:
    """Copy a committed checkpoint, unless the target has it; return whether it was copied.

    Each block is read from the first of `sources` that has it intact.

    Raises:
        StorageError: the target has another checkpoint of this name.
    """
    manifest = _read_manifest(sources, checkpoint)
    try:
        if target.get(manifest_key(checkpoint)) == manifest:
            return False
        raise StorageError(
            f"copy {checkpoint}: expected no checkpoint of that name in the target or the same "
            "one, found another one; choose a new place"
        )
    except ObjectNotFoundError:
        pass
    listings, _ = list_stores(sources)
    copies = find_sources(checkpoint, sources, listings)
    _copy_parts(copies, target, progress)
    commit_copy(manifest, target, checkpoint, len(copies.parts))
    return True


def _read_manifest(sources: Sequence[DurableStore], checkpoint: CheckpointId) -> bytes:
    """Return the sealed manifest of the first source that has it intact; else raise."""
    key, problem = manifest_key(checkpoint), None
    for source in sources:
        try:
            data = source.get(key)
            unseal(data, Manifest, key)
            return data
        except (CheckpointDamagedError, StorageError) as error:
            if problem is None or isinstance(problem, ObjectNotFoundError):
                problem = error
    assert problem is not None
    raise problem


def _copy_parts(sources: CheckpointSources, target: Store, progress: Progress) -> None:
    listed = list_folder(target, sources.id)

    def copy(copies: Sequence[PartSource]) -> int:
        copy_part_once(copies, target, listed)
        return copies[0].part.image_size_bytes

    with waits.thread_pool(PARTS_AT_ONCE, "holdfast-copy") as pool:
        jobs = [pool.submit(copy, copies) for copies in sources.parts]
        try:
            for job in jobs:
                progress(sources.id.step, waits.result(job))
        finally:
            for job in jobs:
                job.cancel()
