"""Which images a new part reuses: only unchanged ones, and only if it is worth it."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import pytest

from holdfast.engine.saving.incremental import (
    REUSED_COUNT_MAX,
    USED_SIZE_MIN_BYTES,
    Mark,
    SealedPart,
    choose,
    remember,
    size_of_next_bytes,
)
from holdfast.engine.saving.part import PartImages, PartPlan
from holdfast.engine.saving.part_writer import secure_reused, write_part
from holdfast.errors import ObjectNotFoundError
from holdfast.format.layout import Chunk
from holdfast.format.names import CheckpointId, checkpoint_folder, image_key
from holdfast.format.records import members
from holdfast.store.ram import RamStore
from tests.attempts import checkpoint_id
from tests.engine.making import Made, random_array

MIB = 1 << 20


class Object:
    """An immutable object, in place of a framework's array."""


class Run:
    """One rank that saves arrays of these sizes; `objects` are those that hold them now."""

    def __init__(self, store: RamStore, *sizes_bytes: int) -> None:
        self.store = store
        self.made = Made(id=checkpoint_id(0))
        for number, size in enumerate(sizes_bytes):
            self.made.add((f"a{number}",), random_array((size,), "uint8", number))
        self.objects = [Object() for _ in sizes_bytes]
        self.layout = self.made.plan(0).layout
        self.last: SealedPart | None = None
        self.digested: list[int] = []

    def change(self, *numbers: int) -> None:
        """Other bytes, in other objects."""
        for number in numbers:
            path = (f"a{number}",)
            array = self.made.arrays[path]
            self.made.arrays[path] = random_array(array.shape, "uint8", 1000 + id(array) % 997)
            assert self.made.arrays[path].tobytes() != array.tobytes()
        self.pass_through(*numbers)

    def pass_through(self, *numbers: int) -> None:
        """The same bytes, in other objects."""
        for number in numbers:
            self.objects[number] = Object()

    @property
    def marks(self) -> list[Mark]:
        return [weakref.ref(one) for one in self.objects]

    def plan(self) -> PartPlan:
        made = self.made.plan(0)
        return PartPlan(
            run_id=made.run_id,
            id=made.id,
            rank=0,
            part_count=1,
            layout=self.layout,
            spec=made.spec,
            process_values=(),
        )

    def chunk_bytes(self, chunk: Chunk) -> memoryview:
        self.digested.append(chunk.array_index)
        return self.made.chunk_bytes(chunk)

    def choose(self) -> PartImages:
        """Return the images of the next part."""
        self.made.id = CheckpointId(self.made.id.step + 1, self.made.id.attempt)
        self.digested.clear()
        return choose(self.plan(), self.last, self.marks, self.chunk_bytes)

    def save(self) -> PartImages:
        """Choose images, and seal the part."""
        images, plan = self.choose(), self.plan()
        if self.last is not None:
            secure_reused(self.store, plan, images, self.last.record)
        record = write_part(self.store, plan, self.made.chunk_bytes, images)
        self.last = remember(
            record, plan, images, self.marks, self.last, is_in_memory=True, is_readable=True
        )
        return images

    def written(self, images: PartImages) -> list[int]:
        """Return the numbers of the arrays that are written."""
        return sorted(chunk.array_index for chunk in images.own.chunks)


def used(images: PartImages) -> list[tuple[int, int]]:
    """(step, number of chunks) of each reused image."""
    return [(image.origin.step, len([*members(image.used)])) for image in images.reused]


def test_the_same_object_is_not_read_and_not_written(memory: RamStore) -> None:
    run = Run(memory, 4 * MIB, 100, 50)
    assert run.save().reused == ()
    run.change(1)
    images = run.save()
    assert run.written(images) == [1]
    assert used(images) == [(1, 2)]
    assert run.digested == []


def test_equal_bytes_in_another_object_count_once_they_were_equal_before(memory: RamStore) -> None:
    run = Run(memory, 4 * MIB, 2 * MIB, 100)
    run.save()
    run.pass_through(0, 1)
    run.change(2)
    images = run.save()
    # Nothing was equal before, so nothing was read.
    assert (run.written(images), run.digested) == ([0, 1, 2], [])
    run.pass_through(0, 1)
    run.change(2)
    images = run.save()
    assert (run.written(images), sorted(run.digested)) == ([2], [0, 1])
    run.pass_through(0)
    run.change(1, 2)
    assert run.written(run.save()) == [1, 2]
    # What changed last is not read the next time.
    run.pass_through(0)
    run.change(1, 2)
    run.save()
    assert run.digested == [0]


def test_an_object_that_is_gone_is_the_same_as_none(memory: RamStore) -> None:
    run = Run(memory, 4 * MIB)
    run.save()
    marks = run.marks
    run.objects = [Object()]
    assert choose(run.plan(), run.last, marks, run.made.chunk_bytes) == PartImages(
        own=run.plan().layout
    )
    run.made.id = checkpoint_id(9)
    assert choose(run.plan(), run.last, [None], run.made.chunk_bytes) == PartImages(
        own=run.plan().layout
    )


@pytest.mark.parametrize(
    ("sizes", "changed", "is_reused"),
    [
        ((USED_SIZE_MIN_BYTES, 8), {1}, True),
        ((USED_SIZE_MIN_BYTES - 1, 8), {1}, False),
        ((3 * MIB, 3 * MIB - 8192), {1}, True),
        ((3 * MIB, 3 * MIB), {1}, False),
        ((4 * MIB, 4 * MIB), {0, 1}, False),
    ],
)
def test_an_image_is_reused_while_half_of_it_is_used_and_that_is_much(
    memory: RamStore, sizes: tuple[int, int], changed: Collection[int], is_reused: bool
) -> None:
    run = Run(memory, *sizes)
    run.save()
    run.change(*changed)
    images = run.save()
    assert bool(images.reused) == is_reused
    assert run.written(images) == (sorted(changed) if is_reused else [0, 1])


def test_no_more_images_are_reused_than_a_handful_the_most_used_ones(memory: RamStore) -> None:
    count = REUSED_COUNT_MAX + 2
    run = Run(memory, *[(1 << (count - 1 - n)) * MIB for n in range(count)])
    run.save()
    # In each save one more array is unchanged, so that each is in an image of its own.
    for number in range(1, count):
        run.change(*range(number, count))
        run.save()
    images = run.save()
    assert [chunks for _, chunks in used(images)] == [1] * REUSED_COUNT_MAX
    assert run.written(images) == [*range(REUSED_COUNT_MAX, count)]


def test_an_older_or_another_part_keeps_nothing(memory: RamStore) -> None:
    run = Run(memory, 4 * MIB)
    run.save()
    for one in (checkpoint_id(1), checkpoint_id(0), checkpoint_id(5, 2)):
        run.made.id = one
        assert choose(run.plan(), run.last, run.marks, run.made.chunk_bytes).reused == ()
    run.made.id = checkpoint_id(5)
    assert choose(run.plan(), run.last, run.marks, run.made.chunk_bytes).reused != ()
    run.layout = run.made.plan(0).layout
    assert choose(run.plan(), run.last, run.marks, run.made.chunk_bytes).reused == ()


def test_the_size_of_the_next_image_is_told_by_what_was_steady(memory: RamStore) -> None:
    run = Run(memory, 4 * MIB, MIB, 1000)
    sizes = []
    for _ in range(5):
        images = run.save()
        assert run.last is not None
        sizes.append((images.own.size_bytes, size_of_next_bytes(run.last, run.plan())))
        run.pass_through(0, 1)
        run.change(2)
    whole, small = run.layout.size_bytes, 4096 + 1000
    assert sizes == [(whole, whole), (whole, small), (small, small), (small, small), (small, small)]


def test_where_one_image_is_gone_no_name_is_left_of_the_others(memory: RamStore) -> None:
    run = Run(memory, 4 * MIB, 2 * MIB, 100)
    run.save()
    run.change(1, 2)
    run.save()
    run.change(2)
    images = run.choose()
    assert used(images) == [(1, 1), (2, 1)]
    assert run.last is not None
    memory.delete(image_key(checkpoint_id(2), 0, 1))
    with pytest.raises(ObjectNotFoundError):
        secure_reused(memory, run.plan(), images, run.last.record)
    assert [*memory.list(checkpoint_folder(checkpoint_id(3)))] == []


def test_the_digests_of_what_is_reused_are_those_of_its_bytes(memory: RamStore) -> None:
    run = Run(memory, 20 * MIB + 5, 100)
    run.save()
    run.change(1)
    run.save()
    assert run.last is not None
    record = run.last.record
    whole = write_part(memory, run.plan(), run.made.chunk_bytes)
    assert record.blocks == whole.blocks
    assert len(record.blocks) == 4
