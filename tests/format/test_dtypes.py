"""dtypes: what can be stored, and under which name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.format.dtypes import dtype_name, item_size_bytes, numpy_dtype, safetensors_form
from tests.engine.making import DTYPES, numpy_type

LAST_AXES = {"complex128": (16,), "complex32": (4,)}
DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_numpy_and_ml_dtypes_has_its_name(name: str) -> None:
    dtype = numpy_type(name)
    assert dtype_name(dtype) == name
    assert numpy_dtype(name) == dtype
    assert item_size_bytes(name) == dtype.itemsize


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", ">u2"])
def test_byte_order_is_not_part_of_the_name(dtype: str) -> None:
    assert dtype_name(np.dtype(dtype)) == np.dtype(dtype).newbyteorder("<").name


@pytest.mark.parametrize(
    "dtype", ["O", "S3", "U3", "V8", "M8[ns]", "m8[s]", "f4,i4", np.dtype((np.void, 4)), "g"]
)
def test_other_dtypes_have_no_name(dtype: object) -> None:
    assert dtype_name(np.dtype(dtype)) is None


@pytest.mark.parametrize("name", ["", "float", "F32", "object", "float128", "str", "int65", "void"])
def test_an_unknown_name_has_no_dtype(name: str) -> None:
    assert numpy_dtype(name) is None


def _documented() -> dict[str, tuple[int, str]]:
    """The table of dtypes in the document: name to (size, the safetensors column)."""
    found = {}
    rows = re.findall(r"^\| (`[a-z].*?) \| (\d+).*? \| (.*?) \|$", DOCUMENT.read_text(), re.M)
    for names, size, forms in rows:
        names = re.findall(r"`(\w+)`", names)
        listed = re.findall(r"`(\w+)`", forms)
        listed = listed * len(names) if len(listed) == 1 else listed
        found |= {n: (int(size), f) for n, f in zip(names, listed, strict=True)}
    return found


def test_the_document_lists_every_dtype_with_its_size_and_form() -> None:
    documented = _documented()
    assert {*DTYPES} | {"int1", "uint1"} == {*documented}
    for name in DTYPES:
        size, form = documented[name]
        assert numpy_type(name).itemsize == size
        assert safetensors_form(name, (2, 3)) == (
            form,
            (2, 3, *LAST_AXES.get(name, ())),
        )


def test_a_dtype_that_an_older_ml_dtypes_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.format.dtypes._by_name", dict)
    with pytest.raises(InvalidArgumentError, match="dtype int1: expected an ml_dtypes that has it"):
        numpy_dtype("int1")
