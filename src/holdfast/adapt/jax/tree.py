"""JAX pytrees: their leaves with paths, and the kinds of their inner nodes.

The paths are computed once per structure; after that a state costs one flatten.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax

from holdfast.adapt.tree import check_names, is_key
from holdfast.errors import UnsupportedLeafError
from holdfast.format.paths import ROOT_NAME, Path
from holdfast.format.records import Container, ContainerKind, Key, dict_container

CONTAINERS = (dict, list, tuple)
LEVELS_MAX = 400
KEYS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Structure:
    """A pytree without its leaves. None counts as a leaf, so that it is restored as None."""

    treedef: Any
    paths: tuple[Path, ...]
    containers: tuple[Container, ...]


def _is_none(node: object) -> bool:
    return node is None


def flatten(state: object, call: str = "save") -> tuple[list[Any], Structure]:
    """Return the leaves of `state` and its structure; `call` is the caller's name for messages.

    Raises:
        UnsupportedLeafError: a key is neither a string nor an int, two leaves have one name, or the
            tree contains itself or is too deep.
    """
    _check_levels(state, call)
    try:
        leaves, treedef = jax.tree_util.tree_flatten(state, is_leaf=_is_none)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse_mixed_keys(state, (), call)
        raise UnsupportedLeafError(
            f"{call}: the state cannot be flattened, as JAX reports: {error}"
        ) from error
    return leaves, _structure(treedef)


def _check_levels(state: object, call: str) -> None:
    """Raise if the containers of a state have too many levels, as those that contain themselves.

    It must not reach JAX: after its RecursionError the thread has no recursion left (JAX 0.10).
    """
    levels = [_containers_in(state)]
    keys: list[object] = []
    while levels:
        key, child = next(levels[-1], (None, None))
        if child is None:
            levels.pop()
            if keys:
                keys.pop()
            continue
        levels.append(_containers_in(child))
        keys.append(key)
        if len(levels) > LEVELS_MAX:
            shown = "/".join(map(str, keys[:KEYS_SHOWN]))
            raise UnsupportedLeafError(
                f"{call} {shown}/…: expected a tree, found more than {LEVELS_MAX} levels; a "
                "container that contains itself cannot be saved, remove the reference"
            )


def _children(node: object) -> Iterable[tuple[object, object]]:
    """Return what is directly in a dict, list or tuple, also of a subclass, with the keys."""
    if isinstance(node, dict):
        return node.items()
    return enumerate(node) if isinstance(node, list | tuple) else ()


def _containers_in(node: object) -> Iterator[tuple[object, object]]:
    return ((key, child) for key, child in _children(node) if isinstance(child, CONTAINERS))


def _refuse_mixed_keys(node: object, path: tuple[object, ...], call: str) -> None:
    """Raise for the first dict at or below `node` whose keys have no order."""
    keys = () if isinstance(node, OrderedDict) or not isinstance(node, dict) else tuple(node)
    if len({isinstance(key, str) for key in keys}) > 1:
        shown = "/".join(map(str, path)) or ROOT_NAME
        text = next(key for key in keys if isinstance(key, str))
        other = next(key for key in keys if not isinstance(key, str))
        raise UnsupportedLeafError(
            f"{call} {shown}: expected the keys of a dict to be all strings or all ints, found "
            f"{text!a} and {other!a}; rename the keys"
        )
    for key, child in _children(node):
        _refuse_mixed_keys(child, (*path, key), call)


@lru_cache(maxsize=16)
def _structure(treedef: Any) -> Structure:
    # The leaves are irrelevant, so any objects serve; numbers preserve the tree's own order.
    skeleton = jax.tree_util.tree_unflatten(treedef, list(range(treedef.num_leaves)))
    with_paths, _ = jax.tree_util.tree_flatten_with_path(skeleton, is_leaf=_is_none)
    if len(with_paths) != treedef.num_leaves:
        raise UnsupportedLeafError(
            f"save: the tree {str(treedef)[:200]} does not unflatten to what it was flattened "
            "from; one of its node types changes its leaves"
        )
    paths = tuple(tuple(_key(entry, path) for entry in path) for path, _ in with_paths)
    check_names(paths, "save")
    containers: list[Container] = []
    _walk(treedef, (), paths, containers)
    return Structure(treedef, paths, tuple(containers))


def _key(entry: Any, path: Any) -> str | int:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            key: Any = getattr(entry, attribute)
            if is_key(key):
                return key
            break
    raise UnsupportedLeafError(
        f"save {jax.tree_util.keystr(path)!a}: expected keys that are ints, or strings that "
        f"UTF-8 can encode, found {entry!a}; rename the key"
    )


def _walk(treedef: Any, path: Path, leaves: Sequence[Path], into: list[Container]) -> None:
    """Add the inner nodes at and below `path`; `leaves` are the paths of the leaves there."""
    node = treedef.node_data()
    if node is None:
        return
    kind, auxiliary = node
    if kind is type(None):
        return
    own_index, first = len(into), 0
    into.append(Container(path=path, kind=_container_kind(kind)))
    keys: list[Key] = []
    for index, child in enumerate(treedef.children()):
        of_child = leaves[first : first + child.num_leaves]
        first += child.num_leaves
        key = of_child[0][len(path)] if of_child else _key_without_leaves(kind, auxiliary, index)
        node = child.node_data()
        if node is None or node[0] is not type(None):
            # JAX's None is no node of a checkpoint.
            keys.append(key)
        _walk(child, (*path, key), of_child, into)
    if into[own_index].kind == "dict":
        # JAX keeps the order of an OrderedDict alone.
        into[own_index] = dict_container(path, keys)


def _container_kind(kind: type) -> ContainerKind:
    if issubclass(kind, dict):
        return "dict"
    if kind is list:
        return "list"
    return "tuple" if kind is tuple else "object"


def _key_without_leaves(kind: type, auxiliary: Any, index: int) -> str | int:
    """Return the key of an empty child, which no leaf's path contains."""
    if issubclass(kind, dict):
        # defaultdict's auxiliary data is (factory, keys); that of other dicts is the keys.
        keys = auxiliary[1] if issubclass(kind, defaultdict) else auxiliary
        # A subclass that a program registers may have auxiliary data of its own.
        key: Any = keys[index] if isinstance(keys, list | tuple) else index
        return key if type(key) is int else str(key)
    fields: tuple[str, ...] = getattr(kind, "_fields", ())
    return fields[index] if fields else index
