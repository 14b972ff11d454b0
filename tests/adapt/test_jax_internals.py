"""A version of JAX that lacks what Holdfast uses is refused by name, and paths of empty nodes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from holdfast.adapt.detect import find_framework
from holdfast.adapt.jax import internals
from holdfast.adapt.jax.tree import flatten
from holdfast.errors import InvalidArgumentError


@pytest.fixture
def unchecked() -> Iterator[None]:
    internals.check_internals.cache_clear()
    yield
    internals.check_internals.cache_clear()


def test_this_version_of_jax_has_what_is_used(unchecked: None) -> None:
    internals.check_internals()


def test_an_older_version_is_refused_by_name(
    unchecked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 5, 3))
    monkeypatch.setattr(jax, "__version__", "0.5.3")
    with pytest.raises(InvalidArgumentError, match=r"expected JAX 0\.6 or newer, found 0\.5\.3"):
        find_framework("jax")


def test_a_version_without_a_part_in_use_is_refused_by_name(
    unchecked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax._src import distributed

    monkeypatch.delattr(distributed, "global_state")
    with pytest.raises(InvalidArgumentError, match=r"lacks jax\._src\.distributed\.global_state"):
        find_framework("jax")


@jax.tree_util.register_pytree_with_keys_class
class Keyed(dict):
    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.DictKey(k), self[k]) for k in sorted(self)], tuple(sorted(self))

    @classmethod
    def tree_unflatten(cls, keys: Any, values: Any) -> Any:
        return cls(zip(keys, values, strict=True))


@pytest.mark.parametrize(
    "tree",
    [
        {"a": 1, "empty": {}},
        OrderedDict([("empty", {}), ("a", 1)]),
        defaultdict(dict, {"a": 1, "empty": {}}),
        Keyed(a=1, empty={}),
    ],
    ids=["dict", "OrderedDict", "defaultdict", "registered"],
)
def test_an_empty_node_has_the_path_of_its_key(tree: Any) -> None:
    _, structure = flatten(tree)
    assert {node.path for node in structure.containers} == {(), ("empty",)}
