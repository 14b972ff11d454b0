"""Checks of what users pass to the manager's calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from holdfast.errors import InvalidArgumentError, StepNotFoundError, StepOrderError
from holdfast.format.names import STEP_MAX
from holdfast.manager.options import RamTier


def check_step(step: object) -> int:
    """`step`, if it is one.

    Raises:
        InvalidArgumentError: it is not an int, is negative, or too large.
    """
    if type(step) is not int:
        raise InvalidArgumentError(
            f"step {step!r}: expected an int, found {type(step).__name__}; convert it with int(...)"
        )
    if not 0 <= step <= STEP_MAX:
        raise InvalidArgumentError(f"step {step}: expected 0 to {STEP_MAX}")
    return step


def check_metrics(metrics: Mapping[str, float] | None) -> dict[str, float] | None:
    """The metrics as plain floats.

    Raises:
        InvalidArgumentError: a name is no string, or a value no number.
    """
    if metrics is None:
        return None
    checked = {}
    for name, value in metrics.items():
        try:
            checked[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"metrics[{name!r}]: expected a number, found {value!r}"
            ) from error
    return checked


def check_timeout(timeout_secs: object) -> None:
    """Checks a timeout.

    Raises:
        InvalidArgumentError: it is neither None nor 0 or more seconds.
    """
    if timeout_secs is None:
        return
    is_number = isinstance(timeout_secs, int | float) and not isinstance(timeout_secs, bool)
    if not is_number or not timeout_secs >= 0:  # type: ignore[operator]
        raise InvalidArgumentError(
            f"timeout_secs={timeout_secs!r}: expected None or seconds, 0 or more"
        )


def check_ram(ram: object) -> None:
    """Checks the RAM tier.

    Raises:
        InvalidArgumentError: it is neither a RamTier nor None.
    """
    if ram is not None and not isinstance(ram, RamTier):
        raise InvalidArgumentError(
            f"CheckpointManager(ram=...): expected a RamTier or None, found {ram!r}"
        )


def raise_nothing_saved(directory: Path) -> NoReturn:
    """Raises that a run has no checkpoint."""
    raise StepNotFoundError(f"restore: nothing was saved in {directory} yet")


def raise_step_order(step: int, last: int) -> NoReturn:
    """Raises that steps went backwards."""
    raise StepOrderError(
        f"save step {step}: steps must grow, and the run is at step {last}; call resume() or "
        "restore(step) to go on from an earlier one, or use a new directory"
    )
