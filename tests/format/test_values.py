"""Python values come back as what they were, type and all."""

from __future__ import annotations

import contextlib
import math
import struct
from collections import OrderedDict, namedtuple
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CheckpointDamagedError, UnsupportedLeafError
from holdfast.format.records import SavedValue
from holdfast.format.values import DEPTH_MAX, decode_value, encode_value
from tests.engine.making import DTYPES, SEEDS, random_array, same_bits, shapes


def there_and_back(value: object) -> Any:
    """What a reader gets: through a record's JSON, as in a manifest."""
    record = SavedValue(path=("v",), value=encode_value(value, "v"))
    data = msgspec.json.encode(record)
    return decode_value(msgspec.json.decode(data, type=SavedValue).value)


def same(one: object, other: object) -> bool:
    """Whether two values are the same in type and in every bit; dicts in order too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        bits = [struct.pack("<d", x) for x in (one, other)]
        return bits[0] == bits[1] or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same([*one.items()], [*other.items()])
    if isinstance(one, np.ndarray | np.generic):
        return same_bits(np.asarray(one), np.asarray(other))
    return one == other


INTS = st.integers() | st.integers(-(2**66), 2**66) | st.sampled_from([2**63, 2**63 - 1, -(2**63)])
TEXT = st.text(st.characters(codec="utf-8"))
ARRAYS = st.builds(random_array, shapes(3, 3), st.sampled_from(DTYPES), SEEDS)
SCALARS = st.builds(lambda d, s: random_array((), d, s)[()], st.sampled_from(DTYPES), SEEDS)
KEYS = st.none() | st.booleans() | INTS | TEXT | st.binary() | st.tuples(INTS, TEXT)
LEAVES = st.none() | st.booleans() | INTS | st.floats() | TEXT | st.binary() | ARRAYS | SCALARS
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_a_value_comes_back_as_what_it_was(value: object) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        0.0,
        -0.0,
        math.nan,
        math.inf,
        -math.inf,
        5e-324,
        1.7976931348623157e308,
        1e16,
        1e22,
        2.0**53 + 2,
        0.1,
        2**63 - 1,
        2**63,
        2**64,
        -(2**63),
        -(2**63) - 1,
        10**400,
        True,
        1,
        1.0,
        [],
        (),
        {},
        [()],
        ([],),
        {"int": "0x1f"},
        {"dict": []},
        {1: "a", "1": "b", (1, "2"): None},
        {0: [1, (2, {b"\x00": None})]},
        "",
        "\x00\u2028\U0001f600",
        b"",
        bytes(range(256)),
        np.float32(math.nan),
        np.array(7),
        np.zeros((0, 3), np.int16),
        np.bool_(True),
        np.datetime64("NaT", "s").astype(np.int64),
    ],
    ids=repr,
)
def test_awkward_values_come_back(value: object) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    ("value", "json"),
    [
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (2**63, {"int": "0x8000000000000000"}),
        (-(2**63) - 1, {"int": "-0x8000000000000001"}),
        (-math.inf, {"float": "-inf"}),
        ((1, "a"), {"tuple": [1, "a"]}),
        ({1: [None]}, {"dict": [[1, [None]]]}),
        (b"\x00\x01", {"bytes": "AAE="}),
        (np.array([1], ">i2"), {"array": {"dtype": "int16", "shape": [1], "data": "AQA="}}),
        (np.uint8(1), {"scalar": {"dtype": "uint8", "shape": [], "data": "AQ=="}}),
    ],
    ids=repr,
)
def test_values_are_encoded_as_documented(value: object, json: object) -> None:
    assert encode_value(value, "v") == json


def test_the_oracle_tells_values_apart() -> None:
    pairs = [(1, 1.0), (1, True), (0.0, -0.0), ((), []), ({1: 2, 3: 4}, {3: 4, 1: 2}), ("a", b"a")]
    pairs += [(np.float32(1), np.float64(1)), (np.array(1), np.int64(1)), ([1], [1, 2])]
    assert not any(same(one, other) for one, other in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays_and_scalars_come_back_with_their_dtype(dtype: str) -> None:
    array = random_array((2, 3), dtype, 5)
    assert same(there_and_back(array), array)
    assert same(there_and_back(array[1, 1]), array[1, 1])


def test_an_array_that_came_back_can_be_written_to() -> None:
    found = there_and_back({"a": np.arange(3)})["a"]
    found += 1
    assert found.tolist() == [1, 2, 3]


def test_arrays_in_other_orders_come_back_with_the_same_elements() -> None:
    array = np.arange(24, dtype=">i4").reshape(2, 3, 4)
    for view in (array, array.T, array[::-1, 1:, ::2], np.asfortranarray(array)):
        found = there_and_back(view)
        assert np.array_equal(found, view)
        assert found.dtype == np.dtype("<i4")


class Color(IntEnum):
    RED = 1


class Text(str):
    """A user's own subclass of str."""


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Color.RED,
        Text("a"),
        Point(1, 2),
        {1, 2},
        frozenset(),
        1j,
        range(3),
        len,
        np.array(["a"]),
        np.array([object()]),
        np.datetime64("2026-01-01"),
        np.str_("a"),
        "\ud800",
        {"\udfff": 1},
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
def test_what_would_not_come_back_is_refused_by_its_path(value: object) -> None:
    for held in (value, [1, value], {"k": (value,)}):
        with pytest.raises(UnsupportedLeafError, match=r"^save data/it"):
            encode_value(held, "data/it")


def test_numpy_bytes_do_not_come_back_as_something_else() -> None:
    with contextlib.suppress(UnsupportedLeafError):
        assert same(there_and_back(np.bytes_(b"a")), np.bytes_(b"a"))


def test_an_ordered_dict_comes_back_as_a_dict_and_a_bytearray_as_bytes() -> None:
    assert same(there_and_back(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})
    assert same(there_and_back(bytearray(b"a")), b"a")


def _nested(kind: str, depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"list": [value], "tuple": (value,), "dict": {"k": value}}[kind]
    return value


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_values_are_nested_up_to_the_limit_and_no_deeper(kind: str) -> None:
    assert same(there_and_back(_nested(kind, DEPTH_MAX)), _nested(kind, DEPTH_MAX))
    with pytest.raises(UnsupportedLeafError, match="deeper than 100"):
        encode_value(_nested(kind, DEPTH_MAX + 1), "v")


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list = []
    value.append(value)
    with pytest.raises(UnsupportedLeafError):
        encode_value(value, "v")


@pytest.mark.parametrize(
    "json",
    [
        {},
        {"int": "0x1", "float": "nan"},
        {"int": 1},
        {"int": "zz"},
        {"float": "1.0"},
        {"float": 1.0},
        {"bytes": "?"},
        {"bytes": "AA"},
        {"bytes": "AA==\n"},
        {"tuple": "ab"},
        {"dict": {"a": 1}},
        {"dict": [[1]]},
        {"dict": [[1, 2, 3]]},
        {"dict": ["ab", 1]},
        {"dict": [[[1], 2]]},
        {"set": [1]},
        {"array": []},
        {"array": {"dtype": "float32", "shape": [1]}},
        {"array": {"dtype": "float32", "shape": [1], "data": "AA=="}},
        {"array": {"dtype": "float32", "shape": [2], "data": "AAAAAA=="}},
        {"array": {"dtype": "float32", "shape": [-1], "data": "AAAAAA=="}},
        {"array": {"dtype": "float33", "shape": [1], "data": "AAAAAA=="}},
        {"array": {"dtype": "object", "shape": [1], "data": "AAAAAAAAAAA="}},
        {"array": {"dtype": "float32", "shape": 1, "data": "AAAAAA=="}},
        {"array": {"dtype": "float32", "shape": [10**30], "data": "AAAAAA=="}},
        {"array": {"dtype": "float32", "shape": [math.inf], "data": "AAAAAA=="}},
        {"array": {"dtype": "float32", "shape": [math.nan], "data": "AAAAAA=="}},
        {"array": {"dtype": "float32", "shape": [1], "data": 7}},
        {"array": {"dtype": ["f4"], "shape": [1], "data": "AAAAAA=="}},
    ],
    ids=str,
)
def test_other_json_is_no_value(json: Any) -> None:
    for held in (json, [json], {"dict": [["k", json]]}):
        with pytest.raises(CheckpointDamagedError):
            decode_value(held)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["int", "float", "bytes", "tuple", "dict", "array", "scalar", "x"])
            | st.sampled_from(["dtype", "shape", "data"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=15,
)


@given(JSON)
def test_any_json_is_a_value_or_damaged(json: Any) -> None:
    with contextlib.suppress(CheckpointDamagedError):
        decode_value(json)


def test_json_that_is_nested_too_deep_is_damaged() -> None:
    json: Any = 1
    for _ in range(DEPTH_MAX + 1):
        json = {"tuple": [json]}
    with pytest.raises(CheckpointDamagedError, match="deeper than 100"):
        decode_value(json)
