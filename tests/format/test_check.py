"""Records that contradict themselves are refused before anything is made of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CheckpointDamagedError
from holdfast.format.check import check_manifest, check_part, check_spec
from holdfast.format.layout import image_layout
from holdfast.format.records import (
    Alias,
    ArraySpec,
    CheckpointSpec,
    Manifest,
    PartRecord,
    PartReference,
    ReusedImage,
    SavedValue,
)
from holdfast.format.values import encode_value
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import DTYPES, RUN_ID, Made, checkpoints, numpy_type, random_array

PART = PartReference(record_digest="3" * 32, image_size_bytes=4096)


def _spec() -> CheckpointSpec:
    made = Made(part_count=2)
    made.add(("a",), random_array((4, 6), "float32", 1), (2, 3), ((0, 3), (1, 1)))
    made.add(("b",), random_array((0, 6), "int4", 1), (0, 2), ((1, 1),))
    made.add(("1",), random_array((), "bool", 1), (), ((0, 1),))
    return made.spec


def _with_array(index: int = 0, **changes: Any) -> CheckpointSpec:
    spec = _spec()
    arrays = list(spec.arrays)
    arrays[index] = msgspec.structs.replace(arrays[index], **changes)
    return msgspec.structs.replace(spec, arrays=tuple(arrays))


def _manifest(spec: CheckpointSpec, part_count: int = 2) -> Manifest:
    return Manifest(
        run_id=RUN_ID, step=10, attempt=attempt_id(1), parts=(PART,) * part_count, checkpoint=spec
    )


def _part(**changes: Any) -> PartRecord:
    part = PartRecord(
        run_id=RUN_ID,
        step=10,
        attempt=attempt_id(1),
        rank=0,
        part_count=2,
        image_size_bytes=4096,
        header_digest="1" * 32,
        blocks=("2" * 32,) * 3,
        values=(),
        checkpoint=_spec(),
    )
    return msgspec.structs.replace(part, **changes)


@given(checkpoints())
def test_what_holdfast_makes_passes(made: Made) -> None:
    check_spec(made.spec, made.part_count, "r")
    check_manifest(_manifest(made.spec, made.part_count), "r")
    for rank in range(made.part_count):
        checkpoint = made.spec if rank == 0 else None
        check_part(_part(rank=rank, part_count=made.part_count, checkpoint=checkpoint), "r")


BAD_ARRAYS: dict[str, dict] = {
    "unknown dtype": {"dtype": "float31"},
    "safetensors' name of a dtype": {"dtype": "F32"},
    "fewer axes of chunks": {"chunk_shape": (2,)},
    "listed extents that do not add up": {"chunk_shape": ((2, 1), 3)},
    "no listed extents": {"chunk_shape": ((), 3)},
    "a listed extent of 0": {"chunk_shape": ((2, 0, 2), 3)},
    "a negative listed extent": {"chunk_shape": ((5, -1), 3)},
    "more axes of chunks": {"chunk_shape": (2, 3, 1)},
    "chunk longer than the array": {"chunk_shape": (5, 3), "owners": ((0, 2),)},
    "chunk of nothing": {"chunk_shape": (0, 3)},
    "negative chunk": {"chunk_shape": (-2, 3)},
    "negative shape": {"shape": (-4, 6)},
    "negative shape and chunk": {"shape": (-4, 6), "chunk_shape": (-2, 3)},
    "negative shape as one chunk": {
        "shape": (-4, 6),
        "chunk_shape": (-4, 6),
        "owners": ((0, 1),),
    },
    "too many axes": {"shape": (1,) * 65, "chunk_shape": (1,) * 65, "owners": ((0, 1),)},
    "too large": {"shape": (2**40, 2**40), "chunk_shape": (2**40, 2**40), "owners": ((0, 1),)},
    "too few owners": {"owners": ((0, 3),)},
    "too many owners": {"owners": ((0, 5),)},
    "no owners": {"owners": ()},
    "an owner that does not exist": {"owners": ((0, 3), (2, 1))},
    "a negative owner": {"owners": ((0, 3), (-1, 1))},
    "a run of nothing": {"owners": ((0, 4), (1, 0))},
    "a negative run": {"owners": ((0, 5), (1, -1))},
    "another array's name": {"path": ("b",)},
    "another array's name by an int": {"path": (1,)},
    "more chunks than can be": {
        "shape": (2**28,),
        "chunk_shape": (1,),
        "owners": ((0, 2**28),),
    },
}


@pytest.mark.parametrize(
    "alias",
    [(("tied",), 3), (("tied",), -1), (("a",), 1), (("b",), 0), ((1,), 0)],
    ids=["of nothing", "of a negative index", "at an array", "at another array", "by its name"],
)
def test_an_alias_that_contradicts_the_arrays_is_refused(alias: tuple) -> None:
    path, of = alias
    good = msgspec.structs.replace(_spec(), aliases=(Alias(path=("tied",), alias_of=2),))
    check_spec(good, 2, "r")
    bad = msgspec.structs.replace(_spec(), aliases=(Alias(path=path, alias_of=of),))
    with pytest.raises(CheckpointDamagedError):
        check_spec(bad, 2, "r")


@pytest.mark.parametrize("changes", BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_a_contradictory_array_is_refused_by_name(changes: dict) -> None:
    spec = _with_array(0, **changes)
    for refused in (
        lambda: check_manifest(_manifest(spec), "r/manifest.json"),
        lambda: check_part(_part(checkpoint=spec), "r/manifest.json"),
    ):
        with pytest.raises(CheckpointDamagedError, match=r"r/manifest\.json"):
            refused()


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": -1},
        {"rank": 2, "checkpoint": None},
        {"part_count": 0},
        {"part_count": 10**6 + 1},
        {"image_size_bytes": -1},
        {"blocks": ("2" * 31,)},
        {"blocks": ("2" * 33,)},
        {"blocks": ("",)},
        {"checkpoint": None},
        {"rank": 1},
    ],
    ids=str,
)
def test_a_contradictory_part_record_is_refused(changes: dict) -> None:
    with pytest.raises(CheckpointDamagedError, match="r/part"):
        check_part(_part(**changes), "r/part")


def _reused(step: int, laid: tuple, used: tuple, attempt: int = 1) -> ReusedImage:
    return ReusedImage(
        origin=checkpoint_id(step, attempt),
        image_size_bytes=4096,
        header_digest="4" * 32,
        laid=laid,
        used=used,
    )


@pytest.mark.parametrize(
    "reused",
    [
        (_reused(0, ((0, 3),), ((0, 3),)),),
        (_reused(9, ((0, 1), (2, 10**9)), ((0, 1), (5, 6))),),
        (_reused(1, ((0, 9),), ((0, 1), (3, 4))), _reused(2, ((0, 9),), ((1, 3), (4, 9)))),
        tuple(_reused(n, ((0, 9),), ((n, n + 1),)) for n in range(9)),
    ],
)
def test_images_that_may_be_reused_pass(reused: tuple) -> None:
    # The number of chunks is computed from the arrays, before they are counted one by one.
    check_part(_part(reused=reused), "r")


@pytest.mark.parametrize(
    "reused",
    [
        (_reused(10, ((0, 1),), ((0, 1),)),),
        (_reused(11, ((0, 1),), ((0, 1),)),),
        (_reused(-1, ((0, 1),), ((0, 1),)),),
        (_reused(1, ((0, 1),), ((0, 1),), attempt=2),),
        (_reused(2, ((0, 9),), ((0, 1),)), _reused(1, ((0, 9),), ((1, 2),))),
        (_reused(1, ((0, 9),), ((0, 1),)), _reused(1, ((0, 9),), ((1, 2),))),
        (_reused(1, ((0, 9),), ((0, 2),)), _reused(2, ((0, 9),), ((1, 2),))),
        (_reused(1, ((0, 9),), ((5, 6),)), _reused(2, ((0, 9),), ((0, 8),))),
        (_reused(1, ((0, 3),), ((0, 1), (3, 4))),),
        (_reused(1, (), ()),),
        (_reused(1, ((0, 1),), ()),),
        (_reused(1, ((0, 0),), ((0, 0),)),),
        (_reused(1, ((0, 2), (1, 3)), ((0, 1),)),),
        (_reused(1, ((0, 1), (1, 2)), ((0, 1),)),),
        (_reused(1, ((-1, 1),), ((0, 1),)),),
        (msgspec.structs.replace(_reused(1, ((0, 1),), ((0, 1),)), image_size_bytes=-1),),
        (msgspec.structs.replace(_reused(1, ((0, 1),), ((0, 1),)), header_digest="4" * 31),),
        tuple(
            msgspec.structs.replace(_reused(n, ((0, 99),), ((n, n + 1),)), origin=checkpoint_id(n))
            for n in range(17)
        ),
    ],
    ids=str,
)
def test_images_that_cannot_be_reused_are_refused(reused: tuple) -> None:
    with pytest.raises(CheckpointDamagedError, match="r/part"):
        check_part(_part(reused=reused, step=10 if len(reused) < 17 else 100), "r/part")


@pytest.mark.parametrize("count", [0, 10**6 + 1])
def test_a_manifest_has_at_least_one_part_and_not_too_many(count: int) -> None:
    with pytest.raises(CheckpointDamagedError):
        check_manifest(_manifest(_spec(), count), "r")


def test_a_manifest_whose_arrays_have_owners_that_it_has_no_part_of_is_refused() -> None:
    with pytest.raises(CheckpointDamagedError, match="not ranks below 1"):
        check_manifest(_manifest(_spec(), 1), "r")


@pytest.mark.parametrize("metrics", [{"loss": "low"}, {"loss": ""}, {"loss": "0x1"}])
def test_metrics_that_are_no_numbers_are_refused(metrics: dict) -> None:
    spec = msgspec.structs.replace(_spec(), metrics=metrics)
    with pytest.raises(CheckpointDamagedError):
        check_manifest(_manifest(spec), "r")


def _two_at_one_path() -> dict[str, dict]:
    value = SavedValue(path=("x",), value=encode_value(1, "x"))
    return {
        "a value where an array is": {"values": (msgspec.structs.replace(value, path=("a",)),)},
        "two values": {"values": (value, value)},
        "a value where an object's state is": {"values": (value,), "process_values": (("x",),)},
        "an object's state where an array is": {"process_values": (("a",),)},
        "two objects' states": {"process_values": (("x",), ("x",))},
    }


@pytest.mark.parametrize("changes", _two_at_one_path().values(), ids=_two_at_one_path())
def test_two_leaves_at_one_path_are_refused(changes: dict) -> None:
    spec = msgspec.structs.replace(_spec(), **changes)
    with pytest.raises(CheckpointDamagedError):
        check_manifest(_manifest(spec), "r")


SMALL = st.integers(-1, 4)
ANY_ARRAY = st.builds(
    ArraySpec,
    path=st.tuples(st.sampled_from(["a", "b", 1, "1"])),
    shape=st.lists(SMALL, max_size=3).map(tuple),
    dtype=st.sampled_from([*DTYPES[:3], "bfloat16", "complex128", "x"]),
    chunk_shape=st.lists(SMALL, max_size=3).map(tuple),
    owners=st.one_of(SMALL, st.lists(st.tuples(SMALL, SMALL), max_size=3).map(tuple)),
)


@st.composite
def _nearly_right_arrays(draw: Callable) -> ArraySpec:
    made = draw(checkpoints(arrays_max=1))
    if not made.specs:
        return draw(ANY_ARRAY)
    wrong = draw(ANY_ARRAY)
    field = draw(st.sampled_from(["shape", "chunk_shape", "owners", "dtype", "path"]))
    return msgspec.structs.replace(made.specs[0], **{field: getattr(wrong, field)})


@given(st.lists(ANY_ARRAY | _nearly_right_arrays(), max_size=2), st.integers(1, 3))
def test_what_passes_can_be_laid_out_and_holds_every_byte(
    arrays: list[ArraySpec], part_count: int
) -> None:
    spec = msgspec.structs.replace(_spec(), arrays=tuple(arrays))
    with contextlib.suppress(CheckpointDamagedError):
        check_spec(spec, part_count, "r")
        layouts = [image_layout(spec.arrays, rank) for rank in range(part_count)]
        expected = sum(math.prod(a.shape) * numpy_type(a.dtype).itemsize for a in arrays)
        assert sum(c.size_bytes for layout in layouts for c in layout.chunks) == expected


def _array_of(name: str, count: int, owners: object) -> ArraySpec:
    return ArraySpec(path=(name,), shape=(count,), dtype="int8", chunk_shape=(1,), owners=owners)


@pytest.mark.parametrize(
    ("owners", "count", "message"),
    [
        (1, 2, "its owners are array 1's, which has none"),
        (2, 2, "its owners are array 2's, which has none"),
        (-1, 2, "its owners are array -1's, which has none"),
        (0, 3, "its owners, array 0's, do not cover its chunks"),
    ],
)
def test_owners_that_are_said_to_stand_elsewhere_stand_there(
    owners: int, count: int, message: str
) -> None:
    written = _array_of("a", 2, ((0, 1), (1, 1)))
    spec = msgspec.structs.replace(
        _spec(), arrays=(written, _array_of("b", count, owners), _array_of("c", 2, 0))
    )
    with pytest.raises(CheckpointDamagedError, match=message):
        check_manifest(_manifest(spec), "r")


def test_owners_are_not_looked_up_twice() -> None:
    arrays = (_array_of("a", 2, ((0, 2),)), _array_of("b", 2, 0), _array_of("c", 2, 1))
    spec = msgspec.structs.replace(_spec(), arrays=arrays)
    with pytest.raises(CheckpointDamagedError, match="array c: its owners are array 1's"):
        check_manifest(_manifest(spec), "r")


def test_a_spec_that_equals_a_checked_one_is_not_checked_again() -> None:
    bad, other_bad = _with_array(0, dtype="F32"), _with_array(1, dtype="F32")
    check_part(_part(checkpoint=bad), "r", msgspec.structs.replace(bad))
    with pytest.raises(CheckpointDamagedError):
        check_part(_part(checkpoint=other_bad), "r", bad)
