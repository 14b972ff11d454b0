"""Checks of what users pass to the manager's calls."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from holdfast.adapt.contract import RestoreRequest
from holdfast.errors import InvalidArgumentError, StepNotFoundError, StepOrderError
from holdfast.format.names import STEP_MAX
from holdfast.format.paths import NO_PREFIXES, PathPrefixes
from holdfast.job.options import RamTier


def check_step(step: object) -> int:
    """Return `step` as an int. Integers of NumPy and JAX are taken as well; bools are not.

    Raises:
        InvalidArgumentError: it is not an integer, is negative, or too large.
    """
    try:
        # A bool is an int in Python, and hardly ever meant as a step.
        number = None if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise InvalidArgumentError(
            f"step {step!r}: expected an int, found {type(step).__name__}; convert it with int(...)"
        )
    if not 0 <= number <= STEP_MAX:
        raise InvalidArgumentError(f"step {number}: expected 0 to {STEP_MAX}")
    return number


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


def check_timeout(timeout_secs: float | None) -> float | None:
    """Return a timeout that is one.

    Raises:
        InvalidArgumentError: it is neither None nor 0 or more seconds.
    """
    if timeout_secs is None:
        return None
    is_number = isinstance(timeout_secs, int | float) and not isinstance(timeout_secs, bool)
    if not is_number or not timeout_secs >= 0:
        raise InvalidArgumentError(
            f"timeout_secs={timeout_secs!r}: expected None or seconds, 0 or more"
        )
    return timeout_secs


def check_request(like: object, only: object, partial: object, cast: object) -> RestoreRequest:
    """Return what a restore was asked for.

    Raises:
        InvalidArgumentError: a prefix is no string; or `partial` or `cast` is given without `like`.
    """
    prefixes = _prefixes("only", only)
    allowed = _prefixes("partial", partial) or NO_PREFIXES
    if not isinstance(cast, bool):
        raise InvalidArgumentError(f"cast={cast!r}: expected True or False")
    if like is None and (allowed.names or cast):
        raise InvalidArgumentError(
            f"{'partial' if allowed.names else 'cast'}: expected a state as like=..., with which "
            "the checkpoint is compared, found none"
        )
    return RestoreRequest(like=like, only=prefixes, partial=allowed, cast=cast)


def _prefixes(name: str, given: object) -> PathPrefixes | None:
    if given is None:
        return None
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple | set | frozenset) or not all(
        isinstance(one, str) and one.strip("/") for one in names
    ):
        raise InvalidArgumentError(
            f"{name}={given!r}: expected a path prefix such as 'params' or 'opt/0/mu', or a list "
            "of them"
        )
    if not names and name == "only":
        raise InvalidArgumentError("only=[]: expected at least one path prefix, found none")
    return PathPrefixes(tuple(one.strip("/") for one in names))


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


def raise_step_order(step: int, last: int, read: int | None) -> NoReturn:
    """Raise that steps went backwards; `read` is the step that `restore` has read since."""
    hint = "" if read is None else f"restore({read}) only reads, the run stays where it is; "
    shown = "N" if read is None else str(read)
    raise StepOrderError(
        f"save step {step}: steps must grow, and the run is at step {last}; {hint}to go on from an "
        f"earlier step, call resume(state, step={shown}), which abandons the later ones, or use a "
        "new directory"
    )
