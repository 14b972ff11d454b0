"""The commit: the only operation that makes a checkpoint reachable.

Invariants:
- A manifest is written only when every part record it names, and each image of each part, is
  durable: its own, and the images of earlier checkpoints that it reuses.
- A manifest is written only if all ranks saved the states of the same objects. Their arrays were
  compared when the parts were copied.
- It is written with put-if-absent: there is one commit, whichever process completes it.
- No checkpoint of an attempt is committed once a newer attempt has begun (`check_not_fenced`).
- Removal starts with the manifest, so that no crash leaves a manifest that names missing bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from holdfast.engine.lifecycle.attempts import newest_number, read_attempts
from holdfast.engine.lifecycle.catalog import Listing
from holdfast.errors import (
    CheckpointDamagedError,
    FencedError,
    HoldfastError,
    ObjectNotFoundError,
)
from holdfast.format.check import check_part, check_values
from holdfast.format.names import CheckpointId, checkpoint_folder, image_key, manifest_key, part_key
from holdfast.format.part_layout import origins_of
from holdfast.format.records import CheckpointSpec, Manifest, PartRecord, PartReference
from holdfast.format.sealed import record_digest, seal, unseal
from holdfast.format.timeline import last_steps
from holdfast.store.contract import ReadableStore, Store
from holdfast.store.durable import DurableStore

NOTHING_SAVED = (
    "this training can save nothing more; stop it and start it again, which continues from the "
    "newest checkpoint that is there"
)
"""Ends the reason of a failure that no later save is spared."""


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
    data: bytes,
    key: str,
    checkpoint: CheckpointId,
    rank: int,
    part_count: int,
    known: CheckpointSpec | None = None,
) -> PartRecord:
    """Return the part record in `data`, which was read from `key`.

    `known` is the spec of the checkpoint's manifest, if that was read.

    Raises:
        CheckpointDamagedError: the record is damaged, or belongs to another part.
    """
    part = unseal(data, PartRecord, key)
    check_part(part, key, known)
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
    for part in parts:
        check_values(part, first.checkpoint, f"commit {first.id}")
    return Manifest(
        run_id=first.run_id,
        step=first.step,
        attempt=first.attempt,
        parts=tuple(
            PartReference(
                record_digest=digest,
                image_size_bytes=part.image_size_bytes,
                origins=origins_of(part),
            )
            for part, digest in zip(parts, record_digests, strict=True)
        ),
        checkpoint=first.checkpoint,
    )


def commit(
    durable: DurableStore,
    checkpoint: CheckpointId,
    part_count: int,
    committing: Callable[[CheckpointId, Iterable[str]], AbstractContextManager[None]] | None = None,
) -> Manifest:
    """Commit a checkpoint whose parts are all durable; return its manifest.

    Args:
        durable: the durable tier.
        checkpoint: the checkpoint.
        part_count: the number of its parts.
        committing: excludes removals of images while its result is entered, if this process may
            remove some (`references.ReusedImages`); called if the checkpoint reuses images.

    Raises:
        ObjectNotFoundError, CheckpointDamagedError: a part or a reused image is missing or damaged,
            or the ranks saved different objects; not committed.
        StorageError: it is unknown whether it was committed; the call may be repeated.
    """
    records = []
    keys = [part_key(checkpoint, rank, part_count) for rank in range(part_count)]
    for rank, (key, data) in enumerate(zip(keys, durable.get_many(keys), strict=True)):
        if isinstance(data, HoldfastError):
            raise data
        records.append((parse_part(data, key, checkpoint, rank, part_count), record_digest(data)))
    parts = [part for part, _ in records]
    manifest = manifest_of(parts, [digest for _, digest in records])
    reused = _reused_images(parts)
    keys = sorted(key for key, _ in reused)
    with committing(checkpoint, keys) if committing is not None and keys else nullcontext():
        # Between this check and the manifest, none of them may be removed: no manifest names it.
        _check_stored(durable, checkpoint, reused)
        put_manifest(durable, parts, seal(manifest))
    return manifest


def put_manifest(durable: Store, parts: Sequence[PartRecord], manifest: bytes) -> None:
    """Write the manifest of `parts` if there is none, no more durable than what it names."""
    first = parts[0]
    own = part_key(first.id, first.rank, first.part_count)
    reused = sorted(key for key, _ in _reused_images(parts))
    durable.put_if_absent(manifest_key(first.id), manifest, after=(own, *reused))


def is_committed(store: ReadableStore, checkpoint: CheckpointId) -> bool:
    """Return whether the store has the checkpoint's manifest."""
    try:
        store.get(manifest_key(checkpoint))
    except ObjectNotFoundError:
        return False
    return True


def _reused_images(parts: Sequence[PartRecord]) -> set[tuple[str, int]]:
    """Return (key, size in bytes) of the images that the parts reuse."""
    return {
        (image_key(image.origin, part.rank, part.part_count), image.image_size_bytes)
        for part in parts
        for image in part.reused
    }


def _check_stored(
    durable: ReadableStore, checkpoint: CheckpointId, images: Iterable[tuple[str, int]]
) -> None:
    """Check that all `images` exist with their sizes; each of their folders is listed once."""
    expected = dict(images)
    folders = {key.rpartition("/")[0] for key in expected}
    sizes = {s.key: s.size_bytes for folder in folders for s in durable.list(folder)}
    for key, size_bytes in expected.items():
        if sizes.get(key) != size_bytes:
            raise CheckpointDamagedError(
                f"commit {checkpoint}: it reuses {key}, expected {size_bytes} bytes, found "
                f"{sizes.get(key, 'no such image')}; the checkpoint that wrote it was removed "
                "meanwhile, save again"
            )


def check_not_fenced(durable: DurableStore, checkpoint: CheckpointId) -> None:
    """Check that `checkpoint` is on the current timeline.

    Raises:
        FencedError: a newer attempt continued from an earlier step.
        ObjectNotFoundError: the record of its own attempt is missing.
    """
    newest = newest_number(durable)
    if newest == checkpoint.attempt.number:
        return
    if newest < checkpoint.attempt.number:
        raise ObjectNotFoundError(
            f"commit {checkpoint}: expected the record of attempt {checkpoint.attempt}, the newest "
            f"is that of attempt {newest}; the run's files were removed, or put back to an earlier "
            f"state: {NOTHING_SAVED}"
        )
    if checkpoint.step > last_steps(read_attempts(durable)).get(checkpoint.attempt, -1):
        raise FencedError(
            f"commit {checkpoint}: attempt {newest} has taken the run over from "
            f"attempt {checkpoint.attempt}; nothing more of it is saved, stop its processes"
        )


def remove(
    store: Store,
    checkpoint: CheckpointId,
    listing: Listing,
    spared: Collection[str] = (),
) -> None:
    """Remove a checkpoint from a store, its manifest first; `spared` are keys that stay.

    Raises:
        StorageError: some objects may remain. It is no longer a checkpoint once its manifest is
            removed. The call may be repeated.
    """
    folder = checkpoint_folder(checkpoint)
    store.delete(manifest_key(checkpoint))
    store.discard_unfinished(manifest_key(checkpoint))
    store.discard_unfinished(folder)
    # Part records before images, so that no record names missing bytes.
    records = {name for name in listing.sizes_bytes if name.startswith("part-")}
    for names in (records, listing.sizes_bytes.keys() - records):
        keys = (f"{folder}/{name}" for name in sorted(names))
        store.delete(*(key for key in keys if key not in spared))
