"""Trees of dicts, lists, tuples and namedtuples, without a framework.

Paths, their order and the kinds of inner nodes are those that JAX gives the same tree, so that a
state saved without JAX is restored with it, and the other way round. Nodes of other types are
leaves here.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import UnsupportedLeafError
from holdfast.format.paths import Path, path_name
from holdfast.format.records import Container, ContainerKind

PATH_KEYS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A flattened tree: its leaves with their paths, its inner nodes, and how to build it again."""

    leaves: tuple[Any, ...]
    paths: tuple[Path, ...]
    containers: tuple[Container, ...]
    unflatten: Callable[[Sequence[Any]], object]


def flatten(state: object, call: str, prefix: Path = ()) -> Tree:
    """Return the leaves of `state` and its structure; messages name the `call` that was given it.

    All paths begin with `prefix`.

    Raises:
        UnsupportedLeafError: a key is neither a string nor an int, the keys of a dict are of both
            kinds, two leaves have one name, or the tree contains itself or is too deep.
    """
    leaves: list[Any] = []
    paths: list[Path] = []
    containers: list[Container] = []
    try:
        _walk(state, prefix, call, (leaves, paths, containers))
    except RecursionError:
        deepest = containers[-1].path
        # Without its traceback of a thousand calls.
        raise UnsupportedLeafError(
            f"{call} {path_name(deepest[:PATH_KEYS_SHOWN])}/…: expected a tree, found more than "
            f"{len(deepest)} levels; a container that contains itself cannot be saved, remove the "
            "reference"
        ) from None
    seen: dict[str, Path] = {}
    for path in paths:
        other = seen.setdefault(path_name(path), path)
        if other is not path:
            raise UnsupportedLeafError(
                f"{call} {path_name(path)}: the paths {other} and {path} have one name; rename a "
                "key"
            )
    return Tree(
        leaves=tuple(leaves),
        paths=tuple(paths),
        containers=tuple(containers),
        unflatten=lambda given: _rebuilt(state, iter(given)),
    )


def _walk(
    node: Any, path: Path, call: str, into: tuple[list[Any], list[Path], list[Container]]
) -> None:
    kind = _kind(node)
    if kind is None:
        into[0].append(node)
        into[1].append(path)
        return
    into[2].append(Container(path=path, kind=kind))
    for key, child in _children(node, path, call):
        _walk(child, (*path, key), call, into)


def _kind(node: Any) -> ContainerKind | None:
    if type(node) in (dict, OrderedDict, defaultdict):
        return "dict"
    if type(node) is list:
        return "list"
    if type(node) is tuple:
        return "tuple"
    # A namedtuple: other subclasses of tuple have no named fields to build them from.
    return "object" if isinstance(node, tuple) and hasattr(type(node), "_fields") else None


def _children(node: Any, path: Path, call: str) -> list[tuple[str | int, Any]]:
    if isinstance(node, tuple) and hasattr(type(node), "_fields"):
        return list(zip(_fields(node), node, strict=True))
    if not isinstance(node, dict):
        return list(enumerate(node))
    for key in node:
        if type(key) is not int and not (type(key) is str and _is_text(key)):
            raise UnsupportedLeafError(
                f"{call} {path_name(path)}: expected keys that are ints, or strings that UTF-8 has "
                f"bytes for, found {key!a}; rename the key"
            )
    return [(key, node[key]) for key in _ordered(node, path, call)]


def _ordered(node: dict[Any, Any], path: Path, call: str) -> list[Any]:
    """Return the keys of a dict in the order of its leaves: sorted, as JAX does it."""
    if isinstance(node, OrderedDict):
        return list(node)
    if len({type(key) for key in node}) > 1:
        raise UnsupportedLeafError(
            f"{call} {path_name(path)}: expected the keys of a dict to be all strings or all ints, "
            f"found both; rename the keys"
        )
    return sorted(node)


def _fields(node: Any) -> tuple[str, ...]:
    fields: tuple[str, ...] = node._fields
    return fields


def _is_text(key: str) -> bool:
    return key.isascii() or not any("\ud800" <= c <= "\udfff" for c in key)


def _rebuilt(node: Any, leaves: Iterator[Any]) -> Any:
    """Return a tree of the structure of `node`, with the next leaves."""
    kind = _kind(node)
    if kind is None:
        return next(leaves)
    if isinstance(node, dict):
        made = {key: _rebuilt(node[key], leaves) for key in _ordered(node, (), "restore")}
        if isinstance(node, defaultdict):
            return defaultdict(node.default_factory, made)
        return type(node)(made)
    items = [_rebuilt(child, leaves) for child in node]
    if kind == "object":
        return type(node)(*items)
    return items if kind == "list" else tuple(items)
