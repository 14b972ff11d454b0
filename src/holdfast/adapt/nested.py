"""Restore without a `like`: nested dicts, lists and tuples of arrays and values.

See docs/decisions/0052.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from holdfast.adapt.contract import EVERYTHING, ArraysOf, RestoreRequest
from holdfast.adapt.tree import node_of
from holdfast.errors import (
    CheckpointDamagedError,
    StructureMismatchError,
    UnsupportedLeafError,
)
from holdfast.format.dtypes import numpy_dtype
from holdfast.format.grid import RestoreTarget
from holdfast.format.paths import Path, PathPrefixes, path_name
from holdfast.format.records import ArraySpec, CheckpointSpec, Container, Key
from holdfast.format.values import decode_value


class NestedRestoration:
    """Builds a tree from what was saved.

    Among NumPy's arrays, typed PRNG keys come as their key data (uint32).

    With `only`, just the subtrees at those prefixes. What contains them comes as dicts, also where
    it was saved as a list, so that an index leads to the same leaf.

    Args:
        make: returns the framework's array with the elements of an array as stored.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        request: RestoreRequest = EVERYTHING,
        make: Callable[[np.ndarray, ArraySpec], Any] | None = None,
    ) -> None:
        check_prefixes(spec, request)
        self._request = request
        self._make = make
        self._spec = spec
        self.kept: Sequence[Path] = ()
        self.process_values: Sequence[Path] = [p for p in spec.process_values if request.wants(p)]
        self.divided: Sequence[Path] = ()
        self.pipelines: Mapping[Path, Sequence[str]] = {}
        indices = _indices(spec, request)
        arrays = {index: spec.arrays[index] for index in dict.fromkeys(indices.values())}
        self.targets: Sequence[RestoreTarget] = [
            RestoreTarget(
                array_index=index,
                region=((0,) * len(array.shape), array.shape),
                buffer=np.empty(array.shape, numpy_dtype(array.dtype)),
            )
            for index, array in arrays.items()
        ]

    def convert_dtypes(self) -> None:
        """Do nothing: without a `like` the arrays keep the dtypes in which they were saved."""

    def finish(self, process_values: Mapping[Path, object]) -> object:
        arrays = {target.array_index: self._array(target) for target in self.targets}
        return tree_of(self._spec, self._request, arrays, process_values)

    def _array(self, target: RestoreTarget) -> Any:
        spec, kind = self._spec.arrays[target.array_index], self._request.arrays
        of_numpy = target.buffer[()] if spec.scalar else target.buffer
        if self._make is None or kind is ArraysOf.NUMPY:
            return of_numpy
        if kind is ArraysOf.FRAMEWORK:
            return self._make(target.buffer, spec)
        try:
            return of_numpy if spec.scalar else self._make(target.buffer, spec)
        except UnsupportedLeafError:
            return of_numpy


def tree_of(
    spec: CheckpointSpec,
    request: RestoreRequest,
    arrays: Mapping[int, Any],
    process_values: Mapping[Path, object],
) -> Any:
    """Return the tree that was saved, with `arrays` by their index in place of its arrays.

    Raises:
        CheckpointDamagedError: the nodes form no tree.
    """
    # Tied arrays are one object again.
    leaves: dict[Path, Any] = {
        path: arrays[index] for path, index in _indices(spec, request).items()
    }
    for value in spec.values:
        if request.wants(value.path):
            leaves[value.path] = decode_value(value.value)
    leaves |= process_values
    containers = _containers(spec, request)
    for path in spec.process_values:
        # A state that is left out of a sequence must not move the items after it.
        is_left_out = path not in process_values and request.wants(path)
        parent = containers.get(path[:-1])
        if is_left_out and (not path or (parent and parent.kind in ("list", "tuple"))):
            leaves[path] = None
    return nested(containers, leaves)


def _indices(spec: CheckpointSpec, request: RestoreRequest) -> dict[Path, int]:
    return {path: index for path, index in spec.array_indices().items() if request.wants(path)}


def _containers(spec: CheckpointSpec, request: RestoreRequest) -> dict[Path, Container]:
    """Return the inner nodes at, below and above the prefixes, by path."""
    containers: dict[Path, Container] = {}
    for container in spec.containers:
        if request.wants(container.path):
            containers[container.path] = container
        elif request.only is not None and request.only.has_above(container.path):
            containers[container.path] = structs.replace(container, kind="dict")
    return containers


def check_prefixes(spec: CheckpointSpec, request: RestoreRequest) -> None:
    """Check that the checkpoint has something at each prefix of `request.only`.

    Raises:
        StructureMismatchError: it has nothing there; the message lists the tree's top level.
    """
    if request.only is None:
        return
    paths = paths_of(spec)
    missing = [
        name
        for name in request.only.without_paths(paths)
        if not any(PathPrefixes((p,)).covers(tuple(name.split("/"))) for p in request.partial.names)
    ]
    if missing:
        top = sorted({path_name(path[:1]) for path in paths if path})
        raise StructureMismatchError(
            f"{request.call}: expected something at {', '.join(missing)} (only=...), found "
            f"nothing; the checkpoint has {', '.join(top[:20])}"
            f"{' and more' if len(top) > 20 else ''}"
        )


def paths_of(spec: CheckpointSpec) -> list[Path]:
    """Return the paths of all leaves and inner nodes."""
    paths = [*spec.array_indices()] + [value.path for value in spec.values]
    return paths + [container.path for container in spec.containers] + [*spec.process_values]


def nested(containers: Mapping[Path, Container], leaves: Mapping[Path, Any]) -> Any:
    """Return the tree with these inner nodes and leaves, dicts in their recorded order.

    Raises:
        CheckpointDamagedError: a node's parent is missing, or two nodes have the same path.
    """
    children: dict[Path, dict[Key, Any]] = {path: {} for path in containers}
    if not containers:
        if set(leaves) != {()}:
            raise CheckpointDamagedError("read a tree: its leaves have no root")
        return leaves[()]
    # Longest paths first: a node is complete before it is added to its parent.
    for path in sorted([*containers, *leaves], key=len, reverse=True):
        node = leaves[path] if path in leaves else node_of(containers[path], children[path])
        if path == ():
            return node
        parent = children.get(path[:-1])
        if parent is None or path[-1] in parent:
            raise CheckpointDamagedError(f"read a tree: {path} does not fit into it")
        parent[path[-1]] = node
    raise CheckpointDamagedError("read a tree: it has no root")
