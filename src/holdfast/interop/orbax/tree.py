"""Flatten trees to dicts and build them again, as `ocp.tree` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from holdfast.errors import InvalidArgumentError, StructureMismatchError
from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.metadata import LeafMetadata, StringMetadata

PyTree = Any
PyTreeOf = Any
PyTreeKey = Any
PyTreePath = tuple[Any, ...]
JsonType = Any
SEQUENCE_KEYS = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)
DICT_KEYS = (jax.tree_util.DictKey, jax.tree_util.GetAttrKey)


def get_key_name(key: Any) -> str | int:
    """Return the name of one key of a path: an index, or a string.

    Raises:
        InvalidArgumentError: It is no key of JAX.
    """
    match key:
        case jax.tree_util.SequenceKey():
            return int(key.idx)
        case jax.tree_util.DictKey():
            return str(key.key)
        case jax.tree_util.GetAttrKey():
            return str(key.name)
        case jax.tree_util.FlattenedIndexKey():
            return int(key.key)
    raise InvalidArgumentError(f"expected a key of jax.tree_util, found {key!r}")


def str_keypath(keypath: tuple[Any, ...]) -> tuple[str, ...]:
    """Return a path of JAX as strings."""
    return tuple(str(get_key_name(key)) for key in keypath)


tuple_path_from_keypath = str_keypath


def get_param_names(item: Any, *, include_empty_nodes: bool = True) -> Any:
    """Return a tree that has the name of each leaf, such as `layers.0.kernel`."""
    is_leaf = is_empty_or_leaf if include_empty_nodes else None
    return jax.tree_util.tree_map_with_path(
        lambda path, _: ".".join(str_keypath(path)), item, is_leaf=is_leaf
    )


def is_empty_node(x: Any) -> bool:
    """Return whether a node is a container without children."""
    return not jax.tree_util.all_leaves([x]) and not _children(x)


def is_empty_or_leaf(x: Any) -> bool:
    """Return whether a node has no children."""
    return jax.tree_util.all_leaves([x]) or not _children(x)


def _children(node: Any) -> list[Any]:
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]


def is_sequence_key(key: Any) -> bool:
    """Return whether a key is an index."""
    return isinstance(key, SEQUENCE_KEYS)


def is_dict_key(key: Any) -> bool:
    """Return whether a key is that of a dict, or the name of a field."""
    return isinstance(key, DICT_KEYS)


def is_flat_dict(tree: Any) -> bool:
    """Return whether a tree is a dict of leaves."""
    return isinstance(tree, dict) and all(
        jax.tree_util.all_leaves([value]) for value in tree.values()
    )


def to_flat_dict(
    tree: Any,
    sep: str | None = None,
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Any], bool] | None = None,
) -> dict[Any, Any]:
    """Return the leaves of a tree by their paths, as tuples or joined by `sep`."""
    is_leaf = is_leaf or (is_empty_or_leaf if keep_empty_nodes else None)
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    paths = {str_keypath(path): leaf for path, leaf in flat}
    return paths if sep is None else {sep.join(path): leaf for path, leaf in paths.items()}


def from_flat_dict(
    flat_dict: Mapping[Any, Any],
    target: Any = None,
    sep: str | None = None,
    *,
    inplace: bool = False,
) -> Any:
    """Return the tree of `to_flat_dict`: like `target`, or nested dicts.

    With `inplace` the leaves are removed from `flat_dict`, so that each is held once.
    """
    leaves: Any = flat_dict if inplace else dict(flat_dict)
    if target is not None:
        values = [leaves.pop(path) for path in to_flat_dict(target, sep=sep)]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(target), values)
    tree: dict[str, Any] = {}
    for path in list(leaves):
        keys = path if sep is None else path.split(sep)
        if not keys:
            return leaves.pop(path)
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaves.pop(path)
    return tree


def from_flattened_with_keypath(flat_with_keys: list[tuple[tuple[Any, ...], Any]]) -> Any:
    """Return the tree of leaves with paths of JAX: dicts, and lists for sequences.

    Raises:
        InvalidArgumentError: There is no leaf.
    """
    if not flat_with_keys:
        raise InvalidArgumentError("from_flattened_with_keypath: expected leaves, found none")
    if not flat_with_keys[0][0]:
        return flat_with_keys[0][1]
    below: dict[str | int, list[tuple[tuple[Any, ...], Any]]] = {}
    for path, leaf in flat_with_keys:
        below.setdefault(get_key_name(path[0]), []).append((path[1:], leaf))
    children = {name: from_flattened_with_keypath(rest) for name, rest in below.items()}
    if is_sequence_key(flat_with_keys[0][0][0]):
        return [children[index] for index in sorted(children)]
    return children


def serialize_tree(tree: Any, keep_empty_nodes: bool = False) -> Any:
    """Return a tree of dicts and lists with the leaves of `tree`.

    Raises:
        InvalidArgumentError: It has no leaf.
    """
    is_leaf = is_empty_or_leaf if keep_empty_nodes else None
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return from_flattened_with_keypath(flat)


def deserialize_tree(serialized: Any, target: Any, keep_empty_nodes: bool = False) -> Any:
    """Return a tree like `target` with the leaves that `serialized` has at the same paths.

    Raises:
        StructureMismatchError: One is missing.
    """
    is_leaf = is_empty_or_leaf if keep_empty_nodes else None

    def found(path: tuple[Any, ...], _: Any) -> Any:
        node = serialized
        for key in path:
            name: Any = get_key_name(key)
            try:
                if isinstance(node, Mapping):
                    node = node[name] if name in node else node[str(name)]
                elif isinstance(node, list | tuple) and isinstance(name, int):
                    node = node[name]
                else:
                    node = getattr(node, str(name))
            except (KeyError, IndexError, AttributeError) as error:
                shown = "/".join(str_keypath(path))
                raise StructureMismatchError(
                    f"deserialize_tree {shown}: expected a leaf, found nothing"
                ) from error
        return node

    return jax.tree_util.tree_map_with_path(found, target, is_leaf=is_leaf)


def merge_by_path(*trees: Any, target: Any = None) -> Any:
    """Return a tree with the leaves of all, in dicts; of two at one path, that of the later tree.

    With `target`, the tree has its structure. It is `ocp.merge_trees`.
    """
    merged: dict[Any, Any] = {}
    for tree in trees:
        merged |= to_flat_dict(tree)
    return from_flat_dict(merged, target=target)


def merge_trees(
    *trees: Any, overwrite: bool = False, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Return a tree with the leaves of all: dicts by key, sequences of one length by index.

    Args:
        trees: The trees.
        overwrite: Whether of two leaves at one path, or two nodes that do not fit together, that
            of the later tree is taken.
        is_leaf: Whether a node counts as a leaf; None: leaves and None do.

    Raises:
        StructureMismatchError: A `ValueError`: sequences have other lengths, or without
            `overwrite` two trees have a leaf at one path, or nodes that do not fit together.
    """

    def counts_as_leaf(node: Any) -> bool:
        if is_leaf is not None:
            return is_leaf(node)
        return node is None or jax.tree_util.all_leaves([node])

    def merged(earlier: Any, later: Any, path: str) -> Any:
        is_node = not counts_as_leaf(earlier) and not counts_as_leaf(later)
        if is_node and isinstance(earlier, Mapping) and isinstance(later, Mapping):
            both = {
                key: merged(earlier[key], node, f"{path}/{key}") if key in earlier else node
                for key, node in later.items()
            }
            return {**earlier, **both}
        if is_node and isinstance(earlier, list | tuple) and type(earlier) is type(later):
            if len(earlier) != len(later):
                raise StructureMismatchError(
                    f"merge_trees {path or 'at the root'}: expected sequences of one length, found "
                    f"{len(earlier)} and {len(later)}"
                )
            pairs = zip(earlier, later, strict=True)
            values = [merged(a, b, f"{path}/{i}") for i, (a, b) in enumerate(pairs)]
            is_named = hasattr(earlier, "_fields")
            return type(earlier)(*values) if is_named else type(earlier)(values)
        if overwrite:
            return later
        raise StructureMismatchError(
            f"merge_trees {path or 'at the root'}: expected nodes that fit together, found "
            f"{type(earlier).__name__} and {type(later).__name__}; pass overwrite=True for the "
            "later one"
        )

    if not trees:
        return {}
    whole = trees[0]
    for tree in trees[1:]:
        whole = merged(whole, tree, "")
    return whole


def with_key_data(tree: Any) -> Any:
    """Return a tree with the words of typed keys of `jax.random` in their places."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key_data(leaf)
        return leaf

    return jax.tree_util.tree_map(of_leaf, tree)


def to_shape_dtype_struct(
    arr: Any, dtype: Any = None, scalar_dtype: type | None = None, support_format: bool = False
) -> Any:
    """Return shape, dtype and sharding of an array, or of the metadata of a leaf.

    Layouts of devices are not stored, so `support_format` has no effect. Numbers stay, or become
    `scalar_dtype`. Keys become the arrays of their words. A tree is mapped
    leaf by leaf, as Orbax's function of one leaf under `jax.tree.map`.
    """
    del support_format

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, StringMetadata):
            return str
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | LeafMetadata):
            return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
                leaf.shape, dtype or leaf.dtype, sharding=getattr(leaf, "sharding", None)
            )
        if isinstance(leaf, np.ndarray | np.generic):
            return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
                leaf.shape, dtype or leaf.dtype
            )
        if isinstance(leaf, int | float) and scalar_dtype is not None:
            return scalar_dtype(leaf)
        return leaf

    return jax.tree_util.tree_map(of_leaf, with_key_data(arr))


if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("tree")
