"""Where one checkpoint can be read from: for each part, its copies in the order of nearness.

A checkpoint can be read when the durable tier has its manifest, or when the tiers together have all
its parts sealed. A copy whose record is not the one that was committed is no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.catalog import Listing, Listings, has_all_parts
from holdfast.engine.commit import parse_part
from holdfast.engine.save import check_layout
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    StepUncommittedError,
    StorageError,
)
from holdfast.format.check import check_manifest
from holdfast.format.layout import ImageLayout, image_layout, smallest_block_count
from holdfast.format.names import CheckpointId, image_key, manifest_key, part_key
from holdfast.format.paths import path_name
from holdfast.format.records import CheckpointSpec, Manifest, PartRecord
from holdfast.format.sealed import record_digest, unseal
from holdfast.store.contract import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSource:
    """One copy of one part."""

    store: Store
    part: PartRecord

    @property
    def image_key(self) -> str:
        """The key of its image in the store."""
        return image_key(self.part.id, self.part.rank, self.part.part_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSources:
    """A checkpoint that can be read. `parts[r]` are the copies of rank r's part, nearest first."""

    id: CheckpointId
    spec: CheckpointSpec
    parts: tuple[tuple[PartSource, ...], ...]
    passed_over: tuple[str, ...]

    def layout(self, rank: int) -> ImageLayout:
        """The layout of that rank's image."""
        return image_layout(self.spec.arrays, rank)


def find_sources(
    checkpoint: CheckpointId, stores: Sequence[Store], listings: Listings
) -> CheckpointSources:
    """Finds and reads the records of `checkpoint`; `stores` from the nearest to the durable one.

    Raises:
        StepUncommittedError: it was begun, and neither committed nor complete in RAM.
        CheckpointDamagedError: a record, or every copy of a part, is damaged or missing.
        StorageError: its manifest cannot be read, and it is not complete in RAM.
    """
    listed = [(store, listings[store.name].get(checkpoint, Listing())) for store in stores]
    parts, passed_over = [], []
    try:
        manifest = _read_manifest(checkpoint, listed)
    except (CheckpointDamagedError, StorageError) as error:
        # The commit record is for the durable tier; what is whole in RAM needs none.
        if not any(listing.is_complete and not listing.is_committed for _, listing in listed):
            raise
        manifest = None
        passed_over.append(str(error))
    part_count = len(manifest.parts) if manifest else _part_count(checkpoint, listed)
    for rank in range(part_count):
        copies = []
        for store, listing in listed:
            if _is_listed(checkpoint, rank, part_count, listing):
                try:
                    copies.append(_part_source(checkpoint, rank, part_count, store, manifest))
                except (CheckpointDamagedError, StorageError) as error:
                    passed_over.append(f"{store.name}: {error}")
        if not copies:
            raise CheckpointDamagedError(_no_copy(checkpoint, rank, part_count, passed_over))
        _check_length(copies, listings)
        parts.append(tuple(copies))
    spec = manifest.checkpoint if manifest else parts[0][0].part.checkpoint
    if spec is None:
        raise CheckpointDamagedError(f"read {checkpoint}: rank 0's part says nothing of it")
    sources = CheckpointSources(
        id=checkpoint, spec=spec, parts=tuple(parts), passed_over=tuple(passed_over)
    )
    for rank in range(part_count):
        for copy in sources.parts[rank]:
            _check_contents(copy.part, spec)
            check_layout(copy.part, sources.layout(rank))
    return sources


def _is_listed(checkpoint: CheckpointId, rank: int, part_count: int, listing: Listing) -> bool:
    keys = part_key(checkpoint, rank, part_count), image_key(checkpoint, rank, part_count)
    return all(key.rpartition("/")[2] in listing.sizes_bytes for key in keys)


def _check_length(copies: Sequence[PartSource], listings: Listings) -> None:
    """Checks that one of the images is long enough, before memory is taken for what it holds."""
    told = []
    for copy in copies:
        name = copy.image_key.rpartition("/")[2]
        found = listings[copy.store.name][copy.part.id].sizes_bytes[name]
        if found >= copy.part.image_size_bytes:
            return
        told.append(
            f"{copy.store.name}: {copy.image_key}: bytes [{found}, {copy.part.image_size_bytes}) "
            "are missing; the file is cut off"
        )
    raise CheckpointDamagedError(f"read {copies[0].part.id}: {'; '.join(told)}")


def _check_contents(part: PartRecord, spec: CheckpointSpec) -> None:
    """Checks a part against what the checkpoint is said to hold, before that is laid out.

    Of chunks with bytes each has a block, so the layout is no larger than the record.
    """
    where = f"read part {part.rank} of {part.id}"
    if part.rank == 0 and part.checkpoint != spec:
        raise CheckpointDamagedError(f"{where}: it speaks of another state than the manifest")
    found, expected = {value.path for value in part.values}, set(spec.process_values)
    if found != expected or len(part.values) != len(expected):
        raise CheckpointDamagedError(
            f"{where}: it has values of {sorted(map(path_name, found))[:10]}, expected one of each "
            f"of {sorted(map(path_name, expected))[:10]}"
        )
    least = smallest_block_count(spec.arrays, part.rank)
    if len(part.blocks) < least:
        raise CheckpointDamagedError(
            f"{where}: it has {len(part.blocks)} blocks, expected at least {least}"
        )


def _no_copy(checkpoint: CheckpointId, rank: int, part_count: int, seen: Sequence[str]) -> str:
    reasons = "; ".join(seen) or "its record or its image is missing"
    return f"read {checkpoint}: no good copy of part {rank} of {part_count}: {reasons}"


def _read_manifest(
    checkpoint: CheckpointId, listed: Sequence[tuple[Store, Listing]]
) -> Manifest | None:
    for store, listing in listed:
        if listing.is_committed:
            key = manifest_key(checkpoint)
            manifest = unseal(store.get(key), Manifest, key)
            check_manifest(manifest, key)
            if manifest.id != checkpoint:
                raise CheckpointDamagedError(f"read {key}: it is the manifest of {manifest.id}")
            return manifest
    return None


def _part_count(checkpoint: CheckpointId, listed: Sequence[tuple[Store, Listing]]) -> int:
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


def _part_source(
    checkpoint: CheckpointId, rank: int, part_count: int, store: Store, manifest: Manifest | None
) -> PartSource:
    key = part_key(checkpoint, rank, part_count)
    data = store.get(key)
    if manifest is not None:
        expected, found = manifest.parts[rank].record_digest, record_digest(data)
        if expected != found:
            raise CheckpointDamagedError(
                f"read {key}: bytes [0, {len(data)}) have digest {found}, expected {expected}; it "
                "is not the record that was committed"
            )
    part = parse_part(data, key, checkpoint, rank, part_count)
    if manifest is not None and part.image_size_bytes != manifest.parts[rank].image_size_bytes:
        raise CheckpointDamagedError(
            f"read {key}: its image has {part.image_size_bytes} bytes, the manifest says "
            f"{manifest.parts[rank].image_size_bytes}"
        )
    return PartSource(store=store, part=part)


def readable(listings: Listings) -> list[CheckpointId]:
    """What is committed, or complete over all tiers, as far as names tell; ascending."""
    every = sorted({checkpoint for tier in listings.values() for checkpoint in tier})
    found = []
    for checkpoint in every:
        seen = [tier[checkpoint] for tier in listings.values() if checkpoint in tier]
        together: dict[int, int] = {}
        for listing in seen:
            together |= listing.parts
        # A committed one that lost a part is damaged, which is to be told, not passed over.
        if has_all_parts(together) or any(listing.is_committed for listing in seen):
            found.append(checkpoint)
    return found


def is_sound(checkpoint: CheckpointId, stores: Sequence[Store], listings: Listings) -> bool:
    """Whether its records are whole and its images as long as they should be; reads no image."""
    try:
        sources = find_sources(checkpoint, stores, listings)
    except HoldfastError:
        return False
    return all(
        any(
            listings[copy.store.name][checkpoint].sizes_bytes[copy.image_key.rpartition("/")[2]]
            == copy.part.image_size_bytes
            for copy in copies
        )
        for copies in sources.parts
    )
