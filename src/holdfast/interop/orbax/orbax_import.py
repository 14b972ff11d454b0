"""Import checkpoints that Orbax wrote: each step becomes a checkpoint of a run.

Orbax reads its own files. The result is a run as `holdfast.interop.orbax` saves them.

Invariants:
- Trees are read in groups of leaves into a scratch file: memory is needed for the largest array.
- A step is in the run whole, or not at all. An import that ended early is continued by another one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import holdfast
from holdfast.errors import (
    InvalidArgumentError,
    NotARunError,
    StepOrderError,
)
from holdfast.interop.orbax.orbax_directory import OrbaxStep, find_steps, read_step
from holdfast.interop.orbax.orbax_files import read_item
from holdfast.interop.orbax.records import DEFAULT_ITEM, RECORD, StepRecord
from holdfast.interop.orbax.run_reader import RunReader
from holdfast.interop.orbax.shared_run import NEVER
from holdfast.interop.scratch_memory import scratch_folder
from holdfast.policy.preservation_policy import LatestN
from holdfast.policy.save_decision_policy import SpecificStepsPolicy


def import_orbax(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    progress: Callable[[int, bool], None] = lambda step, is_new: None,
) -> None:
    """Save each step of an Orbax directory in a run. Steps that the run has are left as they are.

    Args:
        source: The directory of an Orbax `CheckpointManager`, or one of its checkpoints.
        directory: The run's, as for `holdfast.CheckpointManager`. It is made if it is missing.
        progress: Called for each step, with True when it is durable, or False if the run had it.

    Raises:
        InvalidArgumentError: There is no checkpoint at `source`, or the run has another one of the
            same step, or one that Holdfast's own calls saved.
        StepOrderError: The run has a later step than one that it lacks.
        CheckpointDamagedError: A file cannot be read; the message names it. The steps before it are
            in the run.
        UnsupportedLeafError: A leaf is of a type that another package registered with Orbax.
        HoldfastError: The run cannot be opened or written.
    """
    steps = find_steps(Path(os.path.abspath(source)))
    missing = _missing_steps(steps, directory)
    for step, _ in steps:
        if step not in missing:
            progress(step, False)
    if not missing:
        return
    with contextlib.ExitStack() as opened, jax.enable_x64(True):
        manager: holdfast.CheckpointManager | None = None
        for step, path in missing.items():
            content = read_step(step, path)
            state = _read_state(content, scratch_folder(directory))
            if manager is None:
                # Only now, so that a directory that cannot be read leaves no empty run.
                manager = opened.enter_context(_manager(directory))
            manager.save(step, state, metrics=_numbers(content.metrics), force=True)
            del state
            manager.wait_until_finished()
            progress(step, True)


def _manager(directory: str | os.PathLike[str]) -> holdfast.CheckpointManager:
    """Return a manager that keeps every checkpoint and saves none by itself."""
    return holdfast.CheckpointManager(
        directory,
        save_decision_policy=SpecificStepsPolicy([NEVER]),
        preservation_policy=LatestN(None),
        ram=None,
        process=holdfast.ProcessHooks(preemption_signals=()),
        framework="jax",
    )


def _missing_steps(
    steps: list[tuple[int, Path]], directory: str | os.PathLike[str]
) -> dict[int, Path]:
    """Return the steps that the run lacks, ascending, with their folders."""
    try:
        with holdfast.open_run(directory) as opened:
            present = opened.all_steps()
    except NotARunError:
        return dict(steps)
    reader = RunReader(Path(os.fspath(directory)))
    last = max(present, default=-1)
    missing = {}
    for step, path in steps:
        if step not in present:
            missing[step] = path
            if step < last:
                raise StepOrderError(
                    f"import {path}: expected a step after {last}, the last one of {directory}, "
                    "because checkpoints of a run are in the order of training; import to another "
                    "directory"
                )
            continue
        content = read_step(step, path)
        if content.is_dated and reader.step_record(step).time != content.time:
            raise InvalidArgumentError(
                f"import {path}: {directory} has another checkpoint of step {step}; import to "
                "another directory"
            )
    if missing:
        _check_openable(reader, present, directory)
    return missing


def _check_openable(
    reader: RunReader, present: Sequence[int], directory: str | os.PathLike[str]
) -> None:
    """Check that `holdfast.interop.orbax` opens the run, which it does if it saved all steps."""
    for step in present:
        try:
            reader.step_record(step)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"import to {directory}: expected a new run, or one of imports and of "
                f"holdfast.interop.orbax, found step {step}, which Holdfast's own calls saved; "
                "import to another directory"
            ) from error


def _read_state(found: OrbaxStep, folder: Path) -> dict[str, Any]:
    """Return the state that the run saves for a step; trees are in scratch files in `folder`."""
    items = {item.name: read_item(item, folder) for item in found.items}
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
    numbers = {
        name: float(value)
        for name, value in (metrics.items() if isinstance(metrics, dict) else ())
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return numbers or None
