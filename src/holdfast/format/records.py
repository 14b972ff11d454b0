"""The JSON records of a run: the run record, attempt records, part records and the manifest.

`CheckpointSpec` describes a checkpoint apart from its bytes. Rank 0's part record contains it, so
that any host that finds all parts can write the manifest; the manifest is the spec and the digests
of the part records. Per-process values are in the part records only.

Sets of whole numbers are half-open ranges: `[[0, 3], [7, 8]]` is 0, 1, 2, 7. Each set has exactly
one such form: no range is empty, and no two overlap or touch.

See docs/decisions/0052.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from holdfast.format.grid import ChunkShape
from holdfast.format.names import AttemptId, CheckpointId
from holdfast.format.paths import key_order, path_name
from holdfast.format.sealed import FORMAT_VERSION

ContainerKind = Literal["dict", "list", "tuple", "object"]
Key = str | int
Time = Annotated[datetime, msgspec.Meta(tz=True)]
# A run id becomes part of the name of a folder on the RAM tier.
RunId = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z_-]{1,64}\Z")]


class RunPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a run's directory on a file system: its inode and its absolute path."""

    inode: int
    path: str


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`holdfast.json`: marks a directory as a run and identifies it.

    `place` is the location where the run was opened last; a directory elsewhere may be a copy
    (`engine.lifecycle.identity`). It is None in a bucket. `copied_from` is the run that this one is
    a copy of; the copied attempts and checkpoints have that id. `is_unfinished_copy` is there only
    while `holdfast copy` writes the run: the record of the original, with it.
    """

    format_version: int = FORMAT_VERSION
    run_id: RunId
    time: Time
    place: RunPlace | None = None
    copied_from: RunId | None = None
    is_unfinished_copy: Literal[True] | msgspec.UnsetType = msgspec.UNSET


class RemoteRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`remote.json`: the path or URL of the run's remote tier, where it was opened with one last.

    A reader of checkpoints does not need it: each tier is a run of its own.
    """

    format_version: int = FORMAT_VERSION
    place: str


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`attempts/N.json`: one start of the run's processes, and the checkpoint it began from.

    `origin` is the checkpoint it continues from; None for a fresh start. Steps of the origin's
    attempt after the origin's step are not on this attempt's timeline.
    """

    format_version: int = FORMAT_VERSION
    run_id: RunId
    attempt: AttemptId
    origin: CheckpointId | None
    host: str
    pid: int
    time: Time


Owners = tuple[tuple[int, int], ...]


class ArraySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One array: its elements as stored, the grid of its chunks, and the owner of each chunk.

    `owners` is run-length encoded over the chunks in C order: (rank, number of chunks). Or it is
    the index of an earlier array whose owners are written out and equal; `owners_of` resolves it.
    `prng_impl` is set for typed PRNG keys, of which the key data (uint32) is stored.
    `scalar` distinguishes a NumPy scalar from an array without axes. `weak_type` is set for JAX
    arrays whose dtype gives way to that of other operands.
    """

    path: tuple[Key, ...]
    shape: tuple[int, ...]
    dtype: str
    chunk_shape: ChunkShape
    owners: Owners | int
    prng_impl: str | None = None
    scalar: bool = False
    weak_type: bool = False

    @property
    def name(self) -> str:
        """The path as it appears in chunk names."""
        return path_name(self.path)


def owners_of(arrays: Sequence[ArraySpec], index: int) -> Owners:
    """Return the owners of the chunks of one of `arrays`, run-length encoded."""
    owners = arrays[index].owners
    if isinstance(owners, int):
        owners = arrays[owners].owners
        assert not isinstance(owners, int), "the arrays were not checked (holdfast.format.check)"
    return owners


class Alias(msgspec.Struct, frozen=True, kw_only=True):
    """One more place in the tree of an array: tied tensors are stored once.

    `alias_of` is the index of the array.
    """

    path: tuple[Key, ...]
    alias_of: int


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """One inner node of the state's tree; `object` for namedtuples, dataclasses and the like.

    `keys` are those of a dict in their order, where that is not ascending.
    """

    path: tuple[Key, ...]
    kind: ContainerKind
    keys: tuple[Key, ...] | msgspec.UnsetType = msgspec.UNSET


def dict_container(path: tuple[Key, ...], keys: Sequence[Key]) -> Container:
    """Return the inner node of a dict with these keys, in their order."""
    order = tuple(keys)
    is_ascending = order == tuple(sorted(order, key=key_order))
    return Container(path=path, kind="dict", keys=msgspec.UNSET if is_ascending else order)


class SavedValue(msgspec.Struct, frozen=True, kw_only=True):
    """A Python value at a path, encoded by `holdfast.format.values`.

    `pipeline` describes what an iterator reads, of which the value is the position.
    """

    path: tuple[Key, ...]
    value: Any
    pipeline: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET


class CheckpointSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a checkpoint, on all ranks together.

    `process_values` are the paths of objects whose state is in each rank's part record.
    """

    time: Time
    metrics: dict[str, float | str] | None
    arrays: tuple[ArraySpec, ...]
    aliases: tuple[Alias, ...] = ()
    containers: tuple[Container, ...]
    values: tuple[SavedValue, ...]
    process_values: tuple[tuple[Key, ...], ...]

    def array_indices(self) -> dict[tuple[Key, ...], int]:
        """Return the index of the array at each path, aliases included."""
        indices = {array.path: index for index, array in enumerate(self.arrays)}
        return indices | {alias.path: alias.alias_of for alias in self.aliases}


Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of ordinals, ascending, none of them empty, no two that overlap or touch."""


class ReusedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image of an earlier checkpoint that is also part of this one.

    `origin` is the checkpoint that wrote it and has it in its folder, for the same rank and number
    of parts. `laid` are the chunks in the image and `used` those that are read
    from it, by their ordinals in the layout of all of the rank's chunks.
    """

    origin: CheckpointId
    image_size_bytes: int
    header_digest: str
    laid: Ranges
    used: Ranges


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`part-R-of-N.json`: the contribution of one rank, written after its images are complete.

    `blocks` are the digests of all blocks of all of the rank's chunks, in the order of the layout
    of all of them. `image_size_bytes` and `header_digest` describe the part's own image, which has
    the chunks that no image in `reused` is used for. `checkpoint` is in rank 0's record only.
    """

    format_version: int = FORMAT_VERSION
    run_id: RunId
    step: int
    attempt: AttemptId
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
    """The manifest's entry for one part: the digest of its record, and the sizes of its images.

    `image_size_bytes` is the size of its own image. `origins` are the images that it reuses, each
    as the step of the checkpoint that wrote it, of the manifest's attempt, and its size in bytes.
    """

    record_digest: str
    image_size_bytes: int
    origins: tuple[tuple[int, int], ...] = ()

    @property
    def size_bytes(self) -> int:
        """The size of all its images."""
        return self.image_size_bytes + sum(size_bytes for _, size_bytes in self.origins)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest, the commit: the checkpoint exists if and only if its manifest exists."""

    format_version: int = FORMAT_VERSION
    run_id: RunId
    step: int
    attempt: AttemptId
    parts: tuple[PartReference, ...]
    checkpoint: CheckpointSpec

    @property
    def id(self) -> CheckpointId:
        """The checkpoint this commits."""
        return CheckpointId(self.step, self.attempt)


def encode_metrics(metrics: dict[str, float] | None) -> dict[str, float | str] | None:
    """Return metrics as JSON values: NaN and the infinities as their names."""
    if metrics is None:
        return None
    # `x - x` is 0 only for a finite x.
    return {k: v if v - v == 0 else repr(v) for k, v in metrics.items()}


def decode_metrics(metrics: dict[str, float | str] | None) -> dict[str, float] | None:
    """Return the metrics that `encode_metrics` encoded."""
    return None if metrics is None else {k: float(v) for k, v in metrics.items()}


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Return the ranges of `numbers`, which must ascend."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return tuple(runs)


def members(ranges: Ranges) -> Iterator[int]:
    """Yield the numbers in `ranges`, ascending."""
    for start, stop in ranges:
        yield from range(start, stop)


def are_ranges(ranges: Ranges) -> bool:
    """Return whether `ranges` are in canonical form, with no negative numbers."""
    last = -1
    for start, stop in ranges:
        if not last < start < stop:
            return False
        last = stop
    return True


def is_subset(ranges: Ranges, outer: Ranges) -> bool:
    """Return whether every number in `ranges` is in `outer`; both in canonical form."""
    position = 0
    for start, stop in ranges:
        while position < len(outer) and outer[position][1] < stop:
            position += 1
        if position == len(outer) or start < outer[position][0]:
            return False
    return True


def are_disjoint(sets: Sequence[Ranges]) -> bool:
    """Return whether no number is in two of the sets."""
    last = 0
    for start, stop in sorted(pair for ranges in sets for pair in ranges):
        if start < last:
            return False
        last = stop
    return True
