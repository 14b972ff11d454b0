"""Load safetensors files as a flat dict of arrays: the layout SAFETENSORS of `Context`.

Each process reads the parts of arrays that its devices need. The format is that of the page
https://huggingface.co/docs/safetensors: the header's length in 8 bytes, the header as JSON, and the
arrays' bytes, whose dtype and place the header gives.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.errors import (
    CheckpointDamagedError,
    InvalidArgumentError,
    StructureMismatchError,
)
from holdfast.interop.orbax.errors import ItemNotFoundError
from holdfast.interop.orbax.v1.errors import InvalidLayoutError

SUFFIX = ".safetensors"
LENGTH_BYTES = 8
METADATA = "__metadata__"
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    **{
        f"{kind}{bits}": np.dtype(f"{name}{bits}")
        for kind, name in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "BF16": ml_dtypes.bfloat16,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}
"""The dtypes that are read, by their names in headers."""


class _Stored(NamedTuple):
    """Where an array is."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


class SafetensorsFiles:
    """The arrays of one safetensors file, or of all in a folder.

    Args:
        path: The file or the folder.

    Raises:
        InvalidLayoutError: There is none.
        CheckpointDamagedError: A file is not as its header says, or two have the same array.
    """

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not files or not all(file.is_file() and file.suffix == SUFFIX for file in files):
            raise InvalidLayoutError(
                f"load {path}: expected a file *{SUFFIX}, or a folder with such files, found none"
            )
        self._path = path
        self._arrays: dict[str, _Stored] = {}
        self._custom_metadata: dict[str, Any] = {}
        for file in files:
            self._add(file)

    def _add(self, file: Path) -> None:
        size_bytes = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
            if not 0 < length <= size_bytes - LENGTH_BYTES:
                raise CheckpointDamagedError(f"read {file}: expected a header, found none")
            try:
                header: dict[str, Any] = json.loads(opened.read(length))
            except ValueError as error:
                raise CheckpointDamagedError(
                    f"read {file}: expected a header of JSON, found {error}"
                ) from error
        self._custom_metadata |= header.pop(METADATA, None) or {}
        for name, entry in header.items():
            if name in self._arrays:
                raise CheckpointDamagedError(
                    f"read {file}: {name} is in {self._arrays[name].file.name} too"
                )
            self._arrays[name] = _stored(file, LENGTH_BYTES + length, size_bytes, name, entry)

    def metadata(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the shapes and dtypes by name, and what the headers say besides."""
        tree = {
            name: jax.ShapeDtypeStruct(stored.shape, stored.dtype)  # type: ignore[no-untyped-call]
            for name, stored in self._arrays.items()
        }
        return tree, self._custom_metadata

    def load(self, abstract: Any = None) -> dict[str, Any]:
        """Return arrays by name: all as NumPy's, or those of `abstract` as JAX's.

        Args:
            abstract: A dict of shapes, dtypes and shardings; without a sharding, each device gets
                the whole array.

        Raises:
            InvalidArgumentError: It is no flat dict, or there is none in a job of processes.
            ItemNotFoundError: A `KeyError`: an array is not there.
            StructureMismatchError: A `ValueError`: one has another shape.
        """
        if abstract is None:
            if jax.process_count() > 1:
                raise InvalidArgumentError(
                    f"load {self._path}: expected the arrays to load with their shardings, which "
                    "a job of several processes has to give"
                )
            return {name: np.array(_mapped(stored)) for name, stored in self._arrays.items()}
        if not isinstance(abstract, dict) or any(isinstance(v, dict) for v in abstract.values()):
            raise InvalidArgumentError(
                f"load {self._path}: expected a flat dict of the arrays to load, found "
                f"{type(abstract).__name__}"
            )
        return {name: self._load(name, leaf) for name, leaf in abstract.items()}

    def _load(self, name: str, leaf: Any) -> Any:
        stored = self._arrays.get(name)
        if stored is None:
            raise ItemNotFoundError(f"load {self._path}: there is no array {name!r}")
        if tuple(leaf.shape) != stored.shape:
            raise StructureMismatchError(
                f"load {name}: expected the shape {tuple(leaf.shape)}, found {stored.shape}"
            )
        dtype = np.dtype(leaf.dtype)
        array = _mapped(stored)
        sharding = getattr(leaf, "sharding", None) or _replicated()
        return jax.make_array_from_callback(
            stored.shape, sharding, lambda index: np.asarray(array[index], dtype)
        )


def _stored(file: Path, start: int, size_bytes: int, name: str, entry: Any) -> _Stored:
    try:
        dtype, shape = DTYPES.get(entry["dtype"]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointDamagedError(
            f"read {file}: expected dtype, shape and offsets of {name}, found {entry!r}"
        ) from error
    if dtype is None:
        raise InvalidArgumentError(
            f"read {name} of {file}: expected one of the dtypes {', '.join(DTYPES)}, found "
            f"{entry['dtype']}"
        )
    if end - begin != math.prod(shape) * np.dtype(dtype).itemsize or start + end > size_bytes:
        raise CheckpointDamagedError(
            f"read {file}: expected {math.prod(shape)} elements of {name} at {begin} to {end}, "
            f"found a file of {size_bytes} bytes"
        )
    return _Stored(file, start + begin, shape, np.dtype(dtype))


def _mapped(stored: _Stored) -> np.ndarray:
    """Return the array in the file's pages: a part of it reads that part."""
    if not math.prod(stored.shape):
        return np.zeros(stored.shape, stored.dtype)
    count_bytes = math.prod(stored.shape) * stored.dtype.itemsize
    raw = np.memmap(stored.file, np.uint8, "r", stored.offset, (count_bytes,))
    # Offsets in a file need not be multiples of the size of an element.
    return np.frombuffer(raw, stored.dtype).reshape(stored.shape)


def _replicated() -> NamedSharding:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("replica",))
    return NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
