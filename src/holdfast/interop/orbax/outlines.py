"""Describe pytrees as JSON: their leaves with paths, so that they are restored without a target.

Invariant: the outline of a tree and the state that Holdfast saves have the same paths.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import shardings
from holdfast.interop.orbax.leaf_args import PLACEHOLDER

Json = Any
Key = str | int
NUMBERS: dict[str, type] = {"bool": bool, "int": int, "float": float}
VALUES: dict[str, type] = NUMBERS | {"str": str, "bytes": bytes}
EMPTY: dict[str, Any] = {"dict": {}, "list": [], "tuple": ()}
OUTLINES_MAX = 8
NODE = "node"
"""The dtype of a leaf of kind `none` that is, or may be, a NamedTuple without fields."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of a path: a key, and whether its parent is a sequence."""

    key: Key
    in_sequence: bool

    @property
    def matched(self) -> tuple[bool, str]:
        """What is equal for two entries that lead to the same place."""
        return self.in_sequence, str(self.key)


TreePath = tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLeaf:
    """One leaf as it was saved.

    `kind` is `jax`, `key` (typed keys of `jax.random`), `numpy`, `none`, `empty` (a container
    without leaves, `dtype` names it), or the name of a Python type (`dtype` is that of the NumPy
    scalar which was saved as a number).
    """

    path: TreePath
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    sharding: int | None = None

    @property
    def is_array(self) -> bool:
        """Whether it is an array."""
        return self.kind in ("jax", "key", "numpy")

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape; of typed keys that of their words, which are uint32."""
        if self.kind != "key":
            return self.shape
        return self.shape + jax.random.key_data(jax.random.key(0, impl=self.dtype)).shape

    @property
    def path_keys(self) -> tuple[Key, ...]:
        """The path as Holdfast knows it."""
        return tuple(entry.key for entry in self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOutline:
    """A saved tree without its elements."""

    leaves: tuple[SavedLeaf, ...]
    shardings: tuple[Json, ...] = ()

    def sharding(self, leaf: SavedLeaf) -> Any:
        """Return the sharding with which a leaf was saved.

        Raises:
            InvalidArgumentError: Its devices are not here.
        """
        assert leaf.sharding is not None
        return shardings.found(self.shardings[leaf.sharding], shown(leaf.path))


def shown(path: TreePath) -> str:
    """Return a path for messages."""
    return "/".join(str(entry.key) for entry in path) or "the item"


def is_end(node: object) -> bool:
    """Return whether a node counts as a leaf: None, and containers without children."""
    if node is None or node is PLACEHOLDER:
        return True
    return is_empty_tuple(node) or (type(node) in (dict, list, tuple) and not node)


def is_empty_tuple(node: object) -> bool:
    """Return whether a node is a NamedTuple without fields, such as `optax.EmptyState()`."""
    return isinstance(node, tuple) and type(node) is not tuple and not node


def flattened(tree: object) -> tuple[list[tuple[TreePath, Any]], Any]:
    """Return the leaves of `tree` with their paths, and its structure."""
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_end)
    return [(tuple(_entry(key) for key in path), leaf) for path, leaf in with_paths], treedef


def _entry(key: Any) -> Entry:
    if isinstance(key, jax.tree_util.SequenceKey):
        return Entry(key.idx, in_sequence=True)
    name = key.name if isinstance(key, jax.tree_util.GetAttrKey) else key.key
    if type(name) not in (str, int):
        raise InvalidArgumentError(
            f"save: expected keys that are strings or ints, found {name!r}; rename the key"
        )
    return Entry(name, in_sequence=False)


def outline_of(with_paths: Sequence[tuple[TreePath, Any]]) -> TreeOutline:
    """Return the outline of a tree with these leaves; equal trees share one.

    Raises:
        InvalidArgumentError: A leaf cannot be saved.
    """
    return _outline(tuple((path, _signature(leaf, path)) for path, leaf in with_paths))


def _signature(leaf: Any, path: TreePath) -> Hashable:
    if isinstance(leaf, jax.Array):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return "key", leaf.shape, str(jax.random.key_impl(leaf)), leaf.sharding
        return "jax", leaf.shape, leaf.dtype.name, leaf.sharding
    if isinstance(leaf, np.ndarray | np.generic):
        return "numpy", leaf.shape, leaf.dtype.name, None
    if leaf is None:
        return "none", (), "", None
    if is_empty_tuple(leaf):
        return "none", (), NODE, None
    name = type(leaf).__name__
    if type(leaf) is VALUES.get(name):
        return name, (), "", None
    if name in EMPTY and not leaf:
        return "empty", (), name, None
    raise InvalidArgumentError(
        f"save {shown(path)}: expected an array, a number, a string, bytes or None, found "
        f"{type(leaf).__module__}.{type(leaf).__qualname__}; convert it or take it out"
    )


@functools.lru_cache(maxsize=OUTLINES_MAX)
def _outline(signatures: tuple[tuple[TreePath, Any], ...]) -> TreeOutline:
    index: dict[Any, int] = {}
    leaves = [
        SavedLeaf(
            path=path,
            kind=kind,
            shape=tuple(shape),
            dtype=dtype,
            sharding=None if sharding is None else index.setdefault(sharding, len(index)),
        )
        for path, (kind, shape, dtype, sharding) in signatures
    ]
    return TreeOutline(
        leaves=tuple(leaves), shardings=tuple(shardings.described(sharding) for sharding in index)
    )


def encoded(outline: TreeOutline) -> Json:
    """Return an outline as JSON."""
    return {
        "leaves": [
            [
                [_encoded_entry(entry) for entry in leaf.path],
                leaf.kind,
                list(leaf.shape),
                leaf.dtype,
                leaf.sharding,
            ]
            for leaf in outline.leaves
        ],
        "shardings": list(outline.shardings),
    }


def decoded(json: Json) -> TreeOutline:
    """Return the outline that `encoded` encoded."""
    return TreeOutline(
        leaves=tuple(
            SavedLeaf(
                path=tuple(map(_decoded_entry, path)),
                kind=kind,
                shape=tuple(shape),
                dtype=dtype,
                sharding=sharding,
            )
            for path, kind, shape, dtype, sharding in json["leaves"]
        ),
        shardings=tuple(json["shardings"]),
    )


def _encoded_entry(entry: Entry) -> Json:
    if entry.in_sequence:
        return entry.key
    return entry.key if isinstance(entry.key, str) else {"int": entry.key}


def _decoded_entry(json: Json) -> Entry:
    if isinstance(json, dict):
        return Entry(json["int"], in_sequence=False)
    return Entry(json, in_sequence=isinstance(json, int))


def built(leaves: Sequence[tuple[TreePath, Any]]) -> Any:
    """Return the tree with these leaves: dicts, and lists for sequences."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    children: dict[Key, list[tuple[TreePath, Any]]] = {}
    for path, leaf in leaves:
        children.setdefault(path[0].key, []).append((path[1:], leaf))
    if leaves and leaves[0][0][0].in_sequence:
        return [built(children[key]) for key in sorted(children)]
    return {key: built(below) for key, below in children.items()}


def nested(leaves: dict[tuple[Key, ...], Any]) -> Any:
    """Return nested dicts with these leaves, which have the same paths for Holdfast."""
    tree: dict[Key, Any] = {}
    for path, leaf in leaves.items():
        if not path:
            return leaf
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree
