"""`holdfast.reading`: arrays by path, regions into buffers, and the tree around them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)

import holdfast  # noqa: E402
from holdfast.errors import InvalidArgumentError, StepNotFoundError, StructureMismatchError  # noqa: E402
from holdfast.reading import Checkpoint, FillTarget, open_checkpoint  # noqa: E402

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)
HALF = np.arange(5).astype(ml_dtypes.bfloat16)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    tied = torch.from_numpy(WEIGHT.copy())
    state = {"layers": [{"w": tied}, {"w": tied}], "half": HALF, "step": 7, "name": "run"}
    holdfast.save(tmp_path / "one", state)
    return open_checkpoint(tmp_path / "one", 0)


def test_arrays_and_values_are_listed_by_path(checkpoint: Checkpoint) -> None:
    first, tied = checkpoint.arrays["layers", 0, "w"], checkpoint.arrays["layers", 1, "w"]
    assert (first.name, first.shape, first.dtype) == ("layers/0/w", (3, 4), "float32")
    assert (first.alias_of, tied.alias_of) == (None, first.path)
    half = checkpoint.arrays["half",]
    assert (half.numpy_dtype, half.size_bytes) == (HALF.dtype, HALF.nbytes)
    assert dict(checkpoint.values) == {("step",): 7, ("name",): "run"}
    assert checkpoint.step == 0


def test_regions_fill_buffers(checkpoint: Checkpoint) -> None:
    corner, all_half = np.empty((2, 3), np.float32), np.empty(5, HALF.dtype)
    checkpoint.fill(
        [
            FillTarget(("layers", 1, "w"), ((1, 0), (3, 3)), corner),
            FillTarget(("half",), checkpoint.arrays["half",].region, all_half),
        ]
    )
    np.testing.assert_array_equal(corner, WEIGHT[1:3, :3])
    np.testing.assert_array_equal(all_half, HALF)


def test_the_tree_has_what_takes_the_place_of_arrays(checkpoint: Checkpoint) -> None:
    tree = checkpoint.tree({("layers", 0, "w"): "weight", ("half",): "half"})
    assert tree == {
        "layers": [{"w": "weight"}, {"w": "weight"}],
        "half": "half",
        "step": 7,
        "name": "run",
    }


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [
        (FillTarget(("gone",), ((0,), (1,)), np.empty(1)), StructureMismatchError, "an array"),
        (
            FillTarget(("half",), ((0,), (6,)), np.empty(6, HALF.dtype)),
            StructureMismatchError,
            "within",
        ),
        (FillTarget(("half",), ((), ()), np.empty((), HALF.dtype)), StructureMismatchError, "with"),
        (FillTarget(("half",), ((0,), (5,)), np.empty(5)), InvalidArgumentError, "bfloat16"),
        (
            FillTarget(("half",), ((0,), (5,)), np.empty(10, HALF.dtype)[::2]),
            InvalidArgumentError,
            "in C order",
        ),
    ],
)
def test_a_target_that_does_not_fit_is_refused(
    checkpoint: Checkpoint, target: FillTarget, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        checkpoint.fill([target])


def test_a_missing_step_is_reported(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "one", {"w": WEIGHT})
    with pytest.raises(StepNotFoundError):
        open_checkpoint(tmp_path / "one", 3)
