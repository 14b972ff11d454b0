"""Trees without a framework have the paths, the order and the nodes that JAX gives them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest

from holdfast.adapt.jax.tree import flatten as flatten_with_jax
from holdfast.adapt.tree import flatten
from holdfast.errors import UnsupportedLeafError

Pair = namedtuple("Pair", ["b", "a"])

TREES: list[Any] = [
    7,
    None,
    {},
    [],
    {"b": 1, "a": [2, (3, None)], "c": {}},
    {3: 1, -1: 2, 20: [()]},
    OrderedDict([("z", 1), ("a", {"y": 2, "x": 3})]),
    defaultdict(list, {"q": [1, 2], "p": []}),
    Pair(1, {"w": Pair([], 2)}),
    [Pair({}, ()), {"__metadata__": np.ones(2)}],
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_tree_is_the_same_as_jax_sees_it(tree: Any) -> None:
    found = flatten(tree, "save")
    leaves, structure = flatten_with_jax(tree)
    assert found.paths == structure.paths
    kinds = [(node.path, node.kind) for node in found.containers]
    assert sorted(kinds) == sorted((node.path, node.kind) for node in structure.containers)
    assert all(one is other for one, other in zip(found.leaves, leaves, strict=True))


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_tree_is_built_again_with_other_leaves(tree: Any) -> None:
    found = flatten(tree, "save")
    numbers = [*range(100, 100 + len(found.leaves))]
    built = found.unflatten(numbers)
    again = flatten(built, "save")
    assert type(built) is type(tree) or not found.containers
    assert list(again.leaves) == numbers
    assert (again.paths, again.containers) == (found.paths, found.containers)


def test_dicts_keep_the_order_of_the_tree_that_they_are_built_from() -> None:
    tree = {"z": 1, "a": {"y": 2, "x": 3}, "m": defaultdict(int, {"q": 4, "b": 5})}
    built = flatten(tree, "save").unflatten([*range(5)])
    assert [*built] == ["z", "a", "m"]
    assert [*built["a"]] == ["y", "x"]
    assert [*built["m"]] == ["q", "b"]


@pytest.mark.parametrize(
    "tree", [{"a": 1, 2: 3}, {1.5: 2}, {True: 1}, {"\ud800": 1}, {"a": {("x",): 1}}]
)
def test_keys_that_no_name_can_be_made_of_are_refused(tree: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match="rename the key"):
        flatten(tree, "save")


def test_a_tree_that_contains_itself_is_refused_by_its_path() -> None:
    inner: dict[str, Any] = {"n": 1}
    inner["again"] = inner
    with pytest.raises(UnsupportedLeafError, match=r"^save d/again/again/.*contains itself"):
        flatten({"d": inner}, "save")
