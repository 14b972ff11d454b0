"""The metadata of a checkpoint: its arrays, values and sizes, without its bytes.

See docs/decisions/0012.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from holdfast.engine.reading.sources import CheckpointSources
from holdfast.format.dtypes import item_size_bytes
from holdfast.format.grid import grid_shape
from holdfast.format.names import checkpoint_folder
from holdfast.format.part_layout import image_sizes_bytes
from holdfast.format.paths import path_name
from holdfast.format.records import ArraySpec, PartRecord, decode_metrics
from holdfast.format.values import decode_value


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMetadata:
    """One array: `shape` and `dtype` as stored, and the number of chunks along each axis.

    `alias_of` is the name of the array whose bytes this one shares (tied tensors); else None.
    """

    shape: tuple[int, ...]
    dtype: str
    grid: tuple[int, ...]
    size_bytes: int
    prng_impl: str | None
    alias_of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusedMetadata:
    """The images that a checkpoint reuses from that of `step` of the same attempt."""

    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetadata:
    """One checkpoint; `arrays` and `values` by name (`params/dense/kernel`).

    `attempt` is the number of the attempt that saved it, and `folder` the key of its folder.
    `size_bytes` is the size of all its images; `written_bytes` that of the images written for it.
    The others are in `reused`: images of earlier checkpoints with unchanged arrays.
    """

    step: int
    attempt: int
    folder: str
    time: datetime
    metrics: dict[str, float] | None
    arrays: dict[str, ArrayMetadata]
    values: dict[str, object]
    process_count: int
    size_bytes: int
    written_bytes: int
    reused: tuple[ReusedMetadata, ...]


def metadata_of(sources: CheckpointSources) -> CheckpointMetadata:
    """Return the metadata of a checkpoint that can be read."""
    spec = sources.spec
    parts = [copies[0].part for copies in sources.parts]
    return CheckpointMetadata(
        step=sources.id.step,
        attempt=sources.id.attempt.number,
        folder=checkpoint_folder(sources.id),
        time=spec.time,
        metrics=decode_metrics(spec.metrics),
        arrays={array.name: _array_metadata(array) for array in spec.arrays}
        | {
            path_name(alias.path): replace(
                _array_metadata(spec.arrays[alias.alias_of]),
                size_bytes=0,
                alias_of=spec.arrays[alias.alias_of].name,
            )
            for alias in spec.aliases
        },
        values={path_name(value.path): decode_value(value.value) for value in spec.values},
        process_count=len(sources.parts),
        size_bytes=sum(sum(image_sizes_bytes(part)) for part in parts),
        written_bytes=sum(part.image_size_bytes for part in parts),
        reused=_reused(parts),
    )


def process_values_of(sources: CheckpointSources) -> dict[str, list[object]]:
    """Return the per-process states of objects, such as data iterators, of all processes.

    A job with the same number of processes gets them from a restore. A job with another number has
    to divide them itself, since only the owner of the objects knows how.

    Returns:
        The states by name (`data/train`), each a list with one entry per rank.
    """
    states: dict[str, list[object]] = {
        path_name(path): [] for path in sorted(sources.spec.process_values, key=path_name)
    }
    for copies in sources.parts:
        for value in copies[0].part.values:
            states[path_name(value.path)].append(decode_value(value.value))
    return states


def _array_metadata(array: ArraySpec) -> ArrayMetadata:
    return ArrayMetadata(
        shape=array.shape,
        dtype=array.dtype,
        grid=grid_shape(array.shape, array.chunk_shape),
        size_bytes=math.prod(array.shape) * item_size_bytes(array.dtype),
        prng_impl=array.prng_impl,
    )


def _reused(parts: Sequence[PartRecord]) -> tuple[ReusedMetadata, ...]:
    sizes_bytes: dict[int, int] = {}
    for image in (image for part in parts for image in part.reused):
        step = image.origin.step
        sizes_bytes[step] = sizes_bytes.get(step, 0) + image.image_size_bytes
    return tuple(ReusedMetadata(step=s, size_bytes=sizes_bytes[s]) for s in sorted(sizes_bytes))
