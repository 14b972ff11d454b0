"""Weights of a checkpoint as safetensors files with an index, as the Hugging Face Hub has them.

Arrays are read in pieces, each block checked by its digest, so that the memory needed does not
depend on their sizes. No framework is needed.
"""

from __future__ import annotations

import json
import math
import os
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast import reading
from holdfast.building import locked_directory, put_in_place, remove_leftovers
from holdfast.clock import SystemClock
from holdfast.errors import InvalidArgumentError, UnsupportedLeafError, translated
from holdfast.reading import (
    Checkpoint,
    FillTarget,
    Region,
    StoredArray,
    can_cast,
    converted,
    numpy_dtype,
    open_checkpoint,
    region_shape,
    safetensors_dtype,
)

SHARD_SIZE_BYTES = 5 * 10**9
PIECE_SIZE_BYTES = 64 * 1024 * 1024
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """One array of the checkpoint, and its name and dtype in the files.

    Attributes:
        kind: what safetensors calls the dtype.
    """

    stored: StoredArray
    name: str
    dtype: np.dtype
    kind: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.stored.shape) * self.dtype.itemsize


def export_safetensors(
    directory: str | os.PathLike[str],
    step: int,
    target: Path,
    *,
    prefix: str = "",
    dtype: str | None = None,
    shard_size_bytes: int = SHARD_SIZE_BYTES,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> list[Path]:
    """Write the arrays of `step` into the new directory `target`.

    Args:
        directory: the run's path or URL.
        step: a step of the run.
        target: it must not exist. It is there whole, or not at all.
        prefix: only what is below this path, which the names then lack: `model`.
        dtype: convert floating-point arrays to this dtype; None: keep theirs.
        shard_size_bytes: the size that a file exceeds only for a single array.
        progress: called with the bytes of each piece that was written.

    Returns:
        The files with weights. Tied arrays are written once, under the name of the first.

    Raises:
        InvalidArgumentError: `target` exists, no array is below `prefix`, or two arrays would
            have one name.
        UnsupportedLeafError: safetensors has no such dtype; the message has the path.
        NotARunError, StepNotFoundError, CheckpointDamagedError, StorageError: the checkpoint.
        OutOfSpaceError, StorageError: a file cannot be written; the message names it.
    """
    if target.exists():
        raise InvalidArgumentError(f"export to {target}: it exists; give a new path")
    checkpoint = open_checkpoint(directory, step)
    tensors = list(_tensors(checkpoint, prefix, dtype))
    if not tensors:
        raise InvalidArgumentError(f"export step {step}: no array is below {prefix!r}")
    shards = _shards(tensors, shard_size_bytes)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    names = [_file_name(number, len(shards)) for number in range(len(shards))]
    # Of two exports to one directory each builds its own, and one is put in place.
    with locked_directory(target, SystemClock()) as building:
        for name, shard in zip(names, shards, strict=True):
            _write(checkpoint, building / name, shard, progress)
        if len(shards) > 1:
            of_tensor = {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard}
            total = {"total_size": sum(tensor.size_bytes for tensor in tensors)}
            text = json.dumps({"metadata": total, "weight_map": of_tensor}, indent=2)
            _write_synced(building / INDEX, [text.encode()])
        put_in_place(building, target)
    return [target / name for name in names]


def _tensors(checkpoint: Checkpoint, prefix: str, dtype: str | None) -> Iterator[_Tensor]:
    """Yield the arrays below `prefix` with their names and dtypes in the files."""
    start = prefix.strip("/") + "/" if prefix.strip("/") else ""
    names: dict[str, str] = {}
    written: set[reading.Path] = set()
    for array in checkpoint.arrays.values():
        path, first = array.name, array.alias_of or array.path
        if not path.startswith(start) or first in written:
            continue
        written.add(first)
        name = tensor_name(path.removeprefix(start))
        other = names.setdefault(name, path)
        if other != path:
            raise InvalidArgumentError(f"export: {other} and {path} would both be named {name}")
        written_dtype, kind = _dtype_of(array, dtype)
        yield _Tensor(stored=array, name=name, dtype=written_dtype, kind=kind)


def tensor_name(path: str) -> str:
    """Return the name in files of the array at `path`: `dense.kernel` for `dense/kernel`."""
    return urllib.parse.unquote(path.replace("/", "."))


def _dtype_of(array: StoredArray, floating: str | None) -> tuple[np.dtype, str]:
    """Return the dtype in which an array is written, and its name in safetensors."""
    is_floating = can_cast(array.dtype, "float32")
    name = floating if floating is not None and is_floating else array.dtype
    dtype, kind = numpy_dtype(name), safetensors_dtype(name)
    if dtype is None:
        raise InvalidArgumentError(f"export: expected the name of a dtype, found {name!r}")
    if kind is None:
        raise UnsupportedLeafError(
            f"export {array.name}: safetensors has no {name}; convert it with --dtype, or "
            "leave it out with --prefix"
        )
    return dtype, kind


def _shards(tensors: list[_Tensor], size_bytes: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        held = sum(other.size_bytes for other in shards[-1])
        if shards[-1] and held + tensor.size_bytes > size_bytes:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def _file_name(number: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write(
    checkpoint: Checkpoint, path: Path, shard: list[_Tensor], progress: Callable[[int], None]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in shard:
        start, end = end, end + tensor.size_bytes
        header[tensor.name] = {
            "dtype": tensor.kind,
            "shape": tensor.stored.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for tensor in shard:
            for piece in _pieces(checkpoint, tensor):
                yield piece
                progress(len(piece))

    _write_synced(path, pieces())


def _pieces(checkpoint: Checkpoint, tensor: _Tensor) -> Iterator[memoryview]:
    """Read an array in the order of its bytes, converted; each piece is verified."""
    array = tensor.stored
    for region in _regions(array.shape, PIECE_SIZE_BYTES // array.numpy_dtype.itemsize):
        buffer = np.empty(region_shape(region), array.numpy_dtype)
        if buffer.size:
            checkpoint.fill([FillTarget(array.path, region, buffer)])
        if buffer.dtype != tensor.dtype:
            buffer = converted(buffer, tensor.dtype, array.name)
        yield np.ascontiguousarray(buffer).reshape(-1).view(np.uint8).data


def _regions(shape: tuple[int, ...], count_max: int) -> Iterator[Region]:
    """Cut an array into regions of at most `count_max` elements, in C order."""
    if not shape or math.prod(shape) <= count_max:
        yield (0,) * len(shape), shape
        return
    below = math.prod(shape[1:])
    if below <= count_max:
        step = max(1, count_max // below)
        for start in range(0, shape[0], step):
            stop = min(start + step, shape[0])
            yield (start, *(0,) * len(shape[1:])), (stop, *shape[1:])
        return
    for index in range(shape[0]):
        for start_below, stop_below in _regions(shape[1:], count_max):
            yield (index, *start_below), (index + 1, *stop_below)


def _write_synced(path: Path, pieces: Iterator[bytes | memoryview] | list[bytes]) -> None:
    with translated("write", path), path.open("wb", buffering=0) as file:
        for piece in pieces:
            rest = memoryview(piece)
            while len(rest):
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
