"""Restore like a given JAX state: with its structure, types and shardings."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from holdfast.adapt import leaves
from holdfast.adapt.jax import arrays
from holdfast.adapt.jax.arrays import check_usable
from holdfast.adapt.jax.tree import flatten
from holdfast.errors import StructureMismatchError
from holdfast.format.dtypes import dtype_name, numpy_dtype
from holdfast.format.paths import Path, path_name
from holdfast.format.placement import RestoreTarget
from holdfast.format.records import ArraySpec, CheckpointSpec
from holdfast.format.values import decode_value

DIFFERENCES_SHOWN_MAX = 20


class LikeRestoration:
    """Builds a state like `like`; see `holdfast.adapt.contract.Restoration`."""

    def __init__(self, spec: CheckpointSpec, like: object) -> None:
        self._like, self._structure = flatten(like, "restore")
        check_usable(self._like, self._structure.paths, "restore", keys_alone=True)
        self._spec = spec
        self._values = {value.path: decode_value(value.value) for value in spec.values}
        _check_structure(spec, self._values, self._structure.paths, self._like)
        requested = set(self._structure.paths)
        self.process_values: Sequence[Path] = [p for p in spec.process_values if p in requested]
        self._index = {array.path: index for index, array in enumerate(spec.arrays)}
        self._buffers: dict[Path, dict[Any, np.ndarray]] = {}
        targets: list[RestoreTarget] = []
        for path, leaf in zip(self._structure.paths, self._like, strict=True):
            if path in self._index:
                targets += self._targets(path, leaf)
        self.targets: Sequence[RestoreTarget] = targets

    def _targets(self, path: Path, leaf: Any) -> list[RestoreTarget]:
        index = self._index[path]
        array = self._spec.arrays[index]
        dtype = numpy_dtype(array.dtype)
        assert dtype is not None
        if leaves.is_numpy(leaf):
            regions = [((0,) * len(array.shape), array.shape)]
        else:
            regions = arrays.regions_needed(array.shape, _stored_like(leaf, array))
        made = {
            region: arrays.aligned_buffer(tuple(b - a for a, b in zip(*region, strict=True)), dtype)
            for region in regions
        }
        self._buffers[path] = made
        is_taking = not leaves.is_numpy(leaf)
        return [
            RestoreTarget(
                array_index=index,
                region=region,
                buffer=buffer,
                take=functools.partial(made.__setitem__, region) if is_taking else None,
            )
            for region, buffer in made.items()
        ]

    def finish(self, process_values: Mapping[Path, object]) -> object:
        restored = []
        for path, leaf in zip(self._structure.paths, self._like, strict=True):
            if path in self._index:
                restored.append(self._array(path, leaf))
            else:
                restored.append(self._values.get(path, leaf))
        for path, leaf in zip(self._structure.paths, self._like, strict=True):
            if path in process_values:
                leaves.give_state(leaf, process_values[path])
        return jax.tree_util.tree_unflatten(self._structure.treedef, restored)

    def _array(self, path: Path, leaf: Any) -> Any:
        array = self._spec.arrays[self._index[path]]
        buffers = self._buffers.pop(path)
        if leaves.is_numpy(leaf):
            (buffer,) = buffers.values()
            if isinstance(leaf, np.generic):
                return buffer[()]
            # The dtypes are equal except for the byte order, which follows `like`.
            return buffer.astype(leaf.dtype, copy=False)
        made = arrays.assembled(array.shape, _stored_like(leaf, array), buffers)
        return jax.random.wrap_key_data(made, impl=array.prng_impl) if array.prng_impl else made


def _stored_like(leaf: Any, array: ArraySpec) -> Any:
    """Return an object with the sharding of the stored array: for typed keys, of key data."""
    if array.prng_impl is None:
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        array.shape, np.uint32, sharding=leaf.sharding
    )


def _check_structure(
    spec: CheckpointSpec, values: Mapping[Path, object], paths: Sequence[Path], like: Sequence[Any]
) -> None:
    saved = {array.path: _describe_spec(array) for array in spec.arrays}
    saved |= {path: _describe_value(value) for path, value in values.items()}
    requested = {path: _describe_leaf(leaf) for path, leaf in zip(paths, like, strict=True)}
    # `like` may omit stateful objects: a program that divides their states itself has to.
    saved |= {path: "object with a state" for path in spec.process_values if path in requested}
    differences = [
        f"{path_name(path)}: expected {requested.get(path, 'nothing')}, found "
        f"{saved.get(path, 'nothing')}"
        for path in dict.fromkeys([*requested, *saved])
        if requested.get(path) != saved.get(path)
    ]
    if differences:
        shown = differences[:DIFFERENCES_SHOWN_MAX]
        more = len(differences) - len(shown)
        raise StructureMismatchError(
            f"restore: the requested state differs from the checkpoint in {len(differences)} "
            "places (expected: requested, found: saved):\n  "
            + "\n  ".join(shown)
            + (f"\n  and {more} more" if more else "")
            + "\nPass a state of the saved structure, or like=None for all that was saved."
        )


def _describe_spec(array: ArraySpec) -> str:
    if array.prng_impl is not None:
        return _describe_array(f"key<{array.prng_impl}>", array.shape[:-1])
    return _describe_array(array.dtype, array.shape)


def _describe_leaf(leaf: Any) -> str:
    if leaves.is_value(leaf):
        return _describe_value(leaf)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        if arrays.is_key(leaf):
            return _describe_array(f"key<{arrays.key_impl_name(leaf)}>", leaf.shape)
        return _describe_array(dtype_name(np.dtype(leaf.dtype)) or str(leaf.dtype), leaf.shape)
    if leaves.is_numpy(leaf):
        return _describe_array(dtype_name(leaf.dtype) or str(leaf.dtype), leaf.shape)
    if leaves.keeps_state(leaf):
        return "object with a state"
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"


def _describe_array(dtype: str, shape: tuple[int, ...]) -> str:
    return f"array {dtype}[{', '.join(map(str, shape))}]"


def _describe_value(value: object) -> str:
    return "None" if value is None else type(value).__name__
