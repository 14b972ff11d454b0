"""Checks of what a policy is made of and of what it answers.

Each check returns the value in the one form in which policies store it, or raises
`InvalidArgumentError` with the class, the argument, what was expected and what was found. So a
policy that exists is sound, whether a user or `codec.decode` made it.
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
    """The error that says which argument of `owner`, a class or a function, is not allowed."""
    return InvalidArgumentError(
        f"{owner}: expected {argument} to be {expected}, "
        f"found {_shown(found)} ({type(found).__name__})"
    )


def positive_integer(owner: str, argument: str, value: object) -> int:
    """An integer from 1 to `COUNT_MAX`, NumPy's integers included; bools are none."""
    number = _integer(value)
    if number is None or not 1 <= number <= COUNT_MAX:
        raise refusal(owner, argument, f"an integer from 1 to {COUNT_MAX}", value)
    return number


def step_number(owner: str, argument: str, value: object) -> int:
    """An integer from 0 to `STEP_MAX`, NumPy's integers included; bools are none."""
    number = _integer(value)
    if number is None or not 0 <= number <= STEP_MAX:
        raise refusal(owner, argument, f"a step, an integer from 0 to {STEP_MAX}", value)
    return number


def step_numbers(owner: str, argument: str, value: object) -> tuple[int, ...]:
    """At least one step, as an ascending tuple without repetitions."""
    # Iterating over bytes gives integers, so that they would pass for steps.
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
    """A finite number of seconds above 0."""
    secs = _real(value)
    if secs is None or not (math.isfinite(secs) and secs > 0):
        raise refusal(owner, argument, "a finite number of seconds above 0", value)
    return secs


def share(owner: str, argument: str, value: object) -> float:
    """A share of a whole: above 0, and at most 1."""
    found = _real(value)
    if found is None or not 0 < found <= 1:
        raise refusal(owner, argument, "a share above 0 and up to 1", value)
    return found


def text(owner: str, argument: str, value: object) -> str:
    """A string that is not empty and can be written as UTF-8."""
    if not isinstance(value, str) or not value or not _is_utf8(value):
        raise refusal(owner, argument, "a non-empty string of Unicode text", value)
    return value


def instant(owner: str, argument: str, value: object) -> datetime:
    """An aware datetime, in UTC.

    Two datetimes of one local zone are subtracted by the face of the clock, which is an hour off
    where the clocks change; in UTC the difference is the time that passed.
    """
    try:
        if isinstance(value, datetime) and value.utcoffset() is not None:
            return value.astimezone(UTC)
    except OverflowError:  # within hours of year 1 or of year 9999
        pass
    raise refusal(owner, argument, "a datetime with a time zone", value)


def metric_values(owner: str, argument: str, value: object) -> dict[str, float]:
    """Metrics by name, as a dict of its own whose values are floats; NaN and infinities pass."""
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
    """Checks that `value` is an object with the `method` that makes it a policy."""
    # A class has the method too, though none that can be called without an instance.
    if isinstance(value, type):
        raise refusal(owner, argument, f"an instance with a method {method}, not a class", value)
    if not callable(getattr(value, method, None)):
        raise refusal(owner, argument, f"an object with a method {method}", value)


def policies(owner: str, argument: str, value: object, method: str) -> tuple[object, ...]:
    """At least one policy, as a tuple."""
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
    """A policy's yes or no: a bool, NumPy's included.

    A method that forgets to return gives None. Read as "no" it would mean that nothing is ever
    saved, so that it is refused.
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
    """Exactly `count` bools, from a sequence or a one-dimensional array."""
    expected = f"a sequence of {count} bools, one for each checkpoint"
    if not isinstance(value, Sequence) and not hasattr(value, "__array__"):
        raise refusal(owner, argument, expected, value)
    items = _items(owner, argument, expected, value)
    if len(items) != count:
        raise refusal(owner, argument, f"{expected}, not of {len(items)}", value)
    return tuple(verdict(owner, f"{argument}[{i}]", item) for i, item in enumerate(items))


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number too long to show"


def _items(owner: str, argument: str, expected: str, value: object) -> list[object]:
    try:
        return list(value)  # type: ignore[call-overload, no-any-return]
    except TypeError as error:  # an array without dimensions says that it is iterable
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
