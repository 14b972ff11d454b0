"""Follow the checkpoints of a run as they appear, and prepare restores: `ocp.checkpoint_utils`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.interop.orbax import missing_names, step
from holdfast.interop.orbax.restore_args import construct_restore_args as construct_restore_args
from holdfast.interop.orbax.run_reader import RunReader


@contextlib.contextmanager
def wait_for_new_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    *,
    until_step: int | None = None,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    **names: Any,
) -> Iterator[int]:
    """Wait in a `with` statement for a checkpoint of `until_step` or later.

    Args:
        checkpoint_dir: The program's directory.
        until_step: None: any checkpoint.
        seconds_to_sleep: The time between two looks.
        timeout: The longest wait in seconds; None waits without a limit.
        timeout_fn: Asked at each look after the timeout: True ends the wait.
        names: `step_prefix`, `step_format_fixed_length` and `step_name_format`, as for the manager.

    Returns:
        A context with the newest step; -1 if none appears in time.
    """
    yield _awaited(
        _reader(checkpoint_dir, names), until_step, seconds_to_sleep, timeout, timeout_fn
    )


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    *,
    min_interval_secs: float = 0,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    **names: Any,
) -> Iterator[int]:
    """Yield the newest step whenever there is a newer one, until a wait ends; see above."""
    reader = _reader(checkpoint_dir, names)
    next_step = None
    while True:
        newest = _awaited(reader, next_step, seconds_to_sleep, timeout, timeout_fn)
        if newest == -1:
            return
        next_step, started = newest + 1, time.monotonic()
        yield newest
        time.sleep(max(0.0, min_interval_secs - (time.monotonic() - started)))


IGNORED = ("snapshot_dir", "set_immutable", "ignore_snapshot_errors")
"""Arguments about Orbax's snapshots: an open checkpoint of Holdfast needs none."""


def _reader(checkpoint_dir: str | os.PathLike[str], names: dict[str, Any]) -> RunReader:
    options = {name: value for name, value in names.items() if name not in IGNORED}
    names_steps = options.pop("step_name_format", None)
    return RunReader(
        Path(os.fspath(checkpoint_dir)), names_steps or step.standard_name_format(**options)
    )


def _awaited(
    reader: RunReader,
    until_step: int | None,
    seconds_to_sleep: float,
    timeout: float | None,
    timeout_fn: Callable[[], bool] | None,
) -> int:
    started = time.monotonic()
    while True:
        newest = max(reader.saved_steps(), default=-1)
        if newest >= (0 if until_step is None else until_step):
            return newest
        is_over = timeout is not None and time.monotonic() - started + seconds_to_sleep > timeout
        if is_over and (timeout_fn is None or timeout_fn()):
            return -1
        time.sleep(seconds_to_sleep)


if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("checkpoint_utils")
