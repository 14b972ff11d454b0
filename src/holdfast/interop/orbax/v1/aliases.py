"""Make the names that Orbax's second interface had before: each warns, and calls the new one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


def of_function(old: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` under the name `old`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _warn(old, function.__name__)
        return function(*args, **kwargs)

    return _named(call, old, function.__name__)


def of_method(old: str, new: str) -> Callable[..., Any]:
    """Return the method `new`, also that of a subclass, under the name `old`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _warn(old, new)
        return getattr(self, new)(*args, **kwargs)

    return _named(call, old, new)


def _named(call: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    call.__name__, call.__doc__ = old, f"Call `{new}`, with a `DeprecationWarning`."
    return call


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated. Use `{new}` instead.", DeprecationWarning, stacklevel=3)
