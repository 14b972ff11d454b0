"""Define the metadata that a manager returns: of the run, of a step, and of the trees in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import outlines
from holdfast.interop.orbax.outlines import SavedLeaf, TreeOutline
from holdfast.interop.orbax.records import ItemRecord, StepRecord


@dataclasses.dataclass(frozen=True)
class RootMetadata:
    """What was given to the manager as `metadata`."""

    internal_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    custom_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetadata:
    """One checkpoint: `item_metadata` is of the unnamed item, or a `Composite` of all."""

    item_handlers: Any = None
    item_metadata: Any = None
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    performance_metrics: Any = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafMetadata:
    """One leaf: its shape and dtype, and the sharding if its devices are here."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any = None
    directory: Any = None
    storage: Any = None


class ArrayMetadata(LeafMetadata):
    """An array."""


class ScalarMetadata(LeafMetadata):
    """A Python number."""


class StringMetadata(LeafMetadata):
    """A string, or bytes."""


@jax.tree_util.register_pytree_with_keys_class
class TreeMetadata(Mapping[Any, Any]):
    """A saved tree: `tree` has the metadata of a leaf at each of its places.

    It is a pytree with the children of `tree`, so it can be mapped and be the target of a restore.
    """

    def __init__(self, tree: Any, custom_metadata: Any = None) -> None:
        self.tree = tree
        self.custom_metadata = custom_metadata

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        """Return the children with their keys, and what `tree_unflatten` needs besides."""
        if isinstance(self.tree, dict):
            keys: list[Any] = [jax.tree_util.DictKey(key) for key in self.tree]
            children = list(self.tree.values())
        elif isinstance(self.tree, list):
            keys = [jax.tree_util.SequenceKey(index) for index in range(len(self.tree))]
            children = self.tree
        else:
            keys, children = [jax.tree_util.GetAttrKey("tree")], [self.tree]
        names = tuple(self.tree) if isinstance(self.tree, dict) else None
        kind = (type(self.tree) if isinstance(self.tree, dict | list) else None, names)
        return list(zip(keys, children, strict=True)), (kind, self.custom_metadata)

    @classmethod
    def tree_unflatten(cls, structure: Any, children: Iterable[Any]) -> TreeMetadata:
        """Return the tree with other children."""
        (kind, names), custom_metadata = structure
        tree: Any = list(children)
        if kind is dict:
            tree = dict(zip(names, tree, strict=True))
        return cls(tree if kind is not None else tree[0], custom_metadata)

    def __repr__(self) -> str:
        return f"TreeMetadata(tree={self.tree!r}, custom_metadata={self.custom_metadata!r})"


def of_item(item: ItemRecord) -> Any:
    """Return the metadata of an item; None if it is no tree and no array."""
    if item.outline is None:
        return None
    tree = of_outline(item.outline)
    return TreeMetadata(tree, item.custom_metadata) if item.kind == "tree" else tree


def of_outline(outline: TreeOutline) -> Any:
    """Return a tree with the metadata of each leaf."""
    return outlines.built([(leaf.path, _of_leaf(leaf, outline)) for leaf in outline.leaves])


def _of_leaf(leaf: SavedLeaf, outline: TreeOutline) -> Any:
    name = ".".join(str(entry.key) for entry in leaf.path)
    if leaf.kind == "empty":
        return type(outlines.EMPTY[leaf.dtype])()
    if leaf.kind == "none":
        return None
    if leaf.kind in outlines.NUMBERS:
        dtype: Any = np.dtype(leaf.dtype or outlines.NUMBERS[leaf.kind])
        return ScalarMetadata(name=name, shape=(), dtype=dtype)
    if leaf.kind in outlines.VALUES:
        return StringMetadata(name=name, shape=(), dtype=None)
    sharding = None
    if leaf.sharding is not None:
        try:
            sharding = outline.sharding(leaf)
        except InvalidArgumentError:
            # The devices are of another job; the metadata is of use without them.
            sharding = None
    return ArrayMetadata(
        name=name,
        shape=leaf.stored_shape,
        dtype=np.dtype(np.uint32 if leaf.kind == "key" else leaf.dtype),
        sharding=sharding,
    )


def of_step(record: StepRecord, items: Any) -> StepMetadata:
    """Return the metadata of a checkpoint."""
    nsecs = int(record.time.timestamp() * 1e9)
    return StepMetadata(
        item_handlers={name: item.kind for name, item in record.items.items()},
        item_metadata=items,
        metrics=record.metrics or {},
        init_timestamp_nsecs=nsecs,
        commit_timestamp_nsecs=nsecs,
        custom_metadata=record.custom_metadata or {},
    )
