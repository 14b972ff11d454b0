"""Check the arguments that users pass to the manager's calls."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from holdfast.adapt.contract import ArraysOf, RestoreRequest
from holdfast.errors import InvalidArgumentError, StepNotFoundError, StepOrderError
from holdfast.format.names import STEP_MAX
from holdfast.format.paths import NO_PREFIXES, PathPrefixes
from holdfast.format.renaming import NO_RENAMING, Renaming
from holdfast.observe.events.schema import TRAINING_WAITS
from holdfast.policy.loss_guard import LossGuard
from holdfast.policy.preservation_policy import (
    AnyPreservationPolicy,
    BestN,
    PreservationPolicy,
)
from holdfast.trainer.options import HostNetwork, ProcessHooks, RamTier, ReplicaCheck

log = logging.getLogger(__name__)


def check_step(step: object) -> int:
    """Return `step` as an int. Integers of NumPy and JAX are accepted; bools are not.

    Raises:
        InvalidArgumentError: It is not an integer, is negative, or exceeds `STEP_MAX`.
    """
    try:
        # A bool is an int in Python, but passing one as a step is almost certainly a mistake.
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
    """Return the metrics with names as strings and values as plain floats.

    Raises:
        InvalidArgumentError: It is no mapping, or a value is not a number that a float can hold.
    """
    if metrics is None:
        return None
    if not isinstance(metrics, Mapping):
        raise InvalidArgumentError(
            f"metrics={metrics!r}: expected a dict of numbers by name, found "
            f"{type(metrics).__name__}"
        )
    checked = {}
    for name, value in metrics.items():
        try:
            checked[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"metrics[{name!r}]: expected a number, found {value!r}"
            ) from error
        except OverflowError as error:
            raise InvalidArgumentError(
                f"metrics[{name!r}]: expected a number that a float can hold, found a larger one"
            ) from error
    return checked


def check_wait_reason(reason: object) -> int:
    """Return the position of a reason in `TRAINING_WAITS`.

    Raises:
        InvalidArgumentError: It is none of them.
    """
    try:
        return TRAINING_WAITS.index(reason)
    except ValueError:
        raise InvalidArgumentError(
            f"waiting: expected a reason out of {', '.join(map(repr, TRAINING_WAITS))}, "
            f"found {reason!r}"
        ) from None


def check_timeout(timeout_secs: float | None) -> float | None:
    """Return `timeout_secs` unchanged if it is valid.

    Raises:
        InvalidArgumentError: It is neither None nor a number of at least 0.
    """
    if timeout_secs is None:
        return None
    is_number = isinstance(timeout_secs, int | float) and not isinstance(timeout_secs, bool)
    if not is_number or not timeout_secs >= 0:
        raise InvalidArgumentError(
            f"timeout_secs={timeout_secs!r}: expected None or seconds, 0 or more"
        )
    return timeout_secs


def check_flag(name: str, given: object) -> bool:
    """Return an argument that is True or False.

    Raises:
        InvalidArgumentError: It is neither.
    """
    if not isinstance(given, bool):
        raise InvalidArgumentError(f"{name}={given!r}: expected True or False")
    return given


def check_request(
    like: object, only: object, partial: object, cast: object, rename: object, arrays: ArraysOf
) -> RestoreRequest:
    """Return what a restore was asked for.

    Raises:
        InvalidArgumentError: a prefix is no string; `partial` or `cast` is given without `like`; or
            `rename` is neither a dict of strings nor a function.
    """
    prefixes = _prefixes("only", only)
    allowed = _prefixes("partial", partial) or NO_PREFIXES
    casts = check_flag("cast", cast)
    if like is None and (allowed.names or casts):
        raise InvalidArgumentError(
            f"{'partial' if allowed.names else 'cast'}: expected a state as like=..., with which "
            "the checkpoint is compared, found none"
        )
    return RestoreRequest(
        like=like,
        only=prefixes,
        partial=allowed,
        cast=casts,
        arrays=arrays,
        renaming=_renaming(rename),
    )


def check_resume(
    state: object, only: object, partial: object, cast: object, rename: object
) -> RestoreRequest:
    """Return what `resume` was asked for.

    Raises:
        InvalidArgumentError: A prefix is no string, or there is no state.
    """
    if state is None:
        raise InvalidArgumentError("resume: expected the initial state, found None")
    request = check_request(state, only, partial, cast, rename, ArraysOf.EITHER)
    renaming = replace(request.renaming, is_repeated=True)
    return replace(request, call="resume", renaming=renaming)


def _renaming(rename: object) -> Renaming:
    if rename is None:
        return NO_RENAMING
    if callable(rename):
        return Renaming(rename)
    if isinstance(rename, Mapping) and all(
        isinstance(text, str) for pair in rename.items() for text in pair
    ):
        return Renaming(dict(rename))
    raise InvalidArgumentError(
        f"rename={rename!r}: expected a dict from beginnings of saved names to what replaces them, "
        "such as {'model/module.': 'model/'}, or a function from a name to a name"
    )


def _prefixes(name: str, given: object) -> PathPrefixes | None:
    if given is None:
        return None
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple | set | frozenset) or not all(
        isinstance(prefix, str) and prefix.strip("/") for prefix in names
    ):
        raise InvalidArgumentError(
            f"{name}={given!r}: expected a path prefix such as 'params' or 'opt/0/mu', or a list "
            "of them"
        )
    if not names and name == "only":
        raise InvalidArgumentError("only=[]: expected at least one path prefix, found none")
    return PathPrefixes(tuple(prefix.strip("/") for prefix in names))


def check_types(
    ram: object, network: object, process: object, guard: object, replicas: object
) -> None:
    """Check the types of a manager's arguments.

    Raises:
        InvalidArgumentError: One is of another type.
    """
    if ram is not None and not isinstance(ram, RamTier):
        raise InvalidArgumentError(
            f"CheckpointManager(ram=...): expected a RamTier or None, found {ram!r}"
        )
    if not isinstance(network, HostNetwork):
        raise InvalidArgumentError(
            f"CheckpointManager(network=...): expected a HostNetwork, found {network!r}"
        )
    if not isinstance(process, ProcessHooks):
        raise InvalidArgumentError(
            f"CheckpointManager(process=...): expected ProcessHooks, found {process!r}"
        )
    if guard is not None and not isinstance(guard, LossGuard):
        raise InvalidArgumentError(
            f"CheckpointManager(guard=...): expected a LossGuard or None, found {guard!r}"
        )
    if replicas is not None and not isinstance(replicas, ReplicaCheck):
        raise InvalidArgumentError(
            f"CheckpointManager(replicas=...): expected a ReplicaCheck or None, found {replicas!r}"
        )


def raise_nothing_saved(run: object, call: str = "restore") -> NoReturn:
    """Raise the error of a call that reads the newest checkpoint of a run without any."""
    raise StepNotFoundError(f"{call}: the run in {run} has no checkpoint yet")


def raise_no_remote() -> NoReturn:
    """Raise the error of a wait for a remote tier that the manager does not have."""
    raise InvalidArgumentError(
        "wait_until_finished(remote=True): expected a manager with a remote tier, found "
        "none; open the run with CheckpointManager(..., remote=...)"
    )


def raise_step_order(call: str, step: int, last: int, read: int | None) -> NoReturn:
    """Raise the error of a step that does not follow the run's last one.

    Args:
        call: The call that refuses it.
        step: The refused step.
        last: The run's last step.
        read: The step that `restore` has read since the last save; None if there was no restore.
    """
    hint = "" if read is None else f"restore({read}) only reads and does not move the run; "
    shown = "N" if read is None else str(read)
    raise StepOrderError(
        f"{call} step {step}: expected a step after {last}, the run's last one; {hint}to continue "
        f"from an earlier step, call resume(state, step={shown}), which abandons the later ones, "
        "or use a new directory"
    )


class MetricNames:
    """The metric names that `policy` needs. Only rank 0 warns. Owned by the training thread."""

    def __init__(self, policy: PreservationPolicy, rank: int = 0) -> None:
        members = policy.policies if isinstance(policy, AnyPreservationPolicy) else (policy,)
        names = [member.metric for member in members if isinstance(member, BestN)]
        self._unseen = set(names) if rank == 0 else set()

    def check(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Warn, once for each name, if a save does not pass a metric that the policy needs."""
        passed = metrics or {}
        missing = sorted(self._unseen - passed.keys())
        for name in missing:
            log.warning(
                "save step %d: BestN(metric=%r) ranks checkpoints by that metric, but metrics has "
                "%s; a checkpoint without it ranks last",
                step,
                name,
                ", ".join(map(repr, sorted(passed))) or "none",
            )
        self._unseen.difference_update(missing)
