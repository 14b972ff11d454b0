"""A PyTorch state as a tree: dicts, lists and tuples, and the objects that become subtrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.adapt import leaves as adapt_leaves
from holdfast.adapt import tree as adapt_tree
from holdfast.adapt.contract import RestoreRequest
from holdfast.adapt.torch import tensors
from holdfast.adapt.torch.objects import StateObject, process_object, state_object
from holdfast.adapt.tree import Subtree, Tree
from holdfast.errors import UnsupportedLeafError
from holdfast.format.paths import Path, path_name
from holdfast.format.records import CheckpointSpec

_FOREIGN = ("jax", "jaxlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """The checkpoint that a state is expanded for, when it is to be filled."""

    spec: CheckpointSpec
    request: RestoreRequest


def flatten(state: object, call: str, like: Likeness | None = None) -> Tree:
    """Return the leaves of `state`; with `like`, the structure of its objects is that of the spec.

    When such a tree is built again, objects get their states.

    Raises:
        UnsupportedLeafError: a leaf is an array of another framework, or a loader without a state,
            or a key cannot be a name.
        StructureMismatchError: an object differs from the saved one; see `like` of each object.
    """

    def expand(leaf: Any, path: Path) -> Any:
        if tensors.is_plain(leaf) and leaf.layout is torch.strided:
            # Nearly all leaves of a large state, which the code below would keep as well.
            return leaf
        stateful = state_object(leaf, path)
        if stateful is not None:
            return _subtree(stateful, path, like)
        if type(leaf).__module__.partition(".")[0] in _FOREIGN:
            raise UnsupportedLeafError(
                f"{call} {path_name(path)}: expected a tensor of PyTorch, found "
                f"{type(leaf).__qualname__} of JAX; a state has arrays of one framework: convert "
                "it, or use a manager for each"
            )
        process_leaf = process_object(leaf, path)
        if process_leaf is None and isinstance(leaf, torch.utils.data.DataLoader):
            raise UnsupportedLeafError(
                f"{call} {path_name(path)}: expected a loader with a state, found "
                f"{type(leaf).__qualname__} of PyTorch, which keeps none; use StatefulDataLoader "
                "of the package torchdata, which takes the same arguments"
            )
        return process_leaf or leaf

    return adapt_tree.flatten(state, call, expand)


def _subtree(stateful: StateObject, path: Path, like: Likeness | None) -> Subtree:
    def rebuild(state: Any, paths: Sequence[Path]) -> Any:
        if like is not None and any(map(like.request.wants, (*paths, path))):
            with adapt_leaves.object_errors(stateful.leaf, path, "restore"):
                stateful.set_state(state)
        return stateful.leaf

    with adapt_leaves.object_errors(stateful.leaf, path, "save" if like is None else "restore"):
        if like is None:
            own = stateful.state_tree()
        else:
            own = stateful.tree_to_fill(like.spec, like.request, path)
    return Subtree(node=stateful.leaf, tree=own, rebuild=rebuild)


def tied(leaves: Sequence[Any]) -> list[int | None]:
    """Return for each leaf the index of an earlier one that is tied to it, or None."""
    first: dict[Any, int] = {}
    firsts: list[int | None] = []
    for index, leaf in enumerate(leaves):
        key = tensors.identity(leaf) if tensors.is_tensor(leaf) else None
        at = index if key is None else first.setdefault(key, index)
        firsts.append(None if at == index else at)
    return firsts


def updated_by_optimizers(tree: Tree, is_covered: Callable[[Any], bool]) -> set[int]:
    """Return the ids of the tensors that belong to those optimizers of a state that are covered."""
    ids: set[int] = set()
    for optimizer in tree.expanded:
        if isinstance(optimizer, torch.optim.Optimizer) and is_covered(optimizer):
            ids.update(id(p) for group in optimizer.param_groups for p in group["params"])
            ids.update(id(value) for of in optimizer.state.values() for value in of.values())
    return ids
