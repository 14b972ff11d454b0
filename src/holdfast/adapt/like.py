"""A checkpoint restored like a given state: its structure, dtypes and shardings.

`LikeRestoration` compares the state with the checkpoint by path, and is the same for all
frameworks. What differs between them is how a leaf becomes buffers to fill, and an array again:
`ArrayLeaves`.

Arrays are converted to another dtype on the host: floating-point ones among each other, and
integers among each other. A conversion that would drop a part of each value (complex to real, float
to integer) is refused, and so is one of PRNG keys, whose data has no meaning as numbers.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import ml_dtypes
import numpy as np

from holdfast.adapt import leaves
from holdfast.adapt.contract import RestoreRequest
from holdfast.adapt.nested import check_prefixes, paths_of
from holdfast.adapt.pipelines import pipeline_of
from holdfast.errors import StructureMismatchError
from holdfast.format.dtypes import dtype_name, numpy_dtype
from holdfast.format.grid import Region, RestoreTarget
from holdfast.format.paths import Path, path_name
from holdfast.format.records import ArraySpec, CheckpointSpec, Container
from holdfast.format.values import decode_value
from holdfast.quantities import counted

KEPT_SHOWN_MAX = 5
DIFFERENCES_SHOWN_MAX = 20
NAMES_COMPARED_MAX = 200
SIMILARITY_MIN = 0.75

log = logging.getLogger(__name__)


class ArrayType(NamedTuple):
    """The dtype and shape of an array; of a typed PRNG key `key<IMPL>` and the key's own shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"array {self.dtype}[{', '.join(map(str, self.shape))}]"


class FilledLeaf(NamedTuple):
    """A leaf of the state asked for, its array as stored, and its filled buffers by region."""

    leaf: Any
    array: ArraySpec
    buffers: dict[Region, np.ndarray]


class ArrayLeaves(Protocol):
    """How the arrays of a framework are restored, or those of NumPy, which every state may have."""

    takes_memory: bool
    """Whether a buffer may be replaced by memory with its content that is read only."""

    def type_of(self, leaf: Any) -> ArrayType | None:
        """Return the type of an array of the framework, or of a stand-in for one; else None."""
        ...

    def has_value(self, leaf: Any) -> bool:
        """Return whether such a leaf holds elements that can be kept."""
        ...

    def make_buffers(
        self, leaf: Any, array: ArraySpec, dtype: np.dtype
    ) -> dict[Region, np.ndarray]:
        """Return a buffer to fill for each region of `array` that this process needs."""
        ...

    def assemble_arrays(self, filled: Iterable[FilledLeaf]) -> list[Any]:
        """Return an array with the sharding of each leaf, made of its filled buffers.

        All at once, since a framework's call costs more than the elements of a small array. The
        iterable lets go of each leaf's buffers as it passes them on.
        """
        ...


class NumpyArrayLeaves:
    """NumPy's arrays and scalars; the caller may write to what is restored."""

    takes_memory = False

    def type_of(self, leaf: Any) -> ArrayType | None:
        if not leaves.is_numpy(leaf):
            return None
        return ArrayType(dtype_name(leaf.dtype) or str(leaf.dtype), leaf.shape)

    def has_value(self, leaf: Any) -> bool:
        return True

    def make_buffers(
        self, leaf: Any, array: ArraySpec, dtype: np.dtype
    ) -> dict[Region, np.ndarray]:
        return {((0,) * len(array.shape), array.shape): np.empty(array.shape, dtype)}

    def assemble_arrays(self, filled: Iterable[FilledLeaf]) -> list[Any]:
        return [self._assembled(leaf, *buffers.values()) for leaf, _, buffers in filled]

    def _assembled(self, leaf: Any, buffer: np.ndarray) -> Any:
        if isinstance(leaf, np.generic):
            return buffer[()]
        # The dtypes are the same but for the byte order, which is that of `like`.
        return buffer.astype(leaf.dtype, copy=False)


_NUMPY = NumpyArrayLeaves()


@dataclass(frozen=True, slots=True, kw_only=True)
class LikeState:
    """A flattened state: its leaves, their paths, and how such leaves become a state again.

    `containers` are its inner nodes.
    `ties` are pairs of paths whose leaves are one array in memory, which is filled in place.
    `differences` returns a text for each other place in memory that would get different elements,
    from the filled buffers by path.
    """

    leaves: Sequence[Any]
    paths: Sequence[Path]
    containers: Sequence[Container]
    unflatten: Callable[[Sequence[Any]], object]
    ties: Sequence[tuple[Path, Path]] = ()
    differences: Callable[[Mapping[Path, Mapping[Region, np.ndarray]]], list[str]] = lambda _: []


class LikeRestoration:
    """Builds a state like `like`; see `holdfast.adapt.contract.Restoration`."""

    def __init__(
        self, spec: CheckpointSpec, like: LikeState, request: RestoreRequest, arrays: ArrayLeaves
    ) -> None:
        check_prefixes(spec, request)
        _check_partial(spec, like, request)
        self._spec, self._like, self._arrays = spec, like, arrays
        self._request = request
        indices = spec.array_indices()
        comparison = _Comparison(spec, indices, like, request, arrays)
        self.kept: Sequence[Path] = [*comparison.kept]
        if self.kept:
            log.info(
                "kept %s of the state given, which the checkpoint lacks or has with another shape "
                "or kind: %s",
                counted(len(self.kept), "leaf", "leaves"),
                "; ".join(list(comparison.kept.values())[:KEPT_SHOWN_MAX]),
            )
        restored = comparison.restored
        self._casts = comparison.casts
        self._values = {
            value.path: decode_value(value.value) for value in spec.values if value.path in restored
        }
        self.process_values: Sequence[Path] = [p for p in spec.process_values if p in restored]
        of_objects = {*self.process_values}
        self.divided: Sequence[Path] = [
            path
            for path, leaf in zip(like.paths, like.leaves, strict=True)
            if path in of_objects and leaves.divides_states(leaf)
        ]
        self.pipelines: Mapping[Path, Sequence[str]] = {
            path: pipeline
            for path, leaf in zip(like.paths, like.leaves, strict=True)
            if path in of_objects and (pipeline := pipeline_of(leaf)) is not None
        }
        self._index = {path: index for path, index in indices.items() if path in restored}
        self._buffers: dict[Path, dict[Region, np.ndarray]] = {}
        targets: list[RestoreTarget] = []
        for path, leaf in zip(like.paths, like.leaves, strict=True):
            if path in self._index:
                targets += self._targets(path, leaf)
        self.targets: Sequence[RestoreTarget] = targets

    def _targets(self, path: Path, leaf: Any) -> list[RestoreTarget]:
        index = self._index[path]
        array = self._spec.arrays[index]
        dtype = numpy_dtype(array.dtype)
        assert dtype is not None
        arrays = _NUMPY if leaves.is_numpy(leaf) else self._arrays
        buffers = self._buffers[path] = arrays.make_buffers(leaf, array, dtype)
        return [
            RestoreTarget(
                array_index=index,
                region=region,
                buffer=buffer,
                take=partial(buffers.__setitem__, region) if arrays.takes_memory else None,
            )
            for region, buffer in buffers.items()
        ]

    def convert_dtypes(self) -> None:
        for path, name in self._casts.items():
            dtype = numpy_dtype(name)
            assert dtype is not None
            buffers = self._buffers[path]
            for region, buffer in buffers.items():
                buffers[region] = converted(buffer, dtype, path_name(path))
        self._check_ties()

    def _check_ties(self) -> None:
        """Check that arrays for one place in memory are equal there; the last would win otherwise.

        A checkpoint may have equal copies: a tool that wrote tied arrays twice.
        """
        differing = [
            f"{path_name(first)} and {path_name(second)}: expected equal arrays, since those given "
            "are tied; found different ones"
            for first, second in self._like.ties
            if self._index.get(first) != self._index.get(second)
            and first in self._index
            and second in self._index
            and not _are_equal(self._buffers[first], self._buffers[second])
        ]
        differing += self._like.differences(self._buffers)
        if differing:
            raise_mismatch(differing, self._request)

    def finish(self, process_values: Mapping[Path, object]) -> object:
        leaf_of_path = dict(zip(self._like.paths, self._like.leaves, strict=True))
        restored = leaf_of_path | self._values
        paths = [path for path in leaf_of_path if path in self._index]
        for arrays, is_numpy in ((_NUMPY, True), (self._arrays, False)):
            chosen = [path for path in paths if leaves.is_numpy(leaf_of_path[path]) is is_numpy]
            made = arrays.assemble_arrays(self._filled(path, leaf_of_path[path]) for path in chosen)
            restored |= zip(chosen, made, strict=True)
        for path, leaf in zip(self._like.paths, self._like.leaves, strict=True):
            if path in process_values:
                with leaves.object_errors(leaf, path, self._request.call):
                    leaves.give_state(leaf, process_values[path])
        return self._like.unflatten([restored[path] for path in self._like.paths])

    def _filled(self, path: Path, leaf: Any) -> FilledLeaf:
        return FilledLeaf(leaf, self._spec.arrays[self._index[path]], self._buffers.pop(path))


def _check_partial(spec: CheckpointSpec, like: LikeState, request: RestoreRequest) -> None:
    """Check that each prefix of `request.partial` is in the checkpoint or in the state asked for.

    Raises:
        StructureMismatchError: one is in neither; the message has the nearest path.
    """
    of_leaves = [*like.paths, *paths_of(spec)]
    paths = dict.fromkeys([*of_leaves, *(container.path for container in like.containers)])
    missing = request.partial.without_paths(paths)
    if missing:
        names = list(dict.fromkeys(path_name(p[:n]) for p in paths for n in range(1, len(p) + 1)))
        near = [
            f"{name} (there is {n})" if (n := _nearest(name, names)) else name for name in missing
        ]
        raise StructureMismatchError(
            f"{request.call}: expected something at {', '.join(near)} (partial=...), found "
            "nothing in the checkpoint and in the state asked for; correct the path, or leave it "
            "out"
        )


class _Comparison:
    """Which leaves of a state are restored, cast or kept.

    Attributes:
        restored: the paths whose values the checkpoint gives.
        kept: the paths whose leaves are kept because the checkpoint has no such value, each with
            the difference.
        casts: the dtypes to convert to, by path.

    Raises:
        StructureMismatchError: there are other differences; the message lists them all by path.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        indices: Mapping[Path, int],
        like: LikeState,
        request: RestoreRequest,
        arrays: ArrayLeaves,
    ) -> None:
        self._request, self._arrays = request, arrays
        self.restored: set[Path] = set()
        self.kept: dict[Path, str] = {}
        self.casts: dict[Path, str] = {}
        saved: dict[Path, ArrayType | str] = {
            path: _type_of_spec(spec.arrays[index]) for path, index in indices.items()
        }
        saved |= {value.path: _type_of_value(decode_value(value.value)) for value in spec.values}
        self._key_data = {
            path: ArrayType(array.dtype, array.shape)
            for path, index in indices.items()
            if (array := spec.arrays[index]).prng_impl is not None
        }
        leaf_of_path = dict(zip(like.paths, like.leaves, strict=True))
        saved |= dict.fromkeys(spec.process_values, "object with a state")
        differences = {
            path: difference
            for path in dict.fromkeys([*leaf_of_path, *saved])
            if request.wants(path)
            and (difference := self._compare(path, leaf_of_path, saved.get(path))) is not None
        }
        if differences:
            raise_mismatch(self._with_hints(differences, leaf_of_path, saved), request)

    @staticmethod
    def _with_hints(
        differences: dict[Path, str],
        given: Mapping[Path, object],
        saved: Mapping[Path, object],
    ) -> list[str]:
        """Return the differences; those shown name the nearest path that the other side has."""
        only_given = [path_name(path) for path in differences if path not in saved]
        only_saved = [path_name(path) for path in differences if path not in given]
        texts = []
        for number, (path, difference) in enumerate(differences.items()):
            is_missing = (path in given) != (path in saved)
            if number < DIFFERENCES_SHOWN_MAX and is_missing:
                others = only_saved if path in given else only_given
                name = _nearest(path_name(path), others)
                side = "the checkpoint" if path in given else "the state asked for"
                difference += f" ({side} has {name})" if name else ""
            texts.append(difference)
        return texts

    def _compare(
        self, path: Path, given: Mapping[Path, Any], found: ArrayType | str | None
    ) -> str | None:
        """Note what is done at `path`; return the difference that forbids the restore, if any."""
        expected = self._type_of(given[path]) if path in given else None
        if path in self._key_data and leaves.is_numpy(given.get(path)):
            # Of typed keys NumPy has the key data, as in a restore without a state.
            found = self._key_data[path]
        if expected == found:
            self.restored.add(path)
            return None
        difference = f"{path_name(path)}: expected {expected or 'nothing'}, found "
        difference += str(found or "nothing")
        if (
            isinstance(expected, ArrayType)
            and isinstance(found, ArrayType)
            and expected.shape == found.shape
        ):
            return self._cast(path, expected, found, difference)
        if not self._request.partial.covers(path):
            return difference
        if expected is None:
            return None
        leaf = given[path]
        is_numpy = leaves.is_numpy(leaf)
        if isinstance(expected, ArrayType) and not is_numpy and not self._arrays.has_value(leaf):
            return f"{difference}; it cannot be kept, since the one given has no elements"
        self.kept[path] = difference
        return None

    def _cast(
        self, path: Path, expected: ArrayType, found: ArrayType, difference: str
    ) -> str | None:
        if not can_cast(found.dtype, expected.dtype):
            return difference
        if not self._request.cast:
            return f"{difference}; pass cast=True to convert it"
        self.casts[path] = expected.dtype
        self.restored.add(path)
        return None

    def _type_of(self, leaf: Any) -> ArrayType | str:
        if leaves.is_value(leaf):
            return _type_of_value(leaf)
        array_type = _NUMPY.type_of(leaf) or self._arrays.type_of(leaf)
        if array_type is not None:
            return array_type
        if leaves.keeps_state(leaf):
            return "object with a state"
        return f"{type(leaf).__module__}.{type(leaf).__qualname__}"


def raise_mismatch(differences: Sequence[str], request: RestoreRequest) -> NoReturn:
    """Raise a `StructureMismatchError` that lists the differences."""
    scope = "" if request.only is None else f" below {', '.join(request.only.names)}"
    rest = "." if request.call == "resume" else ", or like=None for all that was saved."
    shown = differences[:DIFFERENCES_SHOWN_MAX]
    more = len(differences) - len(shown)
    raise StructureMismatchError(
        f"{request.call}: the state asked for differs from the checkpoint{scope} in "
        f"{counted(len(differences), 'place')} (expected is what was asked for, found is "
        "what was saved):\n  "
        + "\n  ".join(shown)
        + (f"\n  and {more} more" if more else "")
        + "\nPass a state of the saved structure, partial=... with the paths that may differ, or "
        "rename=... with other names for what was saved" + rest
    )


def _nearest(name: str, others: Sequence[str]) -> str | None:
    """Return the most similar one of `others`, or None if none is similar.

    Comparing is slow, so that of many only those with the same last part are compared.
    """
    if len(others) > NAMES_COMPARED_MAX:
        last = re.split(r"[./]", name)[-1]
        others = [other for other in others if other.endswith(last)][:NAMES_COMPARED_MAX]
    matches = difflib.get_close_matches(name, others, 1, SIMILARITY_MIN)
    return matches[0] if matches else None


def _are_equal(one: dict[Region, np.ndarray], other: dict[Region, np.ndarray]) -> bool:
    """Return whether the buffers have the same bytes: NaNs are equal, zeros of two signs not."""
    return one.keys() == other.keys() and all(
        np.array_equal(_bytes(one[region]), _bytes(other[region])) for region in one
    )


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _type_of_spec(array: ArraySpec) -> ArrayType:
    if array.prng_impl is not None:
        return ArrayType(f"key<{array.prng_impl}>", array.shape[:-1])
    return ArrayType(array.dtype, array.shape)


def _type_of_value(value: object) -> str:
    return "None" if value is None else type(value).__name__


def can_cast(saved: str, wanted: str) -> bool:
    """Return whether arrays of dtype `saved` may be converted to `wanted`; names of dtypes."""
    kinds = _kind(saved), _kind(wanted)
    return kinds[0] is not None and kinds[0] == kinds[1]


def converted(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Return `array` as `dtype`; floating-point values are rounded, too large ones become infinite.

    Args:
        array: of a dtype for which `can_cast` holds.
        dtype: the dtype to convert to.
        name: the array's path, for the message.

    Raises:
        StructureMismatchError: an integer does not fit `dtype`.
    """
    if _kind(dtype.name) == "integer" and array.size:
        limits = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
        # As Python integers: int4 has no comparison with wider types, uint64 none with int64.
        least, most = int(array.min()), int(array.max())
        if least < int(limits.min) or most > int(limits.max):
            raise StructureMismatchError(
                f"restore {name}: expected integers that fit {dtype.name}, found "
                f"{array.dtype.name} from {least} to {most}; restore it as {array.dtype.name}"
            )
    with np.errstate(over="ignore", invalid="ignore"):
        if array.itemsize == dtype.itemsize == 1 and array.dtype != dtype:
            # ml_dtypes has no conversions between its own small types; the wider one is exact.
            array = array.astype(np.int16 if _kind(dtype.name) == "integer" else np.float32)
        return array.astype(dtype)


def _kind(name: str) -> str | None:
    dtype = numpy_dtype(name)
    if dtype is None or dtype.kind in "bc" or dtype.fields is not None:
        return None
    try:
        ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    except ValueError:
        return "integer"
    return "float"
