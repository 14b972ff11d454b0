"""How arrays of JAX are restored: in the sharding of the ones that are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from holdfast.adapt.contract import RestoreRequest
from holdfast.adapt.jax import arrays, internals
from holdfast.adapt.jax.arrays import Pieces, check_usable
from holdfast.adapt.jax.tree import flatten
from holdfast.adapt.like import ArrayType, FilledLeaf, LikeRestoration, LikeState
from holdfast.errors import StructureMismatchError, UnsupportedLeafError
from holdfast.format.dtypes import dtype_name
from holdfast.format.grid import Region
from holdfast.format.paths import path_name
from holdfast.format.records import ArraySpec, CheckpointSpec


def like_restoration(spec: CheckpointSpec, request: RestoreRequest) -> LikeRestoration:
    """Prepare a state like `request.like`, any pytree.

    Raises:
        StructureMismatchError: it differs from what was saved.
        UnsupportedLeafError: it cannot be flattened, or has traced arrays or deleted keys.
    """
    values, structure = flatten(request.like, request.call)
    check_usable(values, structure.paths, request.call, keys_alone=True)
    like = LikeState(
        leaves=values,
        paths=structure.paths,
        containers=structure.containers,
        unflatten=lambda leaves: jax.tree_util.tree_unflatten(structure.treedef, leaves),
    )
    return LikeRestoration(spec, like, request, JaxArrayLeaves())


def whole_array(array: np.ndarray, spec: ArraySpec) -> Any:
    """Return an array on the default device with the elements of one as stored.

    Raises:
        UnsupportedLeafError: JAX has no such dtype, or not without `jax_enable_x64`.
    """
    check_fits_jax(array, spec.dtype, path_name(spec.path))
    # A copy: JAX may otherwise use the memory, which belongs to the reader.
    return _typed(jax.device_put(np.array(array)), spec)


def check_fits_jax(array: np.ndarray, dtype: str, name: str) -> None:
    """Check that JAX has the dtype of an array as stored, which is named `dtype`.

    Raises:
        UnsupportedLeafError: It has none, or not without `jax_enable_x64`.
    """
    if array.dtype.fields is not None:
        raise UnsupportedLeafError(
            f"restore {name}: expected a dtype of JAX, found {dtype}, which only PyTorch has; "
            "read it as an array of NumPy"
        )
    canonical = jax.dtypes.canonicalize_dtype(array.dtype)
    if canonical != array.dtype:
        raise UnsupportedLeafError(
            f"restore {name}: expected {array.dtype}, found that JAX would make it {canonical}; "
            "set jax_enable_x64, or read it as an array of NumPy"
        )


class JaxArrayLeaves:
    """See `holdfast.adapt.like.ArrayLeaves`."""

    takes_memory = True

    def type_of(self, leaf: Any) -> ArrayType | None:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return None
        if arrays.is_key(leaf):
            return ArrayType(f"key<{arrays.key_impl_name(leaf)}>", leaf.shape)
        return ArrayType(dtype_name(np.dtype(leaf.dtype)) or str(leaf.dtype), leaf.shape)

    def has_value(self, leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and not leaf.is_deleted()

    def make_buffers(
        self, leaf: Any, array: ArraySpec, dtype: np.dtype
    ) -> dict[Region, np.ndarray]:
        try:
            regions = arrays.regions_needed(array.shape, _stored_like(leaf, array))
        except ValueError as error:
            raise StructureMismatchError(
                f"restore {path_name(array.path)}: expected a sharding that divides the shape "
                f"{array.shape}, found {leaf.sharding}; give another sharding (JAX: {error})"
            ) from error
        return {
            region: arrays.aligned_buffer(tuple(b - a for a, b in zip(*region, strict=True)), dtype)
            for region in regions
        }

    def assemble_arrays(self, filled: Iterable[FilledLeaf]) -> list[Any]:
        whole = [*filled]
        made = arrays.assembled(
            [
                Pieces(array.shape, _stored_like(leaf, array), buffers)
                for leaf, array, buffers in whole
            ]
        )
        return [_typed(one, array) for one, (_, array, _) in zip(made, whole, strict=True)]


def _typed(made: jax.Array, spec: ArraySpec) -> jax.Array:
    """Return an array of stored elements as what was saved: typed keys, or a weakly typed array.

    The weak type is the checkpoint's and not that of the state asked for: a step returns what it
    was given, so the training goes on with the types that it had. What was cast has a strong type.
    """
    if spec.prng_impl is not None:
        keys: jax.Array = jax.random.wrap_key_data(made, impl=spec.prng_impl)
        return keys
    is_cast = dtype_name(np.dtype(made.dtype)) != spec.dtype
    return internals.weakly_typed(made) if spec.weak_type and not is_cast else made


def _stored_like(leaf: Any, array: ArraySpec) -> Any:
    """Return what has the sharding of the array as stored: for typed keys, of their key data."""
    if array.prng_impl is None:
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        array.shape, np.uint32, sharding=leaf.sharding
    )
