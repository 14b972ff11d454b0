"""Where chunks lie in an image, against docs/format.md written down once more."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.format.layout import image_layout, partial_layout
from holdfast.format.records import ArraySpec
from tests.attempts import checkpoint_id
from tests.engine.making import Made, cells, checkpoints, numpy_type, random_array

MIB = 1024 * 1024


def _expected_chunks(made: Made, rank: int) -> list[tuple[str, tuple[slice, ...], int]]:
    """(array's name, range, size) of the rank's chunks, in the order of the image."""
    found = []
    for spec in made.specs:
        owners = [owner for owner, count in spec.owners for _ in range(count)]
        for owner, cell in zip(owners, cells(spec.shape, spec.chunk_shape), strict=True):
            size = math.prod(s.stop - s.start for s in cell) * numpy_type(spec.dtype).itemsize
            ranges = ",".join(f"{s.start}:{s.stop}" for s in cell)
            name = spec.name if len(owners) == 1 else f"{spec.name}[{ranges}]"
            if owner == rank:
                found.append((name, cell, size))
    return sorted(found, key=lambda chunk: (-min(_twos(chunk[2]), 6), chunk[0]))


def _twos(size: int) -> int:
    count = 0
    while count < 6 and size % 2 == 0:
        size //= 2
        count += 1
    return count


@given(checkpoints())
def test_an_image_holds_exactly_its_ranks_chunks_in_the_documented_order(made: Made) -> None:
    for rank in range(made.part_count):
        layout = image_layout(tuple(made.specs), rank)
        found = [
            (c.name, tuple(slice(a, b) for a, b in zip(c.start, c.stop, strict=True)), c.size_bytes)
            for c in layout.chunks
        ]
        assert found == _expected_chunks(made, rank)


@given(checkpoints())
def test_chunks_are_aligned_to_their_own_power_of_two_without_holes(made: Made) -> None:
    for rank in range(made.part_count):
        layout = image_layout(tuple(made.specs), rank)
        end = len(layout.header)
        assert end % 4096 == 0
        for chunk in layout.chunks:
            assert chunk.offset_bytes == end
            assert chunk.offset_bytes % 2 ** min(_twos(chunk.size_bytes), 6) == 0
            end += chunk.size_bytes
        assert end == layout.size_bytes


@given(checkpoints())
def test_the_header_says_where_the_chunks_are_and_is_padded_as_little_as_can_be(made: Made) -> None:
    for rank in range(made.part_count):
        layout = image_layout(tuple(made.specs), rank)
        length = int.from_bytes(layout.header[:8], "little")
        assert len(layout.header) == 8 + length
        text = layout.header[8:]
        assert text.rstrip(b" ")[-1:] == b"}"
        assert len(text) - len(text.rstrip(b" ")) < 4096
        header = json.loads(text)
        assert list(header) == ["__metadata__", *(c.name for c in layout.chunks)]
        assert header["__metadata__"] == {"holdfast": "1"}
        compact = json.dumps(header, ensure_ascii=False, separators=(",", ":"))
        assert text.rstrip(b" ").decode() == compact
        for chunk in layout.chunks:
            start, stop = header[chunk.name]["data_offsets"]
            assert (start + len(layout.header), stop - start) == (
                chunk.offset_bytes,
                chunk.size_bytes,
            )


@given(checkpoints())
def test_every_element_of_every_array_is_in_one_image(made: Made) -> None:
    total = sum(
        image_layout(tuple(made.specs), rank).size_bytes
        - len(image_layout(tuple(made.specs), rank).header)
        for rank in range(made.part_count)
    )
    assert total == sum(array.nbytes for array in made.arrays.values())


@given(checkpoints(), st.randoms())
def test_the_order_of_the_arrays_in_the_record_plays_no_part(made: Made, random) -> None:
    shuffled = made.specs[:]
    random.shuffle(shuffled)
    for rank in range(made.part_count):
        one, other = image_layout(tuple(made.specs), rank), image_layout(tuple(shuffled), rank)
        assert (one.header, one.size_bytes) == (other.header, other.size_bytes)
        assert [c.name for c in one.chunks] == [c.name for c in other.chunks]


@given(checkpoints(), st.data())
def test_an_image_of_some_chunks_is_laid_out_as_if_there_were_no_others(
    made: Made, data: st.DataObject
) -> None:
    for rank in range(made.part_count):
        whole = image_layout(tuple(made.specs), rank)
        every = range(len(whole.chunks))
        assert [chunk.ordinal for chunk in whole.chunks] == [*every]
        chosen = sorted(data.draw(st.sets(st.sampled_from(every)) if every else st.just(set())))
        layout = partial_layout(tuple(made.specs), whole, chosen)
        end = len(layout.header)
        assert end % 4096 == 0
        header = json.loads(layout.header[8:])
        assert list(header) == ["__metadata__", *(whole.chunks[o].name for o in chosen)]
        for chunk, ordinal in zip(layout.chunks, chosen, strict=True):
            assert chunk.offset_bytes == end
            assert header[chunk.name]["data_offsets"][0] == end - len(layout.header)
            assert replace(chunk, offset_bytes=0) == replace(whole.chunks[ordinal], offset_bytes=0)
            end += chunk.size_bytes
        assert layout.size_bytes == end
        if len(chosen) == len(every):
            assert layout == whole


@pytest.mark.parametrize(
    ("size", "blocks"),
    [(0, 0), (1, 1), (8 * MIB, 1), (8 * MIB + 1, 2), (16 * MIB, 2), (20 * MIB, 3)],
)
def test_blocks_are_counted_chunk_by_chunk(size: int, blocks: int) -> None:
    specs = tuple(
        ArraySpec(path=(name,), shape=(n,), dtype="int8", chunk_shape=(n,), owners=((0, 1),))
        for name, n in [("a", size), ("b", 64), ("c", size)]
    )
    layout = image_layout(specs, 0)
    assert layout.block_count == 2 * blocks + 1
    numbers = [
        list(range(c.first_block, c.first_block + (blocks if c.name != "b" else 1)))
        for c in layout.chunks
    ]
    assert [n for of_chunk in numbers for n in of_chunk] == list(range(layout.block_count))


def test_big_arrays_start_at_multiples_of_64_whatever_stands_beside_them() -> None:
    made = Made(id=checkpoint_id(1))
    for number, shape in enumerate([(3,), (1,), (64, 64), (5, 5), (), (1024,), (0, 7), (48,)]):
        made.add((f"{number}",), random_array(shape, "float32", number))
    layout = image_layout(tuple(made.specs), 0)
    offsets = {c.name: c.offset_bytes for c in layout.chunks}
    assert all(offsets[name] % 64 == 0 for name in ("2", "5", "6", "7"))


def test_a_header_of_any_length_ends_at_the_next_multiple_of_4096() -> None:
    unpadded_lengths = set()
    for extra in range(3980, 4020):
        spec = ArraySpec(
            path=("n" * extra,), shape=(1,), dtype="int8", chunk_shape=(1,), owners=((0, 1),)
        )
        header = image_layout((spec,), 0).header
        unpadded = len(header.rstrip(b" "))
        unpadded_lengths.add(unpadded)
        assert len(header) == math.ceil(unpadded / 4096) * 4096
    assert {4095, 4096, 4097} <= unpadded_lengths
