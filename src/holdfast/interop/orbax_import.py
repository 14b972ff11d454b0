"""Import checkpoints that Orbax wrote: each step becomes a checkpoint of a run.

Orbax reads its own files. The result is a run as `holdfast.interop.orbax` saves them.

Invariants:
- One step is in memory at a time.
- A step is in the run whole, or not at all. An import that ended early is continued by another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import holdfast
from holdfast.errors import (
    CheckpointDamagedError,
    InvalidArgumentError,
    NotARunError,
    StepOrderError,
    UnsupportedLeafError,
)
from holdfast.interop.orbax_directory import (
    JSON_FILE,
    SUCCESS,
    OrbaxItem,
    OrbaxLeaf,
    OrbaxStep,
    find_steps,
    read_json,
    read_leaves,
    read_step,
)
from holdfast.policy.preservation_policy import LatestN
from holdfast.policy.save_decision_policy import SpecificStepsPolicy

try:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from etils import epath
except ImportError as error:
    raise InvalidArgumentError(
        f"Orbax's files are read and written by Orbax, which cannot be imported ({error}): "
        "pip install 'holdfast-checkpoint[orbax]'"
    ) from error

from holdfast.interop.orbax import args as own_args
from holdfast.interop.orbax import item_forms, outlines
from holdfast.interop.orbax.item_forms import FolderState
from holdfast.interop.orbax.records import DEFAULT_ITEM, RECORD, ItemRecord, StepRecord
from holdfast.interop.orbax.run_reader import RunReader
from holdfast.interop.orbax.shared_run import NEVER

_EMPTY: dict[str, Any] = {"None": None, "NamedTuple": None, "Dict": {}, "List": [], "Tuple": ()}
_SHOWN_MAX = 400


def import_orbax(
    source: str | os.PathLike[str],
    run: str | os.PathLike[str],
    progress: Callable[[int, bool], None] = lambda step, is_new: None,
) -> None:
    """Save each step of an Orbax directory in a run. Steps that the run has are left as they are.

    Args:
        source: The directory of an Orbax `CheckpointManager`, or one of its checkpoints.
        run: The run, as for `holdfast.CheckpointManager`. It is made if it is missing.
        progress: Called for each step, with True when it is durable, or False if the run had it.

    Raises:
        InvalidArgumentError: There is no checkpoint at `source`, or the run has another one of the
            same step.
        StepOrderError: The run has a later step than one that it lacks.
        CheckpointDamagedError: A file cannot be read; the message names it. The steps before it are
            in the run.
        UnsupportedLeafError: A leaf is of a type that another package registered with Orbax.
        HoldfastError: The run cannot be opened or written.
    """
    steps = find_steps(Path(os.path.abspath(source)))
    missing = _missing_steps(steps, run)
    for step, _ in steps:
        if step not in missing:
            progress(step, False)
    if not missing:
        return
    with contextlib.ExitStack() as opened, jax.enable_x64(True):
        manager: holdfast.CheckpointManager | None = None
        for step, path in missing.items():
            found = read_step(step, path)
            state = _read_state(found)
            if manager is None:
                # Only now, so that a directory that cannot be read leaves no empty run.
                manager = opened.enter_context(_manager(run))
            manager.save(step, state, metrics=_numbers(found.metrics), force=True)
            del state
            manager.wait_until_finished()
            progress(step, True)


def _manager(run: str | os.PathLike[str]) -> holdfast.CheckpointManager:
    """Return a manager that keeps every checkpoint and saves none by itself."""
    return holdfast.CheckpointManager(
        run,
        save_decision_policy=SpecificStepsPolicy([NEVER]),
        preservation_policy=LatestN(None),
        ram=None,
        preemption_signals=(),
        framework="jax",
    )


def _missing_steps(steps: list[tuple[int, Path]], run: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the steps that the run lacks, ascending, with their folders."""
    try:
        with holdfast.open_run(run) as opened:
            present = opened.all_steps()
    except NotARunError:
        return dict(steps)
    reader = RunReader(Path(os.fspath(run)))
    last = max(present, default=-1)
    missing = {}
    for step, path in steps:
        if step not in present:
            missing[step] = path
            if step < last:
                raise StepOrderError(
                    f"import {path}: expected a step after {last}, the last one of {run}, because "
                    "checkpoints of a run are in the order of training; import to another directory"
                )
            continue
        found = read_step(step, path)
        if found.is_dated and reader.step_record(step).time != found.time:
            raise InvalidArgumentError(
                f"import {path}: {run} has another checkpoint of step {step}; import to another "
                "directory"
            )
    return missing


def _read_state(found: OrbaxStep) -> dict[str, Any]:
    """Return the state that the run saves for a step."""
    items = {item.name: _read_item(item) for item in found.items}
    record = StepRecord(
        items={name: record for name, (_, record) in items.items()},
        is_default=[*items] == [DEFAULT_ITEM],
        time=found.time,
        metrics=found.metrics,
        custom_metadata=found.custom_metadata,
    )
    return {name: value for name, (value, _) in items.items()} | {RECORD: record.encoded()}


def _numbers(metrics: Any) -> dict[str, float] | None:
    """Return the metrics that `holdfast ls` can show."""
    found = {
        name: float(value)
        for name, value in (metrics.items() if isinstance(metrics, dict) else ())
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return found or None


def _read_item(item: OrbaxItem) -> tuple[Any, ItemRecord]:
    """Return what is saved for an item, and its record.

    Raises:
        CheckpointDamagedError: It cannot be read.
    """
    match item.kind:
        case "json":
            value = read_json(item.path / JSON_FILE)
            return item_forms.saved(own_args.JsonSave(value), item.name)
        case "folder":
            return FolderState(_read_files(item.path)), ItemRecord(
                kind="folder", handler=item.handler or "another package"
            )
        case "tree":
            return _read_tree(item)
        case "array":
            leaves, _ = read_leaves(item.path)
            given = _restore_args(leaves[0]) if leaves else ocp.RestoreArgs()
            args = ocp.args.ArrayRestore(restore_args=given)
            value = _restore(item.path, ocp.ArrayCheckpointHandler(), args)
            return item_forms.saved(own_args.ArraySave(value), item.name)
        case "key":
            value = _restore(
                item.path, ocp.JaxRandomKeyCheckpointHandler(), ocp.args.JaxRandomKeyRestore()
            )
            return item_forms.saved(own_args.JaxRandomKeySave(value), item.name)
    value = _restore(
        item.path, ocp.NumpyRandomKeyCheckpointHandler(), ocp.args.NumpyRandomKeyRestore()
    )
    return item_forms.saved(own_args.NumpyRandomKeySave(value), item.name)


def _read_files(folder: Path) -> dict[str, bytes]:
    try:
        return {
            str(file.relative_to(folder)): file.read_bytes()
            for file in sorted(folder.rglob("*"))
            if file.is_file() and file.name != SUCCESS
        }
    except OSError as error:
        raise CheckpointDamagedError(f"import {folder}: expected files, found {error}") from error


def _read_tree(item: OrbaxItem) -> tuple[Any, ItemRecord]:
    leaves, custom = read_leaves(item.path)
    wanted = outlines.built([(leaf.path, _restore_args(leaf)) for leaf in leaves])
    args = ocp.args.PyTreeRestore(restore_args=wanted)
    tree = _restore(item.path, ocp.PyTreeCheckpointHandler(), args)
    with_paths, _ = outlines.flattened(tree)
    outline = outlines.outline_of(with_paths)
    state = {
        saved.path_keys: leaf
        for saved, (_, leaf) in zip(outline.leaves, with_paths, strict=True)
        if saved.kind not in ("none", "empty")
    }
    outline = _as_in_orbax(outline, {leaf.path: leaf.sharding for leaf in leaves})
    return outlines.nested(state), ItemRecord(kind="tree", outline=outline, custom_metadata=custom)


def _as_in_orbax(outline: outlines.TreeOutline, placed: dict[Any, Any]) -> outlines.TreeOutline:
    """Return an outline with the shardings with which arrays were saved by Orbax.

    Orbax stores None for None and for nodes without leaves, such as `optax.EmptyState()`.
    """
    shardings = list(outline.shardings)
    leaves = []
    for leaf in outline.leaves:
        if leaf.kind == "none":
            leaves.append(dataclasses.replace(leaf, dtype=outlines.NODE))
            continue
        sharding = placed.get(leaf.path)
        if leaf.sharding is None or sharding is None:
            leaves.append(leaf)
            continue
        if sharding not in shardings:
            shardings.append(sharding)
        leaves.append(dataclasses.replace(leaf, sharding=shardings.index(sharding)))
    return outlines.TreeOutline(leaves=tuple(leaves), shardings=tuple(shardings))


def _restore_args(leaf: OrbaxLeaf) -> Any:
    if leaf.value_type in _EMPTY:
        return _EMPTY[leaf.value_type]
    if leaf.value_type == "jax.Array":
        host = jax.local_devices(backend="cpu")[0]
        return ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(host))
    if leaf.value_type == "np.ndarray":
        return ocp.RestoreArgs(restore_type=np.ndarray)
    if leaf.value_type in ("scalar", "string"):
        return ocp.RestoreArgs()
    raise UnsupportedLeafError(
        f"import {outlines.shown(leaf.path)}: expected an array, a number or a string, found "
        f"{leaf.value_type}, which another package registered with Orbax"
    )


def _restore(path: Path, handler: Any, args: Any) -> Any:
    """Return what Orbax reads from `path`.

    Raises:
        CheckpointDamagedError: Orbax cannot read it.
    """
    try:
        with _quiet(), contextlib.closing(handler):
            return handler.restore(epath.Path(path), args=args)
    except Exception as error:
        # Orbax raises the class itself. The file is named by the first error of the chain.
        first: BaseException = error
        while first.__cause__ is not None or first.__context__ is not None:
            first = first.__cause__ or first.__context__ or first
        found = str(first).partition(" [tensorstore_spec=")[0].partition("\n")[0] or repr(first)
        raise CheckpointDamagedError(
            f"import {path}: expected an item that Orbax can read, found {found[:_SHOWN_MAX]}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax's warnings off the terminal: they are for programs that restore a state."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
