"""Walk trees of dicts, lists, tuples and namedtuples: their leaves with paths, their inner nodes.

`_KINDS` has the types of inner nodes. Paths, their order and the kinds of inner nodes are those
that JAX gives the same tree, so that a state saved without JAX is restored with it, and the other
way round. So leaves are in the ascending order of keys; dicts that are built again have their own.
Nodes of other types are leaves, unless the caller expands them to a subtree.

See docs/decisions/0052.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeGuard

from msgspec import UNSET

from holdfast.errors import UnsupportedLeafError
from holdfast.format.paths import Path, key_order, path_name
from holdfast.format.records import Container, ContainerKind, dict_container

PATH_KEYS_SHOWN = 8

Key = str | int
Items = list[tuple[Key, Any]]


@dataclass(frozen=True, slots=True)
class NodeKind:
    """How inner nodes of some types are walked.

    Attributes:
        container: the kind of such a node in a checkpoint.
        children: returns the children by key, in the order of their leaves. The other arguments are
            the node's path, and the call for messages.
        rebuild: returns a node like the given one with other children, in the order of its own.
    """

    container: ContainerKind
    children: Callable[[Any, Path, str], Items]
    rebuild: Callable[[Any, Items], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subtree:
    """What a node that is no container is expanded to: a tree at the same path.

    `rebuild` returns the node from such a tree with other leaves, whose paths are given too.
    """

    node: Any
    tree: Any
    rebuild: Callable[[Any, Sequence[Path]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A flattened tree: its leaves with their paths, its inner nodes, and how to build it again.

    `expanded` are the nodes that were expanded to subtrees.
    """

    leaves: tuple[Any, ...]
    paths: tuple[Path, ...]
    containers: tuple[Container, ...]
    expanded: tuple[Any, ...]
    unflatten: Callable[[Sequence[Any]], Any]


def flatten(state: object, call: str, expand: Callable[[Any, Path], Any] | None = None) -> Tree:
    """Return the leaves of `state` and its structure.

    Args:
        state: the tree.
        call: the caller's name for messages.
        expand: returns the leaf for a node that is no container, or a `Subtree` in its place.

    Raises:
        UnsupportedLeafError: a key is neither a string nor an int, the keys of a dict are of both
            kinds, two leaves have one name, or the tree contains itself or is too deep.
    """
    walk = _Walk(call, expand)
    try:
        root = walk.visit(state, ())
    except RecursionError:
        deepest = walk.containers[-1].path
        # Without its traceback of a thousand calls.
        raise UnsupportedLeafError(
            f"{call} {path_name(deepest[:PATH_KEYS_SHOWN])}/…: expected a tree, found more than "
            f"{len(deepest)} levels; a container that contains itself cannot be saved, remove the "
            "reference"
        ) from None
    check_names(walk.paths, call)
    return Tree(
        leaves=tuple(walk.leaves),
        paths=tuple(walk.paths),
        containers=tuple(walk.containers),
        expanded=tuple(walk.expanded),
        unflatten=lambda leaves: _rebuilt(root, iter(leaves)),
    )


def check_names(paths: Sequence[Path], call: str) -> None:
    """Check that no two leaves have one name.

    Raises:
        UnsupportedLeafError: two have.
    """
    if len(set(map(path_name, paths))) == len(paths):
        return
    seen: dict[str, Path] = {}
    for path in paths:
        other = seen.setdefault(path_name(path), path)
        if other is not path:
            raise UnsupportedLeafError(
                f"{call} {path_name(path)}: the paths {other} and {path} have one name; rename a "
                "key"
            )


def is_key(key: object) -> TypeGuard[Key]:
    """Return whether a path can have this key: an int, or a string that UTF-8 has bytes for."""
    if type(key) is str:
        return key.isascii() or not any("\ud800" <= c <= "\udfff" for c in key)
    return type(key) is int


def _kind_of_tuple(node: Any) -> NodeKind | None:
    # Subclasses of tuple that are no namedtuples have no named fields to build them from.
    return _NAMED_TUPLE if hasattr(type(node), "_fields") else None


@dataclass(frozen=True, slots=True)
class _Inner:
    """The structure at an inner node, or at an expanded one; `children` has None for leaves."""

    rebuild: Callable[[Items], Any]
    keys: Sequence[Key]
    children: Sequence[_Inner | None]


class _Walk:
    """One walk through a tree."""

    def __init__(self, call: str, expand: Callable[[Any, Path], Any] | None) -> None:
        self._call = call
        self._expand = expand
        self.leaves: list[Any] = []
        self.paths: list[Path] = []
        self.containers: list[Container] = []
        self.expanded: list[Any] = []

    def visit(self, node: Any, path: Path) -> _Inner | None:
        """Add the nodes at and below `path`; return their structure, None for a leaf."""
        kind = _KINDS.get(type(node))
        if kind is None and isinstance(node, tuple):
            kind = _kind_of_tuple(node)
        if kind is None:
            leaf = node if self._expand is None else self._expand(node, path)
            if isinstance(leaf, Subtree):
                return self._visit_subtree(leaf, path)
            self.leaves.append(leaf)
            self.paths.append(path)
            return None
        is_dict = kind.container == "dict"
        self.containers.append(
            dict_container(path, node) if is_dict else Container(path=path, kind=kind.container)
        )
        keys: list[Key] = []
        children: list[_Inner | None] = []
        for key, child in kind.children(node, path, self._call):
            keys.append(key)
            children.append(self.visit(child, (*path, key)))
        return _Inner(partial(kind.rebuild, node), keys, children)

    def _visit_subtree(self, subtree: Subtree, path: Path) -> _Inner:
        self.expanded.append(subtree.node)
        first = len(self.paths)
        child = self.visit(subtree.tree, path)
        paths, rebuild = self.paths[first:], subtree.rebuild
        return _Inner(lambda items: rebuild(items[0][1], paths), ("",), (child,))


def _rebuilt(inner: _Inner | None, leaves: Iterator[Any]) -> Any:
    """Return a tree of that structure, with the next leaves."""
    if inner is None:
        return next(leaves)
    pairs = zip(inner.keys, inner.children, strict=True)
    return inner.rebuild([(key, _rebuilt(child, leaves)) for key, child in pairs])


def node_of(container: Container, children: dict[Key, Any]) -> Any:
    """Return a saved node; of objects, whose types are not saved, the dict of children.

    Args:
        container: The node's kind, and the order of a dict.
        children: The children by key, in any order; those of a list have numbers as keys. Some may
            be left out.
    """
    if container.kind == "object":
        return children
    order = sorted(children, key=key_order) if container.keys is UNSET else container.keys
    items = [(key, children[key]) for key in order if key in children]
    kind = _NUMBERED.get(container.kind)
    return dict(items) if kind is None else kind.rebuild(None, items)


def _items(node: dict[Any, Any], path: Path, call: str) -> Items:
    for key in node:
        if type(key) is not int and not is_key(key):
            raise UnsupportedLeafError(
                f"{call} {path_name(path)}: expected keys that are ints, or strings that UTF-8 has "
                f"bytes for, found {key!a}; rename the key"
            )
    return list(node.items())


def _sorted_items(node: dict[Any, Any], path: Path, call: str) -> Items:
    """Return the items of a dict in the order of its leaves: sorted, as JAX does it."""
    items = _items(node, path, call)
    if len(set(map(type, node))) > 1:
        raise UnsupportedLeafError(
            f"{call} {path_name(path)}: expected the keys of a dict to be all strings or all ints, "
            f"found both; rename the keys"
        )
    items.sort(key=itemgetter(0))
    return items


def _in_order_of(node: dict[Any, Any], items: Items) -> dict[Key, Any]:
    children = dict(items)
    return {key: children[key] for key in node}


def _numbered(node: Sequence[Any], path: Path, call: str) -> Items:
    return list(enumerate(node))


def _fields(node: Any, path: Path, call: str) -> Items:
    return list(zip(node._fields, node, strict=True))


def _children(items: Items) -> Iterator[Any]:
    return (child for _, child in items)


_KINDS: dict[type, NodeKind] = {
    dict: NodeKind("dict", _sorted_items, lambda node, items: _in_order_of(node, items)),
    defaultdict: NodeKind(
        "dict",
        _sorted_items,
        lambda node, items: defaultdict(node.default_factory, _in_order_of(node, items)),
    ),
    OrderedDict: NodeKind("dict", _items, lambda node, items: OrderedDict(items)),
    list: NodeKind("list", _numbered, lambda node, items: [*_children(items)]),
    tuple: NodeKind("tuple", _numbered, lambda node, items: tuple(_children(items))),
}
_NUMBERED = {kind.container: kind for kind in (_KINDS[list], _KINDS[tuple])}
_NAMED_TUPLE = NodeKind("object", _fields, lambda node, items: type(node)(*_children(items)))
