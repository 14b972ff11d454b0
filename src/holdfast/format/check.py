"""Checks of records from outside, made before anything is computed or allocated from them.

Invariant: the memory and time to lay out a record that passes are bounded by the size of the record
and the sizes of the files that it names. See docs/decisions/0002.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from holdfast.errors import CheckpointDamagedError
from holdfast.format.digests import DIGEST_HEX_LENGTH
from holdfast.format.dtypes import is_known, item_size_bytes
from holdfast.format.grid import chunk_count
from holdfast.format.names import PART_COUNT_MAX
from holdfast.format.ownership import Ownership
from holdfast.format.paths import Path, key_order, path_name
from holdfast.format.records import (
    ArraySpec,
    CheckpointSpec,
    Container,
    Manifest,
    PartRecord,
    are_disjoint,
    are_ranges,
    is_subset,
)

AXES_MAX = 64
REUSED_COUNT_MAX = 16
CHUNK_COUNT_MAX = 1 << 27
ARRAY_SIZE_MAX_BYTES = 1 << 60
PATHS_SHOWN_MAX = 10


def check_spec(spec: CheckpointSpec, part_count: int, where: str) -> None:
    """Check the description of a checkpoint for contradictions and limits.

    Raises:
        CheckpointDamagedError: the spec contradicts itself; `where` names the record.
    """
    nodes = [*(a.path for a in spec.arrays), *(v.path for v in spec.values), *spec.process_values]
    nodes += (c.path for c in spec.containers)
    nodes += (a.path for a in spec.aliases)
    if len(set(nodes)) != len(nodes):
        raise CheckpointDamagedError(f"read {where}: two nodes have the same path")
    _check_keys(spec.containers, nodes, where)
    for name, value in (spec.metrics or {}).items():
        if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
            raise CheckpointDamagedError(
                f"read {where}: metric {name} is not a number: {value[:80]!r}"
            )
    # Thousands of arrays share a few forms, and the checks depend only on the form.
    counts: dict[tuple[object, ...], int] = {}
    chunks_total = 0
    for index, array in enumerate(spec.arrays):
        form = array.dtype, array.shape, array.chunk_shape, array.owners
        count = counts.get(form)
        if count is None:
            _check_array(array, where)
            _check_owners(spec.arrays, index, part_count, where)
            count = counts[form] = chunk_count(array.shape, array.chunk_shape)
        chunks_total += count
    names = [array.name for array in spec.arrays] + [path_name(a.path) for a in spec.aliases]
    if len(set(names)) != len(names):
        raise CheckpointDamagedError(f"read {where}: two arrays have one name")
    for alias in spec.aliases:
        if not 0 <= alias.alias_of < len(spec.arrays):
            raise CheckpointDamagedError(
                f"read {where}: {path_name(alias.path)} is an alias of array {alias.alias_of}, "
                f"expected one of {len(spec.arrays)}"
            )
    if chunks_total > CHUNK_COUNT_MAX:
        raise CheckpointDamagedError(
            f"read {where}: {chunks_total} chunks, expected at most {CHUNK_COUNT_MAX}"
        )


def _check_keys(containers: Sequence[Container], nodes: Sequence[Path], where: str) -> None:
    """Check that the recorded order of a node's keys has each of its children once."""
    orders = {c.path: c.keys for c in containers if c.keys is not msgspec.UNSET}
    if not orders:
        return
    children: dict[Path, list[str | int]] = {path: [] for path in orders}
    for node in nodes:
        if node and node[:-1] in children:
            children[node[:-1]].append(node[-1])
    for path, keys in orders.items():
        if sorted(keys, key=key_order) != sorted(children[path], key=key_order):
            raise CheckpointDamagedError(
                f"read {where}: the keys of {path_name(path)} are not those of its children"
            )


def _check_array(array: ArraySpec, where: str) -> None:
    def damaged(what: str) -> CheckpointDamagedError:
        return _damaged(array, what, where)

    if not is_known(array.dtype):
        raise damaged(f"unknown dtype {array.dtype!r}")
    if not len(array.shape) == len(array.chunk_shape) <= AXES_MAX:
        problem = f"{len(array.shape)} axes, and {len(array.chunk_shape)} in its chunks"
        raise damaged(f"{problem}; expected equal numbers, at most {AXES_MAX}")
    if not all(map(_is_divided, array.shape, array.chunk_shape)):
        raise damaged(f"shape {array.shape} does not match chunk shape {array.chunk_shape}")
    # Axes of extent 0 count as 1: libraries limit the other axes of such a shape as well.
    if math.prod(d or 1 for d in array.shape) * item_size_bytes(array.dtype) > ARRAY_SIZE_MAX_BYTES:
        raise damaged(f"shape {array.shape} is larger than {ARRAY_SIZE_MAX_BYTES} bytes")


def _is_divided(extent: int, cell: int | tuple[int, ...]) -> bool:
    """Return whether an axis of `extent` can have such cells."""
    if isinstance(cell, tuple):
        return len(cell) > 0 and min(cell) > 0 and sum(cell) == extent
    return extent >= 0 and min(extent, 1) <= cell <= extent


def _check_owners(arrays: Sequence[ArraySpec], index: int, part_count: int, where: str) -> None:
    array = arrays[index]
    count = chunk_count(array.shape, array.chunk_shape)
    owners = array.owners
    if isinstance(owners, int):
        earlier = arrays[owners] if 0 <= owners < index else None
        # References have one level, so that resolving one is a single look-up.
        if earlier is None or isinstance(earlier.owners, int):
            raise _damaged(array, f"its owners are array {owners}'s, which has none", where)
        if chunk_count(earlier.shape, earlier.chunk_shape) != count:
            raise _damaged(array, f"its owners, array {owners}'s, do not cover its chunks", where)
        return
    if any(not 0 <= rank < part_count or run < 1 for rank, run in owners):
        raise _damaged(array, f"owners {owners[:8]} are not ranks below {part_count}", where)
    if sum(run for _, run in owners) != count:
        raise _damaged(array, "its owners do not cover its chunks", where)


def _damaged(array: ArraySpec, what: str, where: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(f"read {where}: array {array.name}: {what}")


def check_manifest(manifest: Manifest, where: str) -> None:
    """Check a manifest's spec (see `check_spec`) and its number of parts.

    Raises:
        CheckpointDamagedError: the manifest contradicts itself.
    """
    if not 1 <= len(manifest.parts) <= PART_COUNT_MAX:
        raise CheckpointDamagedError(f"read {where}: {len(manifest.parts)} parts")
    check_spec(manifest.checkpoint, len(manifest.parts), where)


def check_part(part: PartRecord, where: str, known: CheckpointSpec | None = None) -> None:
    """Check a part record on its own, without the manifest or the arrays of other parts.

    `known` is a spec that passed `check_spec` for as many parts: an equal one is not checked again.

    Raises:
        CheckpointDamagedError: the record contradicts itself.
    """
    if not 0 <= part.rank < part.part_count <= PART_COUNT_MAX or part.image_size_bytes < 0:
        raise CheckpointDamagedError(f"read {where}: part {part.rank} of {part.part_count}")
    if any(len(block) != DIGEST_HEX_LENGTH for block in part.blocks):
        raise CheckpointDamagedError(f"read {where}: a block's digest has another length")
    _check_reused(part, where)
    if (part.checkpoint is not None) != (part.rank == 0):
        raise CheckpointDamagedError(f"read {where}: rank {part.rank} and the checkpoint's spec")
    if part.checkpoint is not None and part.checkpoint != known:
        check_spec(part.checkpoint, part.part_count, where)


def _check_reused(part: PartRecord, where: str) -> None:
    """Check the reused images of a part, as far as that needs no arrays."""

    def damaged(what: str) -> CheckpointDamagedError:
        return CheckpointDamagedError(f"read {where}: its reused images: {what}")

    if len(part.reused) > REUSED_COUNT_MAX:
        raise damaged(f"{len(part.reused)}, expected at most {REUSED_COUNT_MAX}")
    last_step = -1
    for image in part.reused:
        origin = image.origin
        if origin.attempt != part.attempt or not last_step < origin.step < part.step:
            raise damaged(f"{origin} is no earlier checkpoint of the attempt, or out of order")
        last_step = origin.step
        if image.image_size_bytes < 0 or len(image.header_digest) != DIGEST_HEX_LENGTH:
            raise damaged(f"{image.origin} has an invalid size or header digest")
        if not are_ranges(image.laid) or not are_ranges(image.used) or not image.used:
            raise damaged(f"the chunks of {image.origin} are not ascending ranges, or none is used")
        if not is_subset(image.used, image.laid):
            raise damaged(f"chunks of {image.origin} are used that are not in it")
    if not are_disjoint([image.used for image in part.reused]):
        raise damaged("a chunk is taken from two of them")


def check_values(part: PartRecord, spec: CheckpointSpec, where: str) -> None:
    """Check that a part has the state of each object that the checkpoint's spec lists.

    Raises:
        CheckpointDamagedError: it lacks one, or has others: its process saved another state.
    """
    paths, expected = {value.path for value in part.values}, set(spec.process_values)
    if paths == expected and len(part.values) == len(expected):
        return
    kinds = (("lacks", expected - paths), ("has besides", paths - expected))
    texts = [
        f"{kind} {', '.join(sorted(map(path_name, others))[:PATHS_SHOWN_MAX])}"
        for kind, others in kinds
        if others
    ]
    difference = " and ".join(texts) or "has one twice"
    raise CheckpointDamagedError(
        f"{where}: of the objects with a state that rank 0 saved, rank {part.rank} {difference}; "
        "all processes of a job have to pass a state of the same structure to save"
    )


def check_reused_chunks(part: PartRecord, owned: Ownership, where: str) -> None:
    """Check that the chunks of reused images belong to the part's rank.

    Raises:
        CheckpointDamagedError: an image has more chunks than the arrays give this rank.
    """
    for image in part.reused:
        count = owned.chunk_count(part.rank)
        if image.laid[-1][1] > count:
            raise CheckpointDamagedError(
                f"read {where}: a reused image of {image.origin} has chunk "
                f"{image.laid[-1][1] - 1}, the arrays have {count} chunks"
            )
