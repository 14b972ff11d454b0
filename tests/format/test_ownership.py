"""Owners and sizes of chunks, against plain loops and against the layouts."""

from __future__ import annotations

import math

from hypothesis import given

from holdfast.format.layout import image_layout
from holdfast.format.ownership import Ownership
from holdfast.format.records import owners_of
from tests.engine.making import Made, checkpoints


@given(checkpoints())
def test_each_chunk_is_found_with_the_rank_that_is_written_down(made: Made) -> None:
    arrays = made.spec.arrays
    owned = Ownership(arrays)
    for index in range(len(arrays)):
        ranks = [rank for rank, count in owners_of(arrays, index) for _ in range(count)]
        assert [owned.owner(index, chunk) for chunk in range(len(ranks))] == ranks
        for rank in range(made.part_count):
            found = [chunk for run in owned.runs(index, rank) for chunk in run]
            assert found == [chunk for chunk, owner in enumerate(ranks) if owner == rank]


@given(checkpoints())
def test_what_parts_come_to_is_what_their_layouts_have(made: Made) -> None:
    arrays = made.spec.arrays
    owned = Ownership(arrays)
    sizes = owned.sizes
    for rank in range(made.part_count + 2):
        layout = image_layout(arrays, rank)
        with_bytes = [chunk for chunk in layout.chunks if chunk.size_bytes]
        assert owned.chunk_count(rank) == len(layout.chunks)
        assert owned.block_count_min(rank) == len(with_bytes)
        data_bytes = sum(chunk.size_bytes for chunk in layout.chunks)
        assert sizes.data_bytes.get(rank, 0) == data_bytes
        assert sizes.block_counts.get(rank, 0) == layout.block_count


def test_large_chunks_have_as_many_blocks_as_they_are_divided_into() -> None:
    from tests.engine.making import random_array

    made = Made(part_count=2)
    shape = (3, (8 << 20) + 1)
    made.add(
        ("a",),
        random_array((1, 1), "int8", 1).repeat(shape[1], 1).repeat(3, 0),
        (1, shape[1]),
        ((1, 3),),
    )
    made.add(("b",), random_array((10,), "int8", 1), (4,), ((0, 2), (1, 1)))
    sizes = Ownership(made.spec.arrays).sizes
    assert sizes.block_counts == {0: 2, 1: 7}
    assert sizes.data_bytes == {0: 8, 1: math.prod(shape) + 2}
