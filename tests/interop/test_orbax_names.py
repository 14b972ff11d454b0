"""Names of Orbax that are not there are refused, with what to use instead."""

from __future__ import annotations

import importlib
import importlib.util
import types
from typing import Any

import pytest

pytest.importorskip("jax", reason="JAX cannot be had here")

from holdfast.errors import HoldfastError
from holdfast.interop.orbax.missing_names import MISSING


def module(root: str, name: str) -> Any:
    found = importlib.import_module(root)
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("place", MISSING)
def test_a_missing_name_is_refused_with_what_to_use_instead(place: str) -> None:
    own = module("holdfast.interop.orbax", place)
    for name, advice in {**MISSING[place], "unheard_of": "the page on Orbax lists"}.items():
        assert not hasattr(own, name)
        with pytest.raises(AttributeError) as raised:
            getattr(own, name)
        assert isinstance(raised.value, HoldfastError)
        assert f"{place}.{name}: it is not there; {advice}".lstrip(".") in str(raised.value)


@pytest.mark.skipif(importlib.util.find_spec("orbax") is None, reason="Orbax cannot be had here")
@pytest.mark.parametrize("place", MISSING)
def test_each_name_of_orbax_is_there_or_has_an_advice(place: str) -> None:
    orbax, own = module("orbax.checkpoint", place), module("holdfast.interop.orbax", place)
    without = [
        name
        for name, value in vars(orbax).items()
        if is_for_programs(place, name, value) and name not in MISSING[place]
    ]
    assert [name for name in without if not hasattr(own, name)] == []


def is_for_programs(place: str, name: str, value: Any) -> bool:
    """Whether a name is a class or function of Orbax, or a module that a package shows."""
    if name.startswith("_"):
        return False
    if isinstance(value, types.ModuleType):
        return place in ("", "v1", "v1.training") and value.__name__.startswith("orbax")
    return isinstance(value, type | types.FunctionType) and value.__module__.startswith("orbax")
