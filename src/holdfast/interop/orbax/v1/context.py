"""Define `Context`: the options of the calls in its `with` block."""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable
from types import TracebackType
from typing import Any

from holdfast.errors import InvalidArgumentError


class OptionGroup:
    """Options by name: the ones that Holdfast can honour, and no others.

    Raises:
        InvalidArgumentError: Another one is set.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self.__dict__.update(options)
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Context.{self.__dict__.get('_name')}.{name}: not supported")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            names = [key for key in self.__dict__ if not key.startswith("_")]
            raise InvalidArgumentError(
                f"Context.{self.__dict__['_name']}.{name}: not supported; "
                + (f"there are {', '.join(names)}" if names else "none of this group are")
            )
        self.__dict__[name] = value


class Context:
    """The options of the calls in its `with` block, and of managers that are given it.

    Args:
        context: Another one, whose options are copied.

    Attributes:
        pytree: `pytree.loading.partial_load`: whether a tree to load may lack leaves.
        asynchronous: `timeout_secs` and `post_finalization_callback` of saves.
    """

    def __init__(self, context: Context | None = None, **options: Any) -> None:
        if options:
            raise InvalidArgumentError(
                f"Context({next(iter(options))}=...): not supported; set the options of the "
                "context, as context.pytree.loading.partial_load = True"
            )
        if context is not None:
            self.__dict__.update(copy.deepcopy(context.__dict__))
            return
        never: Callable[[], None] | None = None
        self.__dict__.update(
            pytree=OptionGroup("pytree", loading=OptionGroup("pytree.loading", partial_load=False)),
            asynchronous=OptionGroup(
                "asynchronous", timeout_secs=1200, post_finalization_callback=never
            ),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise InvalidArgumentError(
            f"Context.{name}: not supported; there are {', '.join(self.__dict__)}"
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Context.{name}: not supported; there are {', '.join(self.__dict__)}")

    def __enter__(self) -> Context:
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _entered.set(_entered.get()[:-1])


_entered: contextvars.ContextVar[tuple[Context, ...]] = contextvars.ContextVar(
    "holdfast_orbax_contexts", default=()
)


def current(given: Context | None = None) -> Context:
    """Return the context `given`, else the innermost `with` block's, else the defaults."""
    if given is not None:
        return given
    entered = _entered.get()
    return entered[-1] if entered else Context()
