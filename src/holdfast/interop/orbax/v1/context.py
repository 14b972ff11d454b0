"""Define `Context`: the options of the calls in its `with` block."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax.v1 import options
from holdfast.interop.orbax.v1.errors import FrozenContextError
from holdfast.interop.orbax.v1.options import CheckpointLayout, OptionGroup, frozen_ids

GROUPS: dict[str, tuple[str, type[OptionGroup]]] = {
    "pytree": ("pytree_options", options.PyTreeOptions),
    "array": ("array_options", options.ArrayOptions),
    "asynchronous": ("async_options", options.AsyncOptions),
    "multiprocessing": ("multiprocessing_options", options.MultiprocessingOptions),
    "file": ("file_options", options.FileOptions),
    "checkpointables": ("checkpointables_options", options.CheckpointablesOptions),
    "pathways": ("pathways_options", options.PathwaysOptions),
    "deletion": ("deletion_options", options.DeletionOptions),
    "memory": ("memory_options", options.MemoryOptions),
    "safetensors": ("safetensors_options", options.SafetensorsOptions),
    "atomicity": ("atomicity_options", options.AtomicityOptions),
}
"""The groups of options, with the argument and the class of each."""
LAYOUT = "checkpoint_layout"


class Context:
    """The options of the calls in its `with` block, and of managers that are given it.

    They are set as attributes, as `context.pytree.loading.partial_load = True`, until a `with`
    block begins. Another thread has no context of this one.

    Args:
        context: Another one, whose options are copied.
        given: Whole groups by the names of Orbax's arguments (`array_options=...`), and
            `checkpoint_layout`.

    Raises:
        InvalidArgumentError: There is no such group.
    """

    def __init__(self, context: Context | None = None, **given: Any) -> None:
        arguments = {argument: name for name, (argument, _) in GROUPS.items()}
        for argument, value in given.items():
            if argument not in arguments and argument != LAYOUT:
                raise InvalidArgumentError(
                    f"Context({argument}=...): not supported; there are "
                    f"{', '.join([*arguments, LAYOUT])}"
                )
            kind = OptionGroup if argument == LAYOUT else GROUPS[arguments[argument]][1]
            if argument != LAYOUT and value is not None and not isinstance(value, kind):
                raise InvalidArgumentError(
                    f"Context({argument}=...): expected {kind.__name__}, found {value!r}"
                )
        groups: dict[str, OptionGroup] = {}
        for name, (argument, kind) in GROUPS.items():
            group = given.get(argument) or (context.groups[name] if context else None)
            groups[name] = kind() if group is None else copy.deepcopy(group)
        layout = given.get(LAYOUT) or (context.checkpoint_layout if context else "orbax")
        self.__dict__.update(groups=groups, checkpoint_layout=_layout(layout))

    def __getattr__(self, name: str) -> Any:
        groups = self.__dict__.get("groups", {})
        for group, (argument, _) in GROUPS.items():
            if name in (group, argument) and group in groups:
                return groups[group]
        raise AttributeError(f"Context.{name}: not supported; there are {', '.join(GROUPS)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if id(self) in frozen_ids.get():
            raise FrozenContextError(
                f"Context.{name}: the context is in use; set its options before the with block"
            )
        if name != LAYOUT:
            raise InvalidArgumentError(
                f"Context.{name}: not supported; set the options of {', '.join(GROUPS)}, or "
                f"{LAYOUT}"
            )
        self.__dict__[name] = _layout(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        return Context(self)

    def __enter__(self) -> Context:
        ids = frozen_ids.set(frozen_ids.get() | frozenset(_ids(self)))
        _entered.set((*_entered.get(), (self, ids)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        *outer, (_, ids) = _entered.get()
        _entered.set(tuple(outer))
        frozen_ids.reset(ids)


_entered: contextvars.ContextVar[tuple[tuple[Context, Any], ...]] = contextvars.ContextVar(
    "holdfast_orbax_contexts", default=()
)


def _layout(given: Any) -> CheckpointLayout:
    value = getattr(given, "value", given)
    try:
        return CheckpointLayout(value)
    except ValueError as error:
        raise InvalidArgumentError(
            f"Context.{LAYOUT}: expected one of "
            f"{', '.join(layout.value for layout in CheckpointLayout)}, found {given!r}"
        ) from error


def _ids(context: Context) -> Iterator[int]:
    yield id(context)
    pending: list[Any] = list(context.groups.values())
    while pending:
        group = pending.pop()
        yield id(group)
        values = (getattr(group, field.name) for field in dataclasses.fields(group))
        pending += [value for value in values if isinstance(value, OptionGroup)]


def current(default: Context | None = None) -> Context:
    """Return the innermost `with` block's context, else `default`, else that of no options.

    Raises:
        InvalidArgumentError: One of its options cannot be honoured.
    """
    entered = _entered.get()
    context = entered[-1][0] if entered else default or Context()
    options.check(context)
    return context
