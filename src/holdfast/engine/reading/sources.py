"""The sources of one checkpoint: for each part, its copies from the nearest to the farthest.

A checkpoint can be read when the durable tier has its manifest, or when the tiers together have all
its parts sealed. A copy whose record is not the committed one is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.lifecycle.catalog import (
    Listing,
    Listings,
    has_all_parts,
    left_over,
    listed_size_bytes,
)
from holdfast.engine.lifecycle.commit import parse_part
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    NewerFormatError,
    StepUncommittedError,
    StorageError,
    WaitInterruptedError,
)
from holdfast.format.check import check_manifest, check_values
from holdfast.format.layout import Chunk
from holdfast.format.names import CheckpointId, image_key, manifest_key, part_key
from holdfast.format.part_layout import PartLayout, image_keys, image_sizes_bytes, origins_of
from holdfast.format.records import CheckpointSpec, Manifest, PartRecord
from holdfast.format.sealed import record_digest, unseal
from holdfast.store.contract import ReadableStore

log = logging.getLogger(__name__)

_newer_peers: set[str] = set()
"""The peers with a newer format that a warning was logged for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSource:
    """One copy of one part. `layouts` are the layouts of the checkpoint's parts."""

    store: ReadableStore
    part: PartRecord
    layouts: PartLayouts

    @property
    def layout(self) -> PartLayout:
        """The layout of its images; computed on first use.

        Raises:
            CheckpointDamagedError: the record's sizes do not match the arrays.
        """
        return self.layouts.layout_of(self.part)

    @property
    def image_keys(self) -> tuple[str, ...]:
        """The keys of its images in the store, its own first."""
        return image_keys(self.part, is_in_memory=self.store.is_in_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSources:
    """A checkpoint that can be read. `parts[r]` are the copies of rank r's part, nearest first."""

    id: CheckpointId
    spec: CheckpointSpec
    parts: tuple[tuple[PartSource, ...], ...]
    layouts: PartLayouts
    passed_over: tuple[str, ...]

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """Return the chunks of that rank, in the order of the layout of all its chunks."""
        return self.layouts.whole(rank).chunks

    def owner(self, array_index: int, chunk_index: int) -> int:
        """Return the rank that owns a chunk."""
        return self.layouts.owned.owner(array_index, chunk_index)


def find_sources(
    checkpoint: CheckpointId, stores: Sequence[ReadableStore], listings: Listings
) -> CheckpointSources:
    """Find and read the records of `checkpoint`; `stores` from the nearest to the durable one.

    Raises:
        StepUncommittedError: its save was begun, and it is neither committed nor complete in RAM.
        CheckpointDamagedError: a record, or every copy of a part, is damaged or missing.
        StorageError: its manifest cannot be read, and it is not complete in RAM.
        NewerFormatError: this host's RAM, or the durable tier, has it in a newer format. A peer's
            copy in a newer format is skipped, with one warning per peer in the log.
    """
    listed = [(store, listings[store.name].get(checkpoint, Listing())) for store in stores]
    parts, passed_over = [], []
    try:
        manifest = _read_manifest(checkpoint, listed)
    except (CheckpointDamagedError, StorageError) as error:
        # A checkpoint that is complete in RAM can be read without its manifest.
        if not any(listing.is_complete and not listing.is_committed for _, listing in listed):
            raise
        manifest = None
        passed_over.append(str(error))
    part_count = len(manifest.parts) if manifest else _part_count(checkpoint, listed)
    records = _records(checkpoint, part_count, listed)
    for rank in range(part_count):
        copies: list[tuple[ReadableStore, PartRecord]] = []
        # The copies of a part usually have the same record, which may be large.
        parsed: dict[bytes | HoldfastError, PartRecord] = {}
        for store, _ in listed:
            data = records[store.name].get(rank)
            if data is not None:
                try:
                    if data not in parsed:
                        parsed[data] = _parse_part(data, checkpoint, rank, part_count, manifest)
                    part = parsed[data]
                    _check_reused_listed(part, store, listings)
                    copies.append((store, part))
                except (CheckpointDamagedError, StorageError) as error:
                    passed_over.append(f"{store.name}: {error}")
                except NewerFormatError as error:
                    # A peer may be of a newer release.
                    if not (store.is_in_memory and store.is_optional):
                        raise
                    passed_over.append(f"{store.name}: {error}")
                    _warn_of_newer(store, error)
        if not copies:
            raise CheckpointDamagedError(_no_copy(checkpoint, rank, part_count, passed_over))
        _check_length(copies, listings)
        parts.append(copies)
    spec = manifest.checkpoint if manifest else parts[0][0][1].checkpoint
    if spec is None:
        raise CheckpointDamagedError(
            f"read {checkpoint}: rank 0's part record has no checkpoint spec"
        )
    part_records = [part for copies in parts for _, part in copies]
    for part in part_records:
        _check_values(part, spec)
    layouts = PartLayouts(spec.arrays)
    layouts.check_all(part_records)
    return CheckpointSources(
        id=checkpoint,
        spec=spec,
        parts=tuple(
            tuple(PartSource(store=store, part=part, layouts=layouts) for store, part in copies)
            for copies in parts
        ),
        layouts=layouts,
        passed_over=tuple(passed_over),
    )


def _warn_of_newer(store: ReadableStore, error: NewerFormatError) -> None:
    if store.name not in _newer_peers:
        _newer_peers.add(store.name)
        log.warning(
            "%s is skipped, its format is newer than this Holdfast's: %s", store.name, error
        )


def part_source(
    store: ReadableStore, part: PartRecord, spec: CheckpointSpec, layouts: PartLayouts
) -> PartSource:
    """Return a copy of a single part, checked against `spec`; `layouts` are those of `spec`.

    Raises:
        CheckpointDamagedError: the part does not match the checkpoint's spec.
    """
    _check_values(part, spec)
    layouts.check_counts(part)
    layouts.layout_of(part)
    return PartSource(store=store, part=part, layouts=layouts)


def _is_listed(checkpoint: CheckpointId, rank: int, part_count: int, listing: Listing) -> bool:
    keys = part_key(checkpoint, rank, part_count), image_key(checkpoint, rank, part_count)
    return all(key.rpartition("/")[2] in listing.sizes_bytes for key in keys)


def _check_reused_listed(part: PartRecord, store: ReadableStore, listings: Listings) -> None:
    for key in image_keys(part, is_in_memory=store.is_in_memory)[1:]:
        if listed_size_bytes(listings[store.name], key) is None:
            raise CheckpointDamagedError(
                f"read {key}: the part reuses this image, but it is missing"
            )


def _sizes_bytes(
    part: PartRecord, store: ReadableStore, listings: Listings
) -> list[tuple[str, int, int]]:
    """Return (key, listed size, recorded size) of each image, in bytes."""
    keys = image_keys(part, is_in_memory=store.is_in_memory)
    listed = (listed_size_bytes(listings[store.name], key) or 0 for key in keys)
    return list(zip(keys, listed, image_sizes_bytes(part), strict=True))


def _check_length(copies: Sequence[tuple[ReadableStore, PartRecord]], listings: Listings) -> None:
    """Check that the images of one copy are long enough, before memory is allocated."""
    problems: list[str] = []
    for store, part in copies:
        sizes = _sizes_bytes(part, store, listings)
        short = [
            f"{store.name}: {key}: bytes [{length}, {size}) are missing; the file is cut off"
            for key, length, size in sizes
            if length < size
        ]
        if not short:
            return
        problems += short
    raise CheckpointDamagedError(f"read {copies[0][1].id}: {'; '.join(problems)}")


def _check_values(part: PartRecord, spec: CheckpointSpec) -> None:
    """Check that a part has the per-process values of the checkpoint's spec."""
    where = f"read part {part.rank} of {part.id}"
    if part.rank == 0 and part.checkpoint != spec:
        raise CheckpointDamagedError(f"{where}: its checkpoint differs from the manifest's")
    check_values(part, spec, where)


def _no_copy(checkpoint: CheckpointId, rank: int, part_count: int, seen: Sequence[str]) -> str:
    reasons = "; ".join(seen) or "its record or its image is missing"
    return f"read {checkpoint}: no good copy of part {rank} of {part_count}: {reasons}"


def _read_manifest(
    checkpoint: CheckpointId, listed: Sequence[tuple[ReadableStore, Listing]]
) -> Manifest | None:
    problem: CheckpointDamagedError | StorageError | None = None
    for store, listing in listed:
        if not listing.is_committed:
            continue
        key = manifest_key(checkpoint)
        try:
            manifest = unseal(store.get(key), Manifest, key)
            check_manifest(manifest, key)
            if manifest.id != checkpoint:
                raise CheckpointDamagedError(f"read {key}: it is the manifest of {manifest.id}")
            return manifest
        except (CheckpointDamagedError, StorageError) as error:
            # The remote tier may have an intact one.
            problem = problem or type(error)(f"{store.name}: {error}")
    if problem is not None:
        raise problem
    return None


def _part_count(checkpoint: CheckpointId, listed: Sequence[tuple[ReadableStore, Listing]]) -> int:
    together: dict[int, int] = {}
    for _, listing in listed:
        together |= listing.parts
    if not has_all_parts(together):
        expected = max(together.values(), default=0)
        raise StepUncommittedError(
            f"restore step {checkpoint.step}: attempt {checkpoint.attempt} began to save it and "
            f"did not finish ({len(together)} of {expected or '?'} parts); choose another step"
        )
    return len(together)


def _records(
    checkpoint: CheckpointId, part_count: int, listed: Sequence[tuple[ReadableStore, Listing]]
) -> dict[str, dict[int, bytes | HoldfastError]]:
    """Read all listed part records; return them by store name and rank."""
    records = {}
    for store, listing in listed:
        ranks = [r for r in range(part_count) if _is_listed(checkpoint, r, part_count, listing)]
        keys = [part_key(checkpoint, rank, part_count) for rank in ranks]
        records[store.name] = dict(zip(ranks, store.get_many(keys), strict=True))
    return records


def _parse_part(
    data: bytes | HoldfastError,
    checkpoint: CheckpointId,
    rank: int,
    part_count: int,
    manifest: Manifest | None,
) -> PartRecord:
    if isinstance(data, HoldfastError):
        raise data
    key = part_key(checkpoint, rank, part_count)
    if manifest is not None:
        expected, digest = manifest.parts[rank].record_digest, record_digest(data)
        if expected != digest:
            raise CheckpointDamagedError(
                f"read {key}: bytes [0, {len(data)}) have digest {digest}, expected {expected}; "
                "this is not the committed record"
            )
    spec = manifest.checkpoint if manifest is not None else None
    part = parse_part(data, key, checkpoint, rank, part_count, spec)
    if manifest is not None:
        reference, own = manifest.parts[rank], part.image_size_bytes
        origins = origins_of(part)
        if (own, origins) != (reference.image_size_bytes, reference.origins):
            raise CheckpointDamagedError(
                f"read {key}: its image has {own} bytes, and it reuses (step, bytes) "
                f"{list(origins)}; the manifest has {reference.image_size_bytes} and "
                f"{list(reference.origins)}"
            )
    return part


def readable(listings: Listings) -> list[CheckpointId]:
    """Return the checkpoints that are committed, or complete over all tiers, by name; ascending.

    Parts that the next commit removes do not count (`catalog.left_over`).
    """
    kept = [(tier, tier.keys() - left_over(tier)) for tier in listings.values()]
    checkpoints = []
    for checkpoint in sorted({checkpoint for _, ids in kept for checkpoint in ids}):
        seen = [tier[checkpoint] for tier, ids in kept if checkpoint in ids]
        together: dict[int, int] = {}
        for listing in seen:
            together |= listing.parts
        # A committed checkpoint without some part is damaged: include it, so that this is reported.
        if has_all_parts(together) or any(listing.is_committed for listing in seen):
            checkpoints.append(checkpoint)
    return checkpoints


def is_sound(checkpoint: CheckpointId, stores: Sequence[ReadableStore], listings: Listings) -> bool:
    """Return whether its records are intact and its images long enough; reads no image."""
    try:
        sources = find_sources(checkpoint, stores, listings)
    except WaitInterruptedError:
        raise
    except HoldfastError:
        return False
    return all(
        any(
            all(length == size for _, length, size in _sizes_bytes(copy.part, copy.store, listings))
            for copy in copies
        )
        for copies in sources.parts
    )
