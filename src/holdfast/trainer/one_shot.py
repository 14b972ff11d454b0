"""One state in one directory: `save` writes it and `load` reads it back, without an agent.

The directory is a run with one attempt and one checkpoint, of step 0, so everything that reads runs
reads it. `holdfast.building` has the invariants of how it is built and put in its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.adapt.contract import ArrayOutline, Framework, Snapshot
from holdfast.adapt.detect import find_framework
from holdfast.building.directory import (
    SAVED,
    begin_run,
    check_replaceable,
    locked_directory,
    put_in_place,
    remove_leftovers,
)
from holdfast.clock import Clock, SystemClock
from holdfast.engine.lifecycle.commit import commit
from holdfast.engine.saving.part_writer import write_part
from holdfast.errors import (
    CheckpointDamagedError,
    InvalidArgumentError,
    NotARunError,
    StepNotFoundError,
    StorageError,
    translated,
)
from holdfast.store.disk import DiskStore
from holdfast.store.location import RunLocation
from holdfast.trainer import arguments
from holdfast.trainer.opening.proof import place_to_write
from holdfast.trainer.planning import Planner, Taking
from holdfast.trainer.run import Run

REPLACED_MAX = 20
"""How often `load` begins again because its directory was replaced."""


def save(
    directory: str | os.PathLike[str],
    state: object,
    *,
    metrics: Mapping[str, float] | None = None,
    overwrite: bool = False,
) -> None:
    """Save `state` to the new directory `directory`; it is durable when this returns.

    Args:
        directory: the path to make; its parent must exist.
        state: any state that `CheckpointManager.save` takes. JAX arrays that are sharded over
            several processes are refused.
        metrics: numbers by name, as for `CheckpointManager.save`.
        overwrite: replace what an earlier `save` made there. It stays until the new one is
            complete.

    Raises:
        InvalidArgumentError: `directory` exists; with `overwrite`, no `save` made all of it. Or an
            argument is of another type.
        UnsupportedLeafError: a leaf cannot be saved.
        OutOfSpaceError, StorageError: it could not be written. In all cases nothing has changed.
    """
    target = _local(place_to_write(directory))
    checked = arguments.check_metrics(metrics)
    arguments.check_flag("overwrite", overwrite)
    clock = SystemClock()
    with translated("save to", target):
        _check_target(target, overwrite, clock)
        snapshot = _snapshot(find_framework(), state)
        remove_leftovers(target)
        try:
            with locked_directory(target, clock) as building:
                _write(DiskStore(building, clock), target, snapshot, checked, clock)
                check = partial(check_replaceable, directory=target, clock=clock)
                put_in_place(building, target, check if overwrite else None)
        finally:
            snapshot.release()
        remove_leftovers(target)


def load(
    directory: str | os.PathLike[str],
    *,
    like: Any = None,
    only: str | Sequence[str] | None = None,
    partial: str | Sequence[str] | None = None,
    cast: bool = False,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    framework: str | None = None,
) -> Any:
    """Read the state that `save` wrote to `directory`; of a run, that of its newest checkpoint.

    Arguments and errors are those of `Run.restore`, and of `open_run`. If a `save` with `overwrite`
    replaces the directory meanwhile, the call begins again with the new one.
    """
    for tries_left in range(REPLACED_MAX, -1, -1):
        stamp = _stamp(directory)
        try:
            with Run(directory) as run:
                return run.restore(
                    like=like,
                    only=only,
                    partial=partial,
                    cast=cast,
                    rename=rename,
                    framework=framework,
                )
        except (NotARunError, StepNotFoundError, CheckpointDamagedError, StorageError):
            # What was being read is removed by whoever has replaced it.
            if not tries_left or _stamp(directory) == stamp:
                raise
    raise AssertionError("the last try returns or raises")


def _stamp(directory: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """Return what changes when another directory takes its place; None for a URL, or nothing."""
    location = RunLocation.parse(directory)
    try:
        state = None if location.is_url else os.stat(location.folder)
    except OSError:
        return None
    # Numbers of inodes are used again.
    return (state.st_dev, state.st_ino, state.st_ctime_ns) if state is not None else None


def _local(directory: object) -> Path:
    location = RunLocation.parse(directory)
    if location.is_url:
        raise InvalidArgumentError(
            f"save to {location}: expected a path, found a URL; give a path, or save to "
            "the URL with a CheckpointManager"
        )
    return location.folder


def _check_target(directory: Path, overwrite: bool, clock: Clock) -> None:
    """Check that `directory` may be made or replaced; nothing else is ever overwritten."""
    if not directory.parent.is_dir():
        raise InvalidArgumentError(
            f"save to {directory}: expected a directory {directory.parent} to make it in, found "
            "none; make it before"
        )
    if not os.path.lexists(directory):
        return
    if not overwrite:
        raise InvalidArgumentError(
            f"save to {directory}: it exists; give a new path, or pass overwrite=True"
        )
    check_replaceable(directory, directory=directory, clock=clock)


def _snapshot(framework: Framework, tree: object) -> Snapshot:
    """Return `tree`, fixed, as one process's own.

    Raises:
        InvalidArgumentError: some of an array is on other processes alone.
    """
    snapshot = framework.snapshot(tree)
    outline = snapshot.outline
    if any(ranks != (0,) for array in outline.arrays for ranks in array.placement.holders):
        rank = framework.processes().rank
        arrays = tuple(_as_own(array, rank) for array in outline.arrays)
        snapshot.outline = replace(outline, arrays=arrays)
    return snapshot


def _as_own(array: ArrayOutline, rank: int) -> ArrayOutline:
    placed = array.placement
    if any(rank not in ranks and ranks != (0,) for ranks in placed.holders):
        raise InvalidArgumentError(
            f"save {'/'.join(map(str, array.path))}: expected an array that this process holds "
            "whole, found one that is sharded over several processes; save it with a "
            "CheckpointManager, or gather it before"
        )
    return replace(array, placement=replace(placed, holders=((0,),) * len(placed.holders)))


def _write(
    store: DiskStore,
    directory: Path,
    snapshot: Snapshot,
    metrics: Mapping[str, float] | None,
    clock: Clock,
) -> None:
    """Write a whole run to `store`, whose directory will be renamed to `directory`."""
    run_id = begin_run(store, directory, clock)
    plan = Planner(run_id, rank=0, count=1).plan(
        snapshot, Taking(id=SAVED, time=clock.now(), metrics=metrics)
    )
    write_part(store, plan, snapshot.chunk_bytes)
    commit(store, SAVED, 1)
