"""Any safetensors reader opens an image, and finds the arrays in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given

from tests.engine.making import (
    DTYPES,
    Made,
    cells,
    checkpoints,
    disk,
    memory_folder,
    numpy_type,
    random_array,
)


def _entries(image: Path) -> dict[str, dict]:
    """Each tensor as the library parses it: name to dtype, shape and data."""
    return dict(safetensors.deserialize(image.read_bytes()))


def _images(made: Made, root: Path) -> list[Path]:
    made.write(disk(root))
    return sorted(root.rglob("image-*.safetensors"))


def test_whole_arrays_stand_under_their_own_names_in_every_dtype(tmp_path: Path) -> None:
    made = Made()
    for number, dtype in enumerate(DTYPES):
        made.add(("params", dtype, "w"), random_array((2, 3), dtype, number))
    (image,) = _images(made, tmp_path)
    found = _entries(image)
    assert {*found} == {f"params/{dtype}/w" for dtype in DTYPES}
    for (_, dtype, _), array in made.arrays.items():
        entry = found[f"params/{dtype}/w"]
        assert bytes(entry["data"]) == array.tobytes()
        assert entry["shape"] == [2, 3, *{"complex128": [16], "complex32": [4]}.get(dtype, [])]


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "float64"]
)
def test_the_numpy_reader_gives_the_array_itself(dtype: str, tmp_path: Path) -> None:
    made = Made()
    made.add(("w",), random_array((3, 5), dtype, 1))
    made.add(("scalar",), random_array((), dtype, 2))
    made.add(("empty",), random_array((0, 4), dtype, 3))
    (image,) = _images(made, tmp_path)
    found = safetensors.numpy.load_file(image)
    assert {*found} == {"w", "scalar", "empty"}
    for (name,), array in made.arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_pieces_stand_under_the_name_with_their_index(tmp_path: Path) -> None:
    array = random_array((4, 6), "float32", 1)
    made = Made(part_count=2)
    made.add(("params", "w"), array, (3, 3), ((0, 1), (1, 2), (0, 1)))
    first, second = _images(made, tmp_path)
    with safetensors.safe_open(first, "numpy") as image:
        assert image.metadata() == {"holdfast": "1"}
        assert {*image.keys()} == {"params/w[0:3,0:3]", "params/w[3:4,3:6]"}
        assert np.array_equal(image.get_tensor("params/w[3:4,3:6]"), array[3:4, 3:6])
    with safetensors.safe_open(second, "numpy") as image:
        assert {*image.keys()} == {"params/w[0:3,3:6]", "params/w[3:4,0:3]"}


def test_an_image_without_chunks_opens(tmp_path: Path) -> None:
    made = Made(part_count=2)
    made.add(("w",), random_array((4,), "float32", 1))
    _, empty = _images(made, tmp_path)
    assert safetensors.numpy.load_file(empty) == {}


@given(checkpoints())
def test_the_library_opens_every_image_and_finds_every_byte(made: Made) -> None:
    with memory_folder() as folder:
        found = {
            name: e for image in _images(made, Path(folder)) for name, e in _entries(image).items()
        }
    for spec, array in zip(made.specs, made.arrays.values(), strict=True):
        cuts = list(cells(spec.shape, spec.chunk_shape))
        for cut in cuts:
            ranges = ",".join(f"{s.start}:{s.stop}" for s in cut)
            name = spec.name if len(cuts) == 1 else f"{spec.name}[{ranges}]"
            assert bytes(found.pop(name)["data"]) == array[cut].tobytes()
    assert not found


def test_the_sizes_that_safetensors_takes_for_granted_are_ours() -> None:
    for dtype in DTYPES:
        made = Made()
        made.add(("w",), np.zeros((3,), numpy_type(dtype)))
        with memory_folder() as folder:
            (image,) = _images(made, Path(folder))
            safetensors.deserialize(image.read_bytes())
