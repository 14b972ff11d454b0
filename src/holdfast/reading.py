"""Open one checkpoint and fill NumPy arrays with regions of its arrays.

For programs that read Holdfast's checkpoints by the names and shapes of arrays: converters, and
the storages of other libraries. A state like the one that was saved is read by `holdfast.load` and
`Run.restore`, with less work.

- `open_checkpoint` reads the records of a step of a run: in a directory, in a bucket, in this
  host's RAM. It changes nothing, takes no lock and starts no agent.
- `Checkpoint.fill` checks each block of bytes by its digest before it is used, and takes the next
  copy where one is damaged. Only the blocks with an element of a region are read.
- `can_cast` and `converted` convert to another dtype by the rules of `Run.restore(cast=True)`;
  `numpy_dtype` and `safetensors_dtype` look a dtype up by its name.
- An array's path is a tuple of its keys in the saved tree (`("params", "dense", "kernel")`), and a
  region is a pair of its first and its last indices plus one, ((start, ...), (stop, ...)).

Memory is the caller's: arrays of a state that is larger than RAM are read in pieces.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from holdfast.adapt.contract import EVERYTHING
from holdfast.adapt.like import can_cast, converted
from holdfast.adapt.nested import tree_of
from holdfast.engine.reading.restore import fill_targets
from holdfast.engine.reading.run import ReadableRun
from holdfast.engine.reading.sources import CheckpointSources
from holdfast.engine.reading.view import View, read_step
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    InvalidArgumentError,
    StepNotFoundError,
    StepUncommittedError,
    StorageError,
    StructureMismatchError,
)
from holdfast.format.digests import block_count
from holdfast.format.dtypes import numpy_dtype, safetensors_dtype
from holdfast.format.grid import Region, RestoreTarget, region_shape
from holdfast.format.names import CheckpointId
from holdfast.format.paths import Path, path_name
from holdfast.format.records import ArraySpec, decode_metrics
from holdfast.format.values import decode_value
from holdfast.trainer.opening.run_access import read_only

__all__ = [
    "Checkpoint",
    "ChunkDigests",
    "FillTarget",
    "Path",
    "Region",
    "StoredArray",
    "can_cast",
    "converted",
    "numpy_dtype",
    "open_checkpoint",
    "region_shape",
    "safetensors_dtype",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """One array of a checkpoint, as it is stored.

    Attributes:
        path: its place in the saved tree.
        shape: its extents.
        dtype: the name of its dtype, as NumPy or ml_dtypes has it (`float32`, `bfloat16`).
        prng_impl: the name of a typed PRNG key's implementation, whose key data (uint32) is stored;
            None for other arrays.
        alias_of: the path of the array with the same bytes (tied tensors); None for the first one.
        is_scalar: whether it was a NumPy scalar.
        is_weak: whether its JAX dtype gives way to that of other operands.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    prng_impl: str | None = None
    alias_of: Path | None = None
    is_scalar: bool = False
    is_weak: bool = False

    @property
    def name(self) -> str:
        """The path as `holdfast show` prints it: `params/dense/kernel`."""
        return path_name(self.path)

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype of buffers for its elements."""
        dtype = numpy_dtype(self.dtype)
        assert dtype is not None, "the records of a checkpoint are checked when they are read"
        return dtype

    @property
    def size_bytes(self) -> int:
        """The size of all its elements in a buffer."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @property
    def region(self) -> Region:
        """The region of all its elements."""
        return (0,) * len(self.shape), self.shape


@dataclass(frozen=True, slots=True)
class FillTarget:
    """A region of an array, and the memory for its elements.

    Attributes:
        path: the array's.
        region: a region within the array.
        buffer: writable, in C order, of the region's shape and the array's `numpy_dtype`.
    """

    path: Path
    region: Region
    buffer: np.ndarray


@dataclass(frozen=True, slots=True)
class ChunkDigests:
    """The digests of an array's bytes, as the checkpoint's records have them.

    Arrays of one shape and dtype with equal `ChunkDigests` have the same elements. With other
    chunks the digests say nothing.

    Attributes:
        regions: the region of each chunk.
        digests: the digests of the blocks of each chunk.
        ranks: the rank that has saved each chunk; not compared.
    """

    regions: tuple[Region, ...]
    digests: tuple[tuple[str, ...], ...]
    ranks: tuple[int, ...] = field(default=(), compare=False)


class Checkpoint:
    """A checkpoint that can be read, from `open_checkpoint`. Threads may share it.

    It holds nothing open: files are opened while they are read. If the run removes the checkpoint
    meanwhile, `fill` raises. What is damaged in the run's directory is read from its remote tier,
    if it has one.
    """

    def __init__(self, run: ReadableRun, step: int) -> None:
        self._look = run.look_for(step)
        self._sources = read_step(self._look, step, View.sources)
        self._indices = self._sources.spec.array_indices()

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self._sources.id.step

    @cached_property
    def arrays(self) -> Mapping[Path, StoredArray]:
        """All arrays by path, in the order in which they were saved; those with `alias_of` last."""
        spec = self._sources.spec
        first = {array.path: _stored(array, array.path) for array in spec.arrays}
        return first | {
            alias.path: _stored(spec.arrays[alias.alias_of], alias.path) for alias in spec.aliases
        }

    @cached_property
    def values(self) -> Mapping[Path, object]:
        """The Python values of the state, by path: numbers, text, bytes, None, and lists of them.

        States of objects of a single process (data iterators) are in `process_values`.
        """
        return {value.path: decode_value(value.value) for value in self._sources.spec.values}

    @cached_property
    def process_values(self) -> Sequence[Mapping[Path, object]]:
        """The states of objects of a single process by path, for each process that saved."""
        return [
            {value.path: decode_value(value.value) for value in copies[0].part.values}
            for copies in self._sources.parts
        ]

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that were saved with it."""
        return decode_metrics(self._sources.spec.metrics) or {}

    @cached_property
    def digests(self) -> Mapping[Path, ChunkDigests]:
        """The digests of all arrays by path, from the records; those with `alias_of` are left out.

        Raises:
            CheckpointDamagedError: the records do not match the arrays.
        """
        spec = self._sources.spec
        of_chunks: list[dict[int, tuple[Region, tuple[str, ...], int]]] = [{} for _ in spec.arrays]
        for rank, copies in enumerate(self._sources.parts):
            blocks = copies[0].part.blocks
            for chunk in self._sources.chunks(rank):
                stop = chunk.first_block + block_count(chunk.size_bytes)
                of_chunks[chunk.array_index][chunk.chunk_index] = (
                    (chunk.start, chunk.stop),
                    blocks[chunk.first_block : stop],
                    rank,
                )
        result = {}
        for array, chunks in zip(spec.arrays, of_chunks, strict=True):
            ordered = [chunks[index] for index in sorted(chunks)]
            regions, digests, ranks = zip(*ordered, strict=True) if ordered else ((), (), ())
            result[array.path] = ChunkDigests(regions, digests, ranks)
        return result

    def fill(self, targets: Sequence[FillTarget]) -> None:
        """Fill all buffers. One call with many targets reads each block once, and in parallel.

        Raises:
            StructureMismatchError: there is no array at a path, or a region is not within it.
            InvalidArgumentError: a buffer has another shape, dtype or order.
            CheckpointDamagedError: a needed block has no intact copy. The buffers are undefined.
            StorageError: likewise, if the last copy could not be read.
        """
        checked = [self._checked(target) for target in targets]
        try:
            fill_targets(self._sources, checked)
        except (CheckpointDamagedError, StorageError) as error:
            self._sources = self._fill_again(checked, error)

    def _fill_again(
        self, targets: Sequence[RestoreTarget], error: HoldfastError
    ) -> CheckpointSources:
        """Fill from the copies that a new listing has, and return these; raise `error` at worst."""

        def fill(view: View, checkpoint: CheckpointId) -> CheckpointSources:
            if checkpoint != self._sources.id:
                raise error
            sources = view.sources(checkpoint)
            fill_targets(sources, targets)
            return sources

        try:
            return read_step(self._look, self.step, fill)
        except (StepNotFoundError, StepUncommittedError):
            raise error from None

    def tree(self, arrays: Mapping[Path, Any]) -> Any:
        """Return the saved tree as nested dicts, lists and tuples, with these arrays in it.

        Args:
            arrays: what takes the place of each array of `self.arrays`; those with `alias_of` are
                not asked for.

        Returns:
            The tree with the values. States of objects are included if one process saved them.

        Raises:
            CheckpointDamagedError: the recorded nodes form no tree.
        """
        spec, parts = self._sources.spec, self._sources.parts
        process_values: dict[Path, object] = {}
        if len(parts) == 1:
            process_values = {
                value.path: decode_value(value.value) for value in parts[0][0].part.values
            }
        by_index = {index: arrays[array.path] for index, array in enumerate(spec.arrays)}
        return tree_of(spec, EVERYTHING, by_index, process_values)

    def _checked(self, target: FillTarget) -> RestoreTarget:
        array = self.arrays.get(target.path)
        where = f"read {path_name(target.path)}"
        if array is None:
            raise StructureMismatchError(
                f"{where}: expected an array of step {self.step}, found none; `arrays` has them"
            )
        start, stop = target.region
        if not len(start) == len(stop) == len(array.shape) or not all(
            0 <= first <= last <= extent
            for first, last, extent in zip(start, stop, array.shape, strict=True)
        ):
            raise StructureMismatchError(
                f"{where}: expected a region within {array.shape}, found {target.region}"
            )
        shape, buffer = region_shape(target.region), target.buffer
        if (buffer.shape, buffer.dtype) != (shape, array.numpy_dtype):
            raise InvalidArgumentError(
                f"{where}: expected a buffer of shape {shape} and dtype {array.numpy_dtype}, found "
                f"{buffer.shape} and {buffer.dtype}"
            )
        if not (buffer.flags.c_contiguous and buffer.flags.writeable):
            raise InvalidArgumentError(
                f"{where}: expected a writable buffer in C order, found another one; use np.empty"
            )
        return RestoreTarget(
            array_index=self._indices[target.path], region=target.region, buffer=buffer
        )


def open_checkpoint(directory: str | os.PathLike[str], step: int) -> Checkpoint:
    """Open the checkpoint of `step` for reading.

    Args:
        directory: the run's path or URL, or a path that `holdfast.save` made, which has one
            checkpoint, of step 0.
        step: a step of the run; `Run.all_steps` lists them.

    Raises:
        NotARunError, NewerFormatError, InvalidArgumentError: the directory.
        StepNotFoundError, StepUncommittedError, CheckpointDamagedError: the step.
        StorageError: the run cannot be read.
    """
    return Checkpoint(read_only(directory), step)


def _stored(array: ArraySpec, path: Path) -> StoredArray:
    return StoredArray(
        path=path,
        shape=array.shape,
        dtype=array.dtype,
        prng_impl=array.prng_impl,
        is_scalar=array.scalar,
        is_weak=array.weak_type,
        alias_of=None if path == array.path else array.path,
    )
