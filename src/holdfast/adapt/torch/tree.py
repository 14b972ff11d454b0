"""A PyTorch state as a tree: dicts, lists and tuples, and the objects that become subtrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.adapt import tree as plain_tree
from holdfast.adapt.contract import RestoreRequest
from holdfast.adapt.torch import tensors
from holdfast.adapt.torch.objects import StateObject, process_object, state_object
from holdfast.errors import UnsupportedLeafError
from holdfast.format.paths import Path, path_name
from holdfast.format.records import CheckpointSpec, Container

_FOREIGN = ("jax", "jaxlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """The checkpoint that a state is expanded for, when it is to be filled."""

    spec: CheckpointSpec
    request: RestoreRequest


@dataclass(frozen=True, slots=True)
class TorchTree:
    """A flattened state. `parts` are the leaves of the outer tree: some are subtrees themselves."""

    outer: plain_tree.Tree
    parts: tuple[tuple[StateObject, TorchTree] | None, ...]
    leaves: tuple[Any, ...]
    paths: tuple[Path, ...]
    containers: tuple[Container, ...]

    def unflatten(self, leaves: Sequence[Any], request: RestoreRequest) -> object:
        """Return the state with these leaves; objects get their states."""
        return self._built(iter(leaves), request)

    def _built(self, leaves: Iterator[Any], request: RestoreRequest) -> object:
        found = []
        for path, part in zip(self.outer.paths, self.parts, strict=True):
            if part is None:
                found.append(next(leaves))
                continue
            of, inner = part
            tree = inner._built(leaves, request)
            if any(map(request.wants, inner.paths)) or request.wants(path):
                of.set_state(tree)
            found.append(of.leaf)
        return self.outer.unflatten(found)


def flatten(state: object, call: str, like: Likeness | None = None, prefix: Path = ()) -> TorchTree:
    """Return the leaves of `state`; with `like`, the structure of its objects is that of the spec.

    Raises:
        UnsupportedLeafError: a leaf is an array of another framework, or a key cannot be a name.
        StructureMismatchError: an object differs from the saved one; see `like` of each object.
    """
    outer = plain_tree.flatten(state, call, prefix)
    parts: list[tuple[StateObject, TorchTree] | None] = []
    leaves: list[Any] = []
    paths: list[Path] = []
    containers = list(outer.containers)
    for leaf, path in zip(outer.leaves, outer.paths, strict=True):
        if tensors.is_plain(leaf) and leaf.layout is torch.strided:
            # Nearly all leaves of a large state, which the code below would keep as well.
            parts.append(None)
            leaves.append(leaf)
            paths.append(path)
            continue
        of = state_object(leaf, path)
        if of is not None:
            tree = (
                of.state_tree() if like is None else of.tree_to_fill(like.spec, like.request, path)
            )
            inner = flatten(tree, call, like, path)
            leaves += inner.leaves
            paths += inner.paths
            containers += inner.containers
            parts.append((of, inner))
            continue
        if type(leaf).__module__.partition(".")[0] in _FOREIGN:
            raise UnsupportedLeafError(
                f"{call} {path_name(path)}: expected a tensor of PyTorch, found "
                f"{type(leaf).__qualname__} of JAX; a state has arrays of one framework: convert "
                "it, or use a manager for each"
            )
        parts.append(None)
        leaves.append(process_object(leaf, path) or leaf)
        paths.append(path)
    return TorchTree(outer, tuple(parts), tuple(leaves), tuple(paths), tuple(containers))


def tied(leaves: Sequence[Any]) -> list[int | None]:
    """Return for each leaf the index of an earlier one that is tied to it, or None."""
    first: dict[Any, int] = {}
    found: list[int | None] = []
    for index, leaf in enumerate(leaves):
        key = tensors.identity(leaf) if tensors.is_tensor(leaf) else None
        at = index if key is None else first.setdefault(key, index)
        found.append(None if at == index else at)
    return found


def updated_by_optimizers(tree: TorchTree, is_covered: Callable[[Any], bool]) -> set[int]:
    """Return the ids of the tensors that belong to those optimizers of a state that are covered."""
    found: set[int] = set()
    for part in tree.parts:
        optimizer = None if part is None else part[0].leaf
        if isinstance(optimizer, torch.optim.Optimizer) and is_covered(optimizer):
            found.update(id(p) for group in optimizer.param_groups for p in group["params"])
            found.update(id(value) for of in optimizer.state.values() for value in of.values())
    return found
