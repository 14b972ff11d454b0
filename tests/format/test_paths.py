"""Names of arrays and chunks: a name determines its path, and no two paths share one."""

from __future__ import annotations

import re
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format.paths import chunk_name, path_name

TEXT = st.text(st.characters(codec="utf-8"), max_size=6) | st.text(
    "%/[]_.\x00\x1f\x7f5B", max_size=5
)
PATHS = st.lists(TEXT | st.integers(), max_size=4).map(tuple)


@given(PATHS)
def test_a_name_tells_the_keys_of_its_path(path: tuple) -> None:
    name = path_name(path)
    keys = [] if name == "." and not path else [unquote(key) for key in name.split("/")]
    assert keys == [str(key) for key in path] or (name == "." and path in (("",), (".",)))


@given(PATHS, PATHS)
def test_paths_that_differ_in_more_than_type_have_different_names(one: tuple, other: tuple) -> None:
    at_root = [(), ("",), (".",)]
    if [*map(str, one)] != [*map(str, other)] and not (one in at_root and other in at_root):
        assert path_name(one) != path_name(other)


@given(PATHS, st.lists(st.integers(0, 99), min_size=1, max_size=3))
def test_the_first_bracket_begins_the_chunk(path: tuple, start: list[int]) -> None:
    stop = [a + 1 for a in start]
    name, _, ranges = chunk_name(path_name(path), tuple(start), tuple(stop)).partition("[")
    assert name == path_name(path)
    bounds = [tuple(map(int, r.split(":"))) for r in ranges.removesuffix("]").split(",")]
    assert bounds == list(zip(start, stop, strict=True))


@given(PATHS)
def test_no_name_is_what_safetensors_keeps_for_itself_or_holds_a_control_character(
    path: tuple,
) -> None:
    name = path_name(path)
    assert name
    assert name != "__metadata__"
    assert not re.search(r"[\x00-\x1f\x7f\[]", name)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ((), "."),
        (("params", "dense", "kernel"), "params/dense/kernel"),
        (("layers", 0, "w"), "layers/0/w"),
        (("a/b", "c"), "a%2Fb/c"),
        (("50%", "x[0]"), "50%25/x%5B0]"),
        (("tab\t", "\x7f"), "tab%09/%7F"),
        (("grüße", "\u2028"), "grüße/\u2028"),
        (("__metadata__",), "%5F_metadata__"),
        (("__metadata__", "x"), "__metadata__/x"),
        ((-1,), "-1"),
    ],
)
def test_names_are_as_documented(path: tuple, name: str) -> None:
    assert path_name(path) == name
