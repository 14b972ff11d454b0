"""Which dtypes are converted on a restore, and that no value changes silently beyond rounding."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from holdfast.adapt.like import can_cast, converted
from holdfast.errors import StructureMismatchError
from tests.engine.making import ML_DTYPES, NUMPY_DTYPES, numpy_type

FLOATS = [n for n in NUMPY_DTYPES + ML_DTYPES if n.startswith(("float", "bfloat"))]
INTEGERS = [n for n in NUMPY_DTYPES + ML_DTYPES if n.startswith(("int", "uint"))]


def test_numbers_are_cast_within_their_kind_alone() -> None:
    for kind in (FLOATS, INTEGERS):
        assert all(can_cast(one, other) for one in kind for other in kind)
        for one in kind:
            for other in (*({*FLOATS, *INTEGERS} - {*kind}), "bool", "complex64", "key<fry>"):
                assert not can_cast(one, other)
                assert not can_cast(other, one)
    assert not can_cast("complex64", "float32")
    assert not can_cast("complex64", "complex128")


@pytest.mark.parametrize("kind", [FLOATS, INTEGERS], ids=["floats", "integers"])
def test_every_pair_of_dtypes_converts_a_one(kind: list[str]) -> None:
    for one in kind:
        for other in kind:
            made = converted(np.ones(3, numpy_type(one)), numpy_type(other), "w")
            assert made.dtype == numpy_type(other)
            assert made.astype(np.float64).tolist() == [1.0] * 3


def test_floats_are_rounded_and_too_large_ones_become_infinite() -> None:
    values = np.array([1.00390625, 1e300, -np.inf, np.nan, 3.0])
    made = converted(values, np.dtype(ml_dtypes.bfloat16), "w").astype(np.float64)
    assert made[0] in (1.0, 1.0078125)
    assert made[1:3].tolist() == [np.inf, -np.inf]
    assert np.isnan(made[3])
    assert made[4] == 3.0


@pytest.mark.parametrize(
    ("values", "to"),
    [
        (np.array([0, 128], np.int64), "int8"),
        (np.array([-1], np.int32), "uint32"),
        (np.array([2**63], np.uint64), "int64"),
        (np.array([8], np.int8), "int4"),
    ],
)
def test_integers_that_do_not_fit_are_refused_by_name(values: np.ndarray, to: str) -> None:
    with pytest.raises(StructureMismatchError, match=rf"restore opt/count: .*fit {to}"):
        converted(values, numpy_type(to), "opt/count")
    assert converted(values[:0], numpy_type(to), "opt/count").shape == (0,)
