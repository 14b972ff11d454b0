"""Listings: the checkpoints derived from names, whatever else is in the folder."""

from __future__ import annotations

import pytest

from holdfast.engine.lifecycle.catalog import has_all_parts, list_checkpoints
from holdfast.format.names import checkpoint_folder
from holdfast.store.disk import DiskStore
from tests.attempts import checkpoint_id
from tests.engine.making import Made, random_array

PART = "part-00000-of-00001.json"
JUNK = [
    "checkpoints/notes.txt",
    f"checkpoints/junk/{PART}",
    f"checkpoints/10.1/{PART}",
    f"checkpoints/0000000010.1-00000001/{PART}",
    f"checkpoints/000000010.01-00000001/{PART}",
    f"checkpoints/000000010.0-00000001/{PART}",
    f"checkpoints/000000010.1-00000001.bak/{PART}",
    f"checkpoints/000000010/{PART}",
    f"checkpoints/000000010.1/{PART}",
    f"checkpoints/000000010.1-/{PART}",
    f"checkpoints/000000010.1-0000001/{PART}",
    f"checkpoints/000000010.1-0000000A/{PART}",
    f"checkpoints/000000011.1-00000001/deeper/{PART}",
    f"elsewhere/000000010.1-00000001/{PART}",
    PART,
    "checkpoints/manifests/000000010.1-00000001.json",
    "checkpoints/manifests/0999999999999990-000000010.1.json",
    "checkpoints/manifests/0999999999999991-000000010.1-00000001.json",
    "checkpoints/manifests/999999999999990-000000010.1-00000001.json",
    "checkpoints/manifests/0999999999999990-000000010.01-00000001.json",
    "checkpoints/manifests/0999999999999990-000000010.1-00000001",
    "checkpoints/manifests/0999999999999990-000000010.1-00000001.json/deeper.json",
    "checkpoints/manifests/deeper/0999999999999990-000000010.1-00000001.json",
    "manifests/0999999999999990-000000010.1-00000001.json",
]


def _put(store: DiskStore, *keys: str) -> None:
    for key in keys:
        store.put(key, b"abc")


def test_names_that_are_no_checkpoints_are_ignored(durable: DiskStore) -> None:
    _put(durable, *JUNK)
    (durable.root / "checkpoints" / "000000012.1-0000000c").mkdir()
    outside = durable.root / "elsewhere" / "000000010.1-00000001"
    (durable.root / "checkpoints" / "000000010.1-00000001").symlink_to(outside)
    assert list_checkpoints(durable) == {}


def test_a_listing_is_by_step_then_attempt(durable: DiskStore) -> None:
    ids = [(20, 1), (3, 2), (3, 10), (10**12, 1), (0, 1), (3, 1)]
    for step, attempt in ids:
        Made(id=checkpoint_id(step, attempt)).write(durable)
    assert list(list_checkpoints(durable)) == [checkpoint_id(*i) for i in sorted(ids)]


def test_a_saved_checkpoint_is_complete_and_its_size_is_that_of_its_images(
    durable: DiskStore,
) -> None:
    made = Made(part_count=3)
    made.add(("a",), random_array((3, 2), "int8", 1), (1, 2), ((0, 1), (2, 1), (1, 1)))
    made.write(durable)
    (listing,) = list_checkpoints(durable).values()
    assert listing.is_complete
    assert not listing.is_committed
    assert listing.parts == {0: 3, 1: 3, 2: 3}
    files = [p for p in durable.root.rglob("*") if p.is_file()]
    images = sum(p.stat().st_size for p in files if p.suffix == ".safetensors")
    assert listing.size_bytes == listing.written_bytes == images
    assert {*listing.sizes_bytes} == {p.name for p in files}


# name: (files, parts, complete)
FOLDERS: dict[str, tuple[str, dict, bool]] = {
    "one part": ("part-00000-of-00001.json image-00000-of-00001.safetensors", {0: 1}, True),
    "no record": ("image-00000-of-00001.safetensors", {}, False),
    "no image": ("part-00000-of-00001.json", {}, False),
    "one of two": ("part-00001-of-00002.json image-00001-of-00002.safetensors", {1: 2}, False),
    "image of another count": (
        "part-00000-of-00001.json image-00000-of-00002.safetensors",
        {},
        False,
    ),
    "junk beside": (
        "part-00000-of-00001.json image-00000-of-00001.safetensors part-0-of-1.json notes.txt "
        "part-00001-of-00001.json image-00001-of-00001.safetensors",
        {0: 1},
        True,
    ),
}


@pytest.mark.parametrize(("files", "parts", "complete"), FOLDERS.values(), ids=FOLDERS)
def test_a_part_is_a_record_and_its_image(
    durable: DiskStore, files: str, parts: dict, complete: bool
) -> None:
    _put(durable, *(f"{checkpoint_folder(checkpoint_id(1))}/{name}" for name in files.split()))
    (listing,) = list_checkpoints(durable).values()
    assert listing.parts == parts
    assert listing.is_complete == complete
    assert not listing.is_committed


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ({}, False),
        ({0: 1}, True),
        ({0: 2}, False),
        ({0: 2, 1: 2}, True),
        ({0: 2, 1: 3}, False),
        ({0: 3, 2: 3}, False),
        ({0: 1, 1: 2}, False),
    ],
)
def test_parts_are_whole_when_each_rank_of_one_count_is_there(parts: dict, whole: bool) -> None:
    assert has_all_parts(parts) == whole


def test_a_file_in_place_of_the_folder_holds_no_checkpoints(durable: DiskStore) -> None:
    durable.put("checkpoints", b"x")
    assert list_checkpoints(durable) == {}
