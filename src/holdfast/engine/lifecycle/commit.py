"""The commit: the only operation that makes a checkpoint reachable.

Invariants:
- A manifest is written only when every part record it names, and the image of each, is durable.
- It is written with put-if-absent: there is one commit, whichever process completes it.
- No checkpoint of an attempt is committed once a newer attempt has begun (`check_not_fenced`).
- Removal starts with the manifest, so that no crash leaves a manifest that names missing bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.lifecycle.attempts import newest_attempt, read_attempts
from holdfast.engine.lifecycle.catalog import Listing
from holdfast.errors import CheckpointDamagedError, FencedError, HoldfastError, StorageError
from holdfast.format.check import check_part
from holdfast.format.names import CheckpointId, checkpoint_folder, manifest_key, part_key
from holdfast.format.records import Manifest, PartRecord, PartReference
from holdfast.format.sealed import record_digest, seal, unseal
from holdfast.format.timeline import last_steps
from holdfast.store.contract import ReadableStore, Store


def read_part(
    store: ReadableStore, checkpoint: CheckpointId, rank: int, part_count: int
) -> PartRecord:
    """Return one part's record, checked on its own.

    Raises:
        ObjectNotFoundError, CheckpointDamagedError, NewerFormatError.
    """
    key = part_key(checkpoint, rank, part_count)
    return parse_part(store.get(key), key, checkpoint, rank, part_count)


def parse_part(
    data: bytes, key: str, checkpoint: CheckpointId, rank: int, part_count: int
) -> PartRecord:
    """Return the part record in `data`, which was read from `key`.

    Raises:
        CheckpointDamagedError: the record is damaged, or belongs to another part.
    """
    part = unseal(data, PartRecord, key)
    check_part(part, key)
    if (part.id, part.rank, part.part_count) != (checkpoint, rank, part_count):
        raise CheckpointDamagedError(
            f"read {key}: it is the record of part {part.rank} of {part.part_count} of {part.id}"
        )
    return part


def manifest_of(parts: Sequence[PartRecord], record_digests: Sequence[str]) -> Manifest:
    """Return the manifest of `parts`, which are all parts in the order of ranks."""
    first = parts[0]
    if first.checkpoint is None:
        raise CheckpointDamagedError(f"commit {first.id}: rank 0's part has no checkpoint in it")
    return Manifest(
        run_id=first.run_id,
        step=first.step,
        attempt=first.attempt,
        parts=tuple(
            PartReference(
                record_digest=digest,
                image_size_bytes=part.image_size_bytes,
                reused_size_bytes=sum(image.image_size_bytes for image in part.reused),
            )
            for part, digest in zip(parts, record_digests, strict=True)
        ),
        checkpoint=first.checkpoint,
    )


def commit(durable: Store, checkpoint: CheckpointId, part_count: int) -> Manifest:
    """Commit a checkpoint whose parts are all durable; return its manifest.

    Raises:
        ObjectNotFoundError, CheckpointDamagedError: a part is missing or damaged; not committed.
        StorageError: it is unknown whether it was committed; the call may be repeated.
    """
    records = []
    keys = [part_key(checkpoint, rank, part_count) for rank in range(part_count)]
    for rank, (key, data) in enumerate(zip(keys, durable.get_many(keys), strict=True)):
        if isinstance(data, HoldfastError):
            raise data
        records.append((parse_part(data, key, checkpoint, rank, part_count), record_digest(data)))
    manifest = manifest_of([part for part, _ in records], [digest for _, digest in records])
    durable.put_if_absent(manifest_key(checkpoint), seal(manifest))
    return manifest


def check_not_fenced(durable: ReadableStore, checkpoint: CheckpointId) -> None:
    """Check that `checkpoint` is on the current timeline.

    Raises:
        FencedError: a newer attempt continued from an earlier step.
        StorageError: the record of its own attempt is missing.
    """
    newest = newest_attempt(durable)
    if newest == checkpoint.attempt:
        return
    if newest < checkpoint.attempt:
        raise StorageError(
            f"commit {checkpoint}: expected the record of attempt {checkpoint.attempt} in "
            f"{durable}, the newest is {newest}; the run's files were removed"
        )
    if checkpoint.step > last_steps(read_attempts(durable)).get(checkpoint.attempt, -1):
        raise FencedError(
            f"commit {checkpoint}: attempt {newest} has taken the run over from "
            f"attempt {checkpoint.attempt}; nothing more of it is saved, stop its processes"
        )


def remove(store: Store, checkpoint: CheckpointId, listing: Listing) -> None:
    """Remove a checkpoint from a store, its manifest first.

    Raises:
        StorageError: some objects may remain. It is no longer a checkpoint once its manifest is
            removed. The call may be repeated.
    """
    folder = checkpoint_folder(checkpoint)
    store.delete(manifest_key(checkpoint))
    store.discard_unfinished(folder)
    # Part records before images, so that no record names missing bytes.
    records = {name for name in listing.sizes_bytes if name.startswith("part-")}
    for names in (records, listing.sizes_bytes.keys() - records):
        store.delete(*(f"{folder}/{name}" for name in sorted(names)))
