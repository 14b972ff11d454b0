"""What differs between two contents, and how much."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from holdfast.comparison import contents as contents_module
from holdfast.comparison.contents import ArrayEntry, Contents, array_entry, value_entries
from holdfast.comparison.differences import Comparison, Difference, compare
from holdfast.reading import ChunkDigests


def contents(label: str, tree: dict[str, Any]) -> Contents:
    return Contents(label=label, entries=dict(value_entries((), tree)))


def compared(a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    return compare(contents("A", a), contents("B", b))


def only(a: object, b: object) -> Difference:
    (difference,) = compared({"x": a}, {"x": b}).differences
    return difference


def test_equal_contents_have_no_difference_and_say_what_was_compared() -> None:
    state = {"w": np.arange(6.0), "step": 3, "names": ["a", "b"], "none": {}}
    comparison = compared(state, state)
    assert comparison.is_equal
    assert (comparison.array_count, comparison.array_bytes, comparison.value_count) == (1, 48, 3)


def test_elements_are_counted_with_their_largest_difference() -> None:
    a = np.zeros((3, 4), np.float32)
    b = a.copy()
    b[0, 1], b[2, 3] = 0.5, -2.0
    difference = only(a, b)
    assert (difference.count, difference.size, difference.largest) == (2, 12, 2.0)
    assert difference.text == "x: 2 of 12 elements differ, by at most 2 (float32 (3, 4))"


@pytest.mark.parametrize(
    ("a", "b", "largest"),
    [
        (np.array([2**63], np.uint64), np.array([1], np.uint64), 2**63 - 1),
        (np.array([-(2**63)]), np.array([2**63 - 1]), 2**64 - 1),
        (np.array([1, 0], np.int8), np.array([1, -128], np.int8), 128),
        (np.array([True]), np.array([False]), 1),
        (np.array([3 + 4j]), np.array([0j]), 5.0),
        (np.array([1.0], ml_dtypes.bfloat16), np.array([1.5], ml_dtypes.bfloat16), 0.5),
        (np.array([0.0]), np.array([-0.0]), 0.0),
    ],
)
def test_the_largest_difference_is_exact(a: np.ndarray, b: np.ndarray, largest: float) -> None:
    assert only(a, b).largest == largest


def test_a_nan_equals_itself_and_differs_from_a_number() -> None:
    a = np.array([math.nan, 1.0])
    assert compared({"x": a, "y": math.nan}, {"x": a.copy(), "y": math.nan}).is_equal
    assert math.isnan(only(a, np.array([2.0, 1.0])).largest or 0)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros(3), np.zeros(4)),
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.float64(1), 1.0),
        (1, True),
        (1, 1.0),
        ("1", 1),
        (0.0, -0.0),
        ((1,), {}),
    ],
)
def test_types_are_compared(a: object, b: object) -> None:
    assert not compared({"x": a}, {"x": b}).is_equal


def test_what_is_missing_is_named_on_its_side() -> None:
    comparison = compared({"a": np.zeros(2), "b": 1}, {"b": 1, "c": 2})
    assert [difference.text for difference in comparison.differences] == [
        "a: only in A: float64 (2,)",
        "c: only in B: 2",
    ]


def test_many_items_of_one_list_are_one_difference() -> None:
    comparison = compared({"rng": list(range(600))}, {"rng": [n + n % 2 for n in range(600)]})
    (difference,) = comparison.differences
    assert (difference.name, difference.kind, difference.count) == ("rng", "items", 300)
    assert difference.text == "rng: 300 of 600 items differ, by at most 1"


def test_objects_of_processes_are_compared_by_rank() -> None:
    one, other = (
        ({"data/position": 1}, {"data/position": 2}),
        ({"data/position": 1}, {"data/position": 3}),
    )
    a = replace(contents("A", {"w": 1}), of_ranks=one)
    b = replace(contents("B", {"w": 1}), of_ranks=other)
    assert compare(a, a).is_equal
    assert [d.text for d in compare(a, b).differences] == ["data/position (rank 1): 2 | 3"]
    c = replace(a, of_ranks=one[:1])
    assert compare(a, c).is_equal
    assert (
        "data: states of each process's own, of 2 processes in A and 1" in compare(a, c).left_out[0]
    )


def test_metrics_are_compared_by_their_bits() -> None:
    a = replace(contents("A", {"w": 1}), metrics={"loss": 0.1 + 0.2, "nan": math.nan})
    b = replace(a, metrics={"loss": 0.3, "nan": math.nan})
    assert compare(a, a).is_equal
    (difference,) = compare(a, b).differences
    assert difference.text == "loss: 0.30000000000000004 | 0.3"


def digests(*of_chunks: str) -> ChunkDigests:
    regions = tuple(((2 * i,), (2 * i + 2,)) for i in range(len(of_chunks)))
    return ChunkDigests(regions, tuple((digest,) for digest in of_chunks))


def with_digests(array: np.ndarray, of_chunks: ChunkDigests, reads: list) -> ArrayEntry:
    entry = array_entry(array)

    def read(region: Any) -> np.ndarray:
        reads.append(region)
        return entry.read(region)

    return replace(entry, read=read, digests=lambda: of_chunks)


def test_only_chunks_with_other_digests_are_read() -> None:
    a, b = np.arange(6), np.array([0, 1, 2, 9, 4, 5])
    reads: list = []
    left = with_digests(a, digests("0", "1", "2"), reads)
    right = with_digests(b, digests("0", "7", "2"), reads)
    difference = compare(
        Contents(label="A", entries={"x": left}), Contents(label="B", entries={"x": right})
    )
    assert difference.differences[0].count == 1
    assert reads == [((2,), (4,))] * 2


def test_arrays_with_other_chunks_are_read_whole_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents_module, "PIECE_SIZE_BYTES", 16 * 3)
    reads: list = []
    left = with_digests(np.arange(6), digests("0", "1", "2"), reads)
    right = with_digests(np.arange(6), ChunkDigests((((0,), (6,)),), (("8",),)), reads)
    a, b = (
        Contents(label=side, entries={"x": entry}) for side, entry in (("A", left), ("B", right))
    )
    assert compare(a, b).is_equal
    assert reads == [((0,), (3,))] * 2 + [((3,), (6,))] * 2


def test_contents_without_a_name_lack_all_below_it() -> None:
    side = replace(contents("A", {"a": [1, 2], "ab": 3}), of_ranks=({"rng/python": 1, "b": 2},))
    rest = side.without(["a", "rng"])
    assert [*rest.entries, *rest.of_ranks[0]] == ["ab", "b"]
    assert side.has("a")
    assert side.has("rng/python")
    assert not rest.has("rng")
