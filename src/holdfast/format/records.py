"""The JSON records of a run: of the run itself, of attempts, of parts, and the manifest.

`CheckpointSpec` is what one checkpoint is, apart from its bytes. Rank 0's part record carries it,
so that whoever finds all parts can write the manifest; the manifest is the spec and the digests of
the part records. Per-process values stand in the part records alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from holdfast.format.names import CheckpointId
from holdfast.format.paths import path_name
from holdfast.format.sealed import FORMAT_VERSION

ContainerKind = Literal["dict", "list", "tuple", "object"]
Key = str | int
Time = Annotated[datetime, msgspec.Meta(tz=True)]
# It becomes part of the name of a folder in memory.
RunId = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z_-]{1,64}\Z")]


class RunPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run's directory is on a file system: its inode, and its absolute path."""

    inode: int
    path: str


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`holdfast.json`: that a directory is a run, and which.

    `place` is where the run was opened last; a directory elsewhere may be a copy of it
    (`engine.lifecycle.identity`). It is None in a bucket. `copied_from` is the run that this one
    began as a copy of; its id is in the attempts and checkpoints that were copied.
    """

    format_version: int = FORMAT_VERSION
    run_id: RunId
    time: Time
    place: RunPlace | None = None
    copied_from: RunId | None = None


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`attempts/N.json`: one start of the run's processes, and where in the run it began.

    `origin` is the (step, attempt) of the checkpoint it goes on from, None from nothing. Steps of
    the origin's attempt beyond the origin's step are not on this attempt's timeline.
    """

    format_version: int = FORMAT_VERSION
    run_id: RunId
    attempt: int
    origin: tuple[int, int] | None
    host: str
    pid: int
    time: Time


Owners = tuple[tuple[int, int], ...]


class ArraySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One array: its elements as stored, the grid of its chunks, and who owns each chunk.

    `owners` is run-length encoded over the chunks in C order: (rank, how many chunks). Or it is the
    index of an earlier array that has the same ones, written out; `owners_of` tells them.
    `prng_impl` is set for typed PRNG keys, whose key data (uint32) is what is stored.
    `scalar` tells a NumPy scalar from an array without axes.
    """

    path: tuple[Key, ...]
    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    owners: Owners | int
    prng_impl: str | None = None
    scalar: bool = False

    @property
    def name(self) -> str:
        """The path as chunks carry it."""
        return path_name(self.path)


def owners_of(arrays: Sequence[ArraySpec], index: int) -> Owners:
    """The owners of the chunks of one of `arrays`, run-length encoded."""
    found = arrays[index].owners
    if isinstance(found, int):
        found = arrays[found].owners
        assert not isinstance(found, int), "whoever read the arrays has checked them"
    return found


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """One inner node of the state's tree; `object` for namedtuples, dataclasses and the like."""

    path: tuple[Key, ...]
    kind: ContainerKind


class SavedValue(msgspec.Struct, frozen=True, kw_only=True):
    """A Python value at a path, encoded by `holdfast.format.values`."""

    path: tuple[Key, ...]
    value: Any


class CheckpointSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds, on all ranks together.

    `process_values` are the paths of objects whose state stands in each rank's part record.
    """

    time: Time
    metrics: dict[str, float | str] | None
    arrays: tuple[ArraySpec, ...]
    containers: tuple[Container, ...]
    values: tuple[SavedValue, ...]
    process_values: tuple[tuple[Key, ...], ...]


Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of ordinals, ascending, none of them empty, no two that overlap or touch."""


class ReusedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image of an earlier checkpoint that a part consists of as well.

    `id` is the (step, attempt) that wrote it. `laid` are the chunks that stand in it and `used`
    those that are taken from it, by their ordinals in the layout of all of the rank's chunks.
    """

    id: tuple[int, int]
    image_size_bytes: int
    header_digest: str
    laid: Ranges
    used: Ranges

    @property
    def origin(self) -> CheckpointId:
        """The checkpoint that wrote it."""
        return CheckpointId(*self.id)


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`part-R-of-N.json`: what one rank contributed, written once its images are whole.

    `blocks` are the digests of all blocks of all of the rank's chunks, in the order of the layout
    of all of them. Its own image, which `image_size_bytes` and `header_digest` are about, has the
    chunks that no image in `reused` is used for. `checkpoint` stands in rank 0's record alone.
    """

    format_version: int = FORMAT_VERSION
    run_id: RunId
    step: int
    attempt: int
    rank: int
    part_count: int
    image_size_bytes: int
    header_digest: str
    blocks: tuple[str, ...]
    reused: tuple[ReusedImage, ...] = ()
    values: tuple[SavedValue, ...]
    checkpoint: CheckpointSpec | None = None

    @property
    def id(self) -> CheckpointId:
        """The checkpoint this is a part of."""
        return CheckpointId(self.step, self.attempt)


class PartReference(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says of one part: its record's digest, and how large its images are.

    `image_size_bytes` is that of its own image, `reused_size_bytes` of all images that it reuses.
    """

    record_digest: str
    image_size_bytes: int
    reused_size_bytes: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`, the commit: where it exists the checkpoint exists, else not."""

    format_version: int = FORMAT_VERSION
    run_id: RunId
    step: int
    attempt: int
    parts: tuple[PartReference, ...]
    checkpoint: CheckpointSpec

    @property
    def id(self) -> CheckpointId:
        """The checkpoint this commits."""
        return CheckpointId(self.step, self.attempt)


def encode_metrics(metrics: dict[str, float] | None) -> dict[str, float | str] | None:
    """Metrics as JSON holds them: NaN and the infinities as their names."""
    if metrics is None:
        return None
    # `x - x` is 0 for a finite x alone.
    return {k: v if v - v == 0 else repr(v) for k, v in metrics.items()}


def decode_metrics(metrics: dict[str, float | str] | None) -> dict[str, float] | None:
    """The metrics that `encode_metrics` was given."""
    return None if metrics is None else {k: float(v) for k, v in metrics.items()}
