"""Follow the checkpoints of a run as they appear, and prepare restores: `ocp.checkpoint_utils`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.interop.orbax.leaf_args import construct_restore_args as construct_restore_args
from holdfast.interop.orbax.run_reader import RunReader


def wait_for_new_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    *,
    until_step: int | None = None,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> int:
    """Wait for a checkpoint after `until_step`; -1 if none appears in time.

    Args:
        checkpoint_dir: The program's directory.
        until_step: None: any checkpoint.
        seconds_to_sleep: The time between two looks.
        timeout: The longest wait in seconds; None waits without a limit.
        timeout_fn: Asked after each timeout: True ends the wait, False continues it.

    Returns:
        The newest step.
    """
    started = time.monotonic()
    while True:
        newest = max(RunReader(Path(os.fspath(checkpoint_dir))).steps(), default=-1)
        if newest > (-1 if until_step is None else until_step):
            return newest
        if timeout is not None and time.monotonic() - started + seconds_to_sleep > timeout:
            if timeout_fn is None or timeout_fn():
                return -1
            started = time.monotonic()
        time.sleep(seconds_to_sleep)


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    *,
    min_interval_secs: float = 0,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[int]:
    """Yield the newest step whenever there is a newer one, until a wait ends; see above."""
    step = None
    while True:
        found = wait_for_new_checkpoint(
            checkpoint_dir,
            until_step=step,
            seconds_to_sleep=seconds_to_sleep,
            timeout=timeout,
            timeout_fn=timeout_fn,
        )
        if found == -1:
            return
        step, started = found, time.monotonic()
        yield step
        time.sleep(max(0.0, min_interval_secs - (time.monotonic() - started)))
