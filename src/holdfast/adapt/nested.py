"""Restore without a `like`: nested dicts, lists and tuples of NumPy arrays and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.errors import CheckpointDamagedError
from holdfast.format.dtypes import numpy_dtype
from holdfast.format.paths import Path
from holdfast.format.placement import RestoreTarget
from holdfast.format.records import CheckpointSpec
from holdfast.format.values import decode_value


class NestedRestoration:
    """Builds a tree from a checkpoint; typed PRNG keys are restored as key data (uint32)."""

    def __init__(self, spec: CheckpointSpec) -> None:
        self._spec = spec
        self.process_values: Sequence[Path] = spec.process_values
        self.targets: Sequence[RestoreTarget] = [
            RestoreTarget(
                array_index=index,
                region=((0,) * len(array.shape), array.shape),
                buffer=np.empty(array.shape, numpy_dtype(array.dtype)),
            )
            for index, array in enumerate(spec.arrays)
        ]

    def finish(self, process_values: Mapping[Path, object]) -> object:
        leaves: dict[Path, Any] = {}
        for array, target in zip(self._spec.arrays, self.targets, strict=True):
            leaves[array.path] = target.buffer[()] if array.scalar else target.buffer
        for value in self._spec.values:
            leaves[value.path] = decode_value(value.value)
        leaves |= process_values
        return nested({c.path: c.kind for c in self._spec.containers}, leaves)


def nested(containers: Mapping[Path, str], leaves: Mapping[Path, Any]) -> Any:
    """Return the tree with these inner nodes and leaves.

    Raises:
        CheckpointDamagedError: a node's parent is missing, or two nodes have the same path.
    """
    children: dict[Path, dict[str | int, Any]] = {path: {} for path in containers}
    if not containers:
        if set(leaves) != {()}:
            raise CheckpointDamagedError("read a tree: its leaves have no root")
        return leaves[()]
    # Longest paths first: a node is complete before it is added to its parent.
    for path in sorted([*containers, *leaves], key=len, reverse=True):
        node = leaves[path] if path in leaves else _container(containers[path], children[path])
        if path == ():
            return node
        parent = children.get(path[:-1])
        if parent is None or path[-1] in parent:
            raise CheckpointDamagedError(f"read a tree: {path} does not fit into it")
        parent[path[-1]] = node
    raise CheckpointDamagedError("read a tree: it has no root")


def _container(kind: str, children: dict[str | int, Any]) -> Any:
    if kind in ("list", "tuple"):
        items = [children[key] for key in sorted(children, key=str_or_int)]
        return items if kind == "list" else tuple(items)
    return children


def str_or_int(key: str | int) -> tuple[int, str]:
    """Return a sort key for keys of both kinds: ints by value, before strings."""
    return (key, "") if isinstance(key, int) else (1 << 62, key)
