"""Checks of the arguments of policies and of their answers.

Each check returns the value in the one form in which policies store it, or raises
`InvalidArgumentError` with the class, the argument, the expected and the found value. So every
policy object is valid, whether it was created by a user or by `codec.decode`.
"""

from __future__ import annotations

import math
import operator
import reprlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from numbers import Real
from typing import cast

from holdfast.errors import InvalidArgumentError
from holdfast.format.names import STEP_MAX

COUNT_MAX = 2**63 - 1  # sys.maxsize, which people write for "all of them"


def refusal(owner: str, argument: str, expected: str, found: object) -> InvalidArgumentError:
    """Return the error for an invalid argument of `owner`, a class or a function."""
    return InvalidArgumentError(
        f"{owner}: expected {argument} to be {expected}, "
        f"found {_shown(found)} ({type(found).__name__})"
    )


def positive_integer(owner: str, argument: str, value: object) -> int:
    """Return `value` as an int from 1 to `COUNT_MAX`. Accepts NumPy integers, not bools."""
    number = _integer(value)
    if number is None or not 1 <= number <= COUNT_MAX:
        raise refusal(owner, argument, f"an integer from 1 to {COUNT_MAX}", value)
    return number


def step_number(owner: str, argument: str, value: object) -> int:
    """Return `value` as an int from 0 to `STEP_MAX`. Accepts NumPy integers, not bools."""
    number = _integer(value)
    if number is None or not 0 <= number <= STEP_MAX:
        raise refusal(owner, argument, f"a step, an integer from 0 to {STEP_MAX}", value)
    return number


def step_numbers(owner: str, argument: str, value: object) -> tuple[int, ...]:
    """Return at least one step, as an ascending tuple without duplicates."""
    # Iterating over bytes yields integers, which would be accepted as steps.
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray | memoryview):
        raise refusal(owner, argument, "a collection of steps", value)
    items = _items(owner, argument, "a collection of steps", value)
    steps = {step_number(owner, f"{argument}[{i}]", item) for i, item in enumerate(items)}
    if not steps:
        raise refusal(owner, argument, "a collection of at least one step", value)
    return tuple(sorted(steps))


def is_among(steps: Collection[int], step: int) -> bool:
    """Return whether `step` is in `steps`, a tuple that `step_numbers` returned."""
    ascending = cast("tuple[int, ...]", steps)
    i = bisect_left(ascending, step)
    return i < len(ascending) and ascending[i] == step


def positive_secs(owner: str, argument: str, value: object) -> float:
    """Return `value` as a finite number of seconds above 0."""
    secs = _real(value)
    if secs is None or not (math.isfinite(secs) and secs > 0):
        raise refusal(owner, argument, "a finite number of seconds above 0", value)
    return secs


def positive_real(owner: str, argument: str, value: object) -> float:
    """Return `value` as a finite number above 0."""
    number = _real(value)
    if number is None or not (math.isfinite(number) and number > 0):
        raise refusal(owner, argument, "a finite number above 0", value)
    return number


def share(owner: str, argument: str, value: object) -> float:
    """Return `value` as a share above 0 and at most 1."""
    number = _real(value)
    if number is None or not 0 < number <= 1:
        raise refusal(owner, argument, "a share above 0 and up to 1", value)
    return number


def text(owner: str, argument: str, value: object) -> str:
    """Return `value` if it is a non-empty string that can be encoded as UTF-8."""
    if not isinstance(value, str) or not value or not _is_utf8(value):
        raise refusal(owner, argument, "a non-empty string of Unicode text", value)
    return value


def instant(owner: str, argument: str, value: object) -> datetime:
    """Return an aware datetime in UTC.

    Python subtracts two datetimes of one local zone by wall-clock time, which is an hour off when
    the clocks change; in UTC the difference is the elapsed time.
    """
    try:
        if isinstance(value, datetime) and value.utcoffset() is not None:
            return value.astimezone(UTC)
    except OverflowError:  # within hours of year 1 or of year 9999
        pass
    raise refusal(owner, argument, "a datetime with a time zone", value)


def metric_values(owner: str, argument: str, value: object) -> dict[str, float]:
    """Return a new dict of metrics as floats by name; NaN and infinities are accepted."""
    if not isinstance(value, Mapping):
        raise refusal(owner, argument, "a mapping of names to numbers, or None", value)
    metrics = {}
    for name, item in value.items():
        number = _real(item)
        if number is None:
            raise refusal(owner, f"{argument}[{name!r}]", "a number", item)
        metrics[text(owner, f"a name in {argument}", name)] = number
    return metrics


def policy(owner: str, argument: str, value: object, method: str) -> None:
    """Check that `value` is an object with the `method` that makes it a policy."""
    # A class has the method too, but it cannot be called without an instance.
    if isinstance(value, type):
        raise refusal(owner, argument, f"an instance with a method {method}, not a class", value)
    if not callable(getattr(value, method, None)):
        raise refusal(owner, argument, f"an object with a method {method}", value)


def policies(owner: str, argument: str, value: object, method: str) -> tuple[object, ...]:
    """Return at least one policy, as a tuple."""
    expected = f"a sequence of at least one object with a method {method}"
    if not isinstance(value, Sequence):
        raise refusal(owner, argument, expected, value)
    members = tuple(value)
    if not members:
        raise refusal(owner, argument, expected, value)
    for i, member in enumerate(members):
        policy(owner, f"{argument}[{i}]", member, method)
    return members


def verdict(owner: str, argument: str, value: object) -> bool:
    """Return a policy's answer as a bool. Accepts NumPy's bools.

    A method without a return statement returns None. If that counted as false, nothing would ever
    be saved, so it is refused.
    """
    if isinstance(value, bool):
        return value
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        scalar = item()
        if isinstance(scalar, bool):
            return scalar
    raise refusal(owner, argument, "a bool", value)


def verdicts(owner: str, argument: str, value: object, count: int) -> tuple[bool, ...]:
    """Return exactly `count` bools, from a sequence or a one-dimensional array."""
    expected = f"a sequence of {count} bools, one for each checkpoint"
    if not isinstance(value, Sequence) and not hasattr(value, "__array__"):
        raise refusal(owner, argument, expected, value)
    items = _items(owner, argument, expected, value)
    if len(items) != count:
        raise refusal(owner, argument, f"{expected}, not of {len(items)}", value)
    return tuple(verdict(owner, f"{argument}[{i}]", item) for i, item in enumerate(items))


def answer(owner: object, method: str, value: object) -> bool:
    """Return what a method of the policy `owner` returned, as a bool; see `verdict`."""
    if isinstance(value, bool):  # fast path: evaluated at every step of every rank
        return value
    return verdict(f"{type(owner).__name__}.{method}", "its answer", value)


def answers(owner: object, method: str, value: object, count: int) -> tuple[bool, ...]:
    """Return what a method of the policy `owner` returned, as `count` bools; see `verdicts`."""
    return verdicts(f"{type(owner).__name__}.{method}", "its answer", value, count)


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not format integers of more than 4300 digits
        return "a number too long to show"


def _items(owner: str, argument: str, expected: str, value: object) -> list[object]:
    try:
        return list(value)  # type: ignore[call-overload, no-any-return]
    except TypeError as error:  # a zero-dimensional array claims to be iterable
        raise refusal(owner, argument, expected, value) from error


def _integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _real(value: object) -> float | None:
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer that is larger than any float
        return None


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True
