"""Leaves that belong to no framework: NumPy arrays, Python values, stateful objects.

A framework adds its own arrays: it gives their outlines to `Outlines` and keeps them itself.

See docs/decisions/0060.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from msgspec import UNSET

from holdfast.adapt.contract import ArrayOutline, Outline
from holdfast.adapt.pipelines import pipeline_of
from holdfast.errors import HoldfastError, StructureMismatchError, UnsupportedLeafError
from holdfast.format.dtypes import dtype_name
from holdfast.format.grid import Placement
from holdfast.format.paths import Path, path_name
from holdfast.format.records import Alias, Container, SavedValue
from holdfast.format.values import encode_value

OUTLINES_MAX = 8
"""A run has few structures; a state whose shape keeps changing must not fill the cache."""

_VALUE_TYPES = (type(None), bool, int, float, str, bytes)
_NUMPY_TYPES = (np.ndarray, np.generic)


def is_value(leaf: object) -> bool:
    """Return whether `leaf` is a plain Python value."""
    return type(leaf) in _VALUE_TYPES


def is_numpy(leaf: object) -> TypeGuard[np.ndarray | np.generic]:
    """Return whether `leaf` is a NumPy array or scalar."""
    return isinstance(leaf, _NUMPY_TYPES)


def keeps_state(leaf: object) -> bool:
    """Return whether `leaf` is an object whose state can be read and set."""
    return not isinstance(leaf, type) and (
        _has(leaf, "get_state", "set_state") or _has(leaf, "state_dict", "load_state_dict")
    )


def _has(leaf: object, *names: str) -> bool:
    return all(callable(getattr(leaf, name, None)) for name in names)


def state_of(leaf: object) -> object:
    """Return the state of a stateful object, as Python values."""
    if _has(leaf, "get_state", "set_state"):
        return leaf.get_state()  # type: ignore[attr-defined]
    return leaf.state_dict()  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStates:
    """The states of one object from all processes that saved, for one of another number of them.

    Attributes:
        states: the states, by the rank that saved.
        rank: this process.
        count: the number of processes of this job.
    """

    states: Sequence[object]
    rank: int
    count: int


def divides_states(leaf: object) -> bool:
    """Return whether `leaf` makes its state of those of another number of processes."""
    return _has(leaf, "set_states")


def give_state(leaf: object, state: object) -> None:
    """Set the state of a stateful object; it divides `ProcessStates` itself."""
    if isinstance(state, ProcessStates):
        leaf.set_states(state.states, rank=state.rank, count=state.count)  # type: ignore[attr-defined]
    elif _has(leaf, "get_state", "set_state"):
        leaf.set_state(state)  # type: ignore[attr-defined]
    else:
        leaf.load_state_dict(state)  # type: ignore[attr-defined]


@contextmanager
def object_errors(leaf: object, path: Path, call: str) -> Iterator[None]:
    """Name the leaf in an error of its own methods, which are the user's code; see `call`.

    Args:
        leaf: the stateful object that the block reads or sets.
        path: its path.
        call: `save` or `restore`, for the message.

    Raises:
        UnsupportedLeafError: the object raised while its state was read, for a save.
        StructureMismatchError: it raised in a restore.
    """
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        kind = type(leaf)
        text = (
            f"{call} {path_name(path)}: {kind.__module__}.{kind.__qualname__} raised "
            f"{type(error).__name__}: {error}; "
        )
        if call == "save":
            raise UnsupportedLeafError(
                f"{text}correct the method that returns its state, or take it out of the state"
            ) from error
        raise StructureMismatchError(
            f"{text}correct the method that sets its state, or leave it out by only=...; other "
            "leaves may be set already"
        ) from error


def numpy_dtype_name(leaf: np.ndarray | np.generic, path: Path) -> str:
    """Return the name of a NumPy leaf's dtype.

    Raises:
        UnsupportedLeafError: the dtype cannot be stored (object, structured, datetime, text),
            or the leaf has a mask, which would be lost.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise UnsupportedLeafError(
            f"save {path_name(path)}: a masked NumPy array cannot be saved with its mask; save "
            "its .data and its .mask, or filled()"
        )
    name = dtype_name(leaf.dtype)
    if name is None:
        raise UnsupportedLeafError(
            f"save {path_name(path)}: expected a numeric NumPy dtype, found {leaf.dtype}; convert "
            "it"
        )
    return name


def owned_copy(leaf: np.ndarray | np.generic) -> np.ndarray:
    """Return a copy in C order and little-endian, independent of the caller's later writes."""
    return np.array(leaf, dtype=leaf.dtype.newbyteorder("<"), order="C", copy=True)


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the bytes of `array` in C order, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def host_array(leaf: np.ndarray | np.generic) -> np.ndarray:
    """Return the array of a NumPy leaf, little-endian; a view of the leaf's memory if possible."""
    return np.asarray(leaf, dtype=leaf.dtype.newbyteorder("<"))


class Outlines:
    """The outlines of a framework's states: the same object for each structure.

    Args:
        of_array: returns the outline of a leaf that is the framework's own array, None for another
            leaf. It may raise UnsupportedLeafError.
        signature: returns what the outline of such a leaf depends on, None for another leaf.
    """

    def __init__(
        self,
        of_array: Callable[[Any, Path], ArrayOutline | None],
        signature: Callable[[Any], Hashable | None],
    ) -> None:
        self._of_array = of_array
        self._signature = signature
        self._known: dict[Hashable, Outline] = {}

    def find(
        self,
        leaves: Sequence[Any],
        paths: Sequence[Path],
        containers: tuple[Container, ...],
        structure: Hashable,
        ties: Sequence[tuple[Path, Path]] = (),
    ) -> Outline:
        """Return the outline of a state.

        Args:
            leaves: the leaves of the state.
            paths: their paths, in the same order.
            containers: the inner nodes.
            structure: equal for two states if paths, containers and ties are equal.
            ties: the paths of further places of an array, each with the array's own path.

        Raises:
            UnsupportedLeafError: a leaf cannot be saved.
        """
        signature = self._signature
        signatures = tuple([signature(leaf) or _host_signature(leaf) for leaf in leaves])
        key = structure, signatures
        outline = self._known.get(key)
        if outline is None:
            outline = self._made(leaves, paths, containers, ties)
            if len(self._known) >= OUTLINES_MAX:
                self._known.clear()
            self._known[key] = outline
        return outline

    def _made(
        self,
        leaves: Sequence[Any],
        paths: Sequence[Path],
        containers: tuple[Container, ...],
        ties: Sequence[tuple[Path, Path]],
    ) -> Outline:
        arrays, process_values = [], []
        for path, leaf in zip(paths, leaves, strict=True):
            own = self._of_array(leaf, path)
            if own is not None:
                arrays.append(own)
            elif is_numpy(leaf):
                arrays.append(_numpy_outline(leaf, path))
            elif keeps_state(leaf):
                process_values.append(path)
            elif not is_value(leaf):
                encode_value(leaf, path_name(path))
                raise UnsupportedLeafError(
                    f"save {path_name(path)}: {type(leaf).__qualname__} cannot be a leaf of a "
                    "state; save its contents"
                )
        index = {array.path: i for i, array in enumerate(arrays)}
        return Outline(
            arrays=tuple(arrays),
            containers=containers,
            process_values=tuple(process_values),
            aliases=tuple(Alias(path=path, alias_of=index[of]) for path, of in ties),
        )


def _host_signature(leaf: Any) -> Any:
    if is_numpy(leaf):
        return leaf.shape, leaf.dtype, type(leaf)
    return type(leaf)


def _numpy_outline(leaf: np.ndarray | np.generic, path: Path) -> ArrayOutline:
    placed = Placement(
        shape=leaf.shape,
        dtype=numpy_dtype_name(leaf, path),
        chunk_shape=leaf.shape,
        holders=((0,),),
    )
    scalar = isinstance(leaf, np.generic)
    return ArrayOutline(
        path=path, placement=placed, prng_impl=None, scalar=scalar, is_everywhere=True
    )


class SavedValues:
    """The leaves of a state that are no arrays, encoded: their owners may change them later."""

    def __init__(self) -> None:
        self._values: list[SavedValue] = []
        self._process_values: list[SavedValue] = []

    def encode_value(self, leaf: object, path: Path) -> None:
        """Encode a plain value, or the state of a stateful object."""
        if is_value(leaf):
            self._values.append(SavedValue(path=path, value=encode_value(leaf, path_name(path))))
        else:
            with object_errors(leaf, path, "save"):
                state = encode_value(state_of(leaf), path_name(path))
            pipeline = pipeline_of(leaf)
            self._process_values.append(
                SavedValue(path=path, value=state, pipeline=UNSET if pipeline is None else pipeline)
            )

    @property
    def values(self) -> tuple[SavedValue, ...]:
        """The plain values."""
        return tuple(self._values)

    @property
    def process_values(self) -> tuple[SavedValue, ...]:
        """The states of stateful objects."""
        return tuple(self._process_values)
