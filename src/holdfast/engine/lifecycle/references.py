"""Removal of durable checkpoints whose images later checkpoints may reuse.

Invariants:
- A checkpoint reuses images of earlier checkpoints of its attempt only, and names them in its
  manifest; before the commit, in its part records. So an image can be needed only by checkpoints of
  the same attempt with a greater step.
- An image is removed once its own checkpoint is removed and no checkpoint needs it. Which one needs
  it is read from the store, after the listing and before the first removal; a record that cannot be
  read needs every image that it could.
- A process that removes images and commits excludes the two from each other, and a removal spares
  what was committed after the listing (`ReusedImages`). A part that another process writes
  meanwhile, and that reuses a removed image, is refused by its commit.

See docs/decisions/0025.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from holdfast.engine.lifecycle.catalog import Listing, list_checkpoints
from holdfast.engine.lifecycle.commit import remove
from holdfast.errors import CheckpointDamagedError, ObjectNotFoundError
from holdfast.format.names import (
    AttemptId,
    CheckpointId,
    checkpoint_folder,
    image_key,
    manifest_key,
    parse_object_key,
    parse_part_name,
)
from holdfast.format.records import Manifest, PartReference, ReusedImage
from holdfast.format.sealed import FORMAT_VERSION, unseal
from holdfast.store.contract import Store


class ReusedImages:
    """The images that committed checkpoints reuse, as far as a process knows. Thread-safe.

    Manifests never change, so each is read once. Entries of checkpoints that were not committed
    after all spare images until they are removed too.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Excludes commits of checkpoints that reuse images, and removals."""
        self.known: dict[CheckpointId, frozenset[str]] = {}

    def note(self, manifest: Manifest) -> None:
        """Note what a committed checkpoint reuses."""
        self.known[manifest.id] = reused_keys(manifest.attempt, manifest.parts)

    def list_checkpoints(self, durable: Store) -> dict[CheckpointId, Listing]:
        """Return a listing, and forget checkpoints that another process removed."""
        before = list(self.known)
        listings = list_checkpoints(durable)
        for checkpoint in before:
            # One that is being committed has part records already.
            if checkpoint not in listings or not listings[checkpoint].has_records:
                self.known.pop(checkpoint, None)
        return listings

    @contextlib.contextmanager
    def committing(self, checkpoint: CheckpointId, keys: Iterable[str]) -> Iterator[None]:
        """Exclude removals while a checkpoint is committed; later ones spare these images."""
        with self.lock:
            self.known[checkpoint] = frozenset(keys)
            yield


Known = dict[CheckpointId, frozenset[str]]


class _Manifest(msgspec.Struct, frozen=True):
    parts: tuple[PartReference, ...]
    format_version: int = FORMAT_VERSION


class _Part(msgspec.Struct, frozen=True):
    reused: tuple[ReusedImage, ...] = ()
    format_version: int = FORMAT_VERSION


def reused_keys(attempt: AttemptId, parts: Collection[PartReference]) -> frozenset[str]:
    """Return the keys of the images that a manifest's parts reuse."""
    return frozenset(
        image_key(CheckpointId(step, attempt), rank, len(parts))
        for rank, part in enumerate(parts)
        for step, _ in part.origins
    )


def remove_durable(
    durable: Store,
    listed: dict[CheckpointId, Listing],
    removed: Collection[CheckpointId],
    *,
    images: ReusedImages | None = None,
    in_care: Collection[CheckpointId] = (),
) -> list[CheckpointId]:
    """Remove checkpoints, or their remains, with the images that no other checkpoint needs then.

    Args:
        durable: the durable tier.
        listed: a listing of all of its checkpoints; updated.
        removed: the checkpoints to remove.
        images: what checkpoints reuse; this call adds what it reads. Commits that the listing does
            not have are in it.
        in_care: checkpoints that are being written; their own images stay.

    Returns:
        The checkpoints of which something was removed.

    Raises:
        StorageError: some objects may remain; the call may be repeated.
    """
    images = images or ReusedImages()
    with images.lock:
        return _remove(durable, listed, frozenset(removed), images.known, frozenset(in_care))


def _remove(
    durable: Store,
    listed: dict[CheckpointId, Listing],
    gone: frozenset[CheckpointId],
    known: Known,
    in_care: frozenset[CheckpointId],
) -> list[CheckpointId]:
    rest = {c: listing for c, listing in listed.items() if c not in gone}
    own = {key for c in gone for key in image_keys_in(c, listed.get(c, Listing()))}
    reused = {
        key
        for checkpoint in gone
        for key in _needed(durable, checkpoint, listed.get(checkpoint, Listing()), known) or ()
        if _is_remains(key, rest, in_care)
    }
    spared = _needed_by(durable, rest, own | reused, known)
    # Copied at once: the loop of an agent notes commits without the lock.
    for checkpoint, keys in list(known.items()):
        if checkpoint not in gone:
            spared |= keys
    changed = []
    for checkpoint in sorted(gone):
        listing = listed.pop(checkpoint, Listing())
        folder = checkpoint_folder(checkpoint)
        left = {n: size for n, size in listing.sizes_bytes.items() if f"{folder}/{n}" in spared}
        if listing.is_committed or len(left) < len(listing.sizes_bytes):
            changed.append(checkpoint)
            remove(durable, checkpoint, listing, spared)
        if left:
            listed[checkpoint] = Listing(left)
        known.pop(checkpoint, None)
    # After the manifests that named them; their own checkpoints were removed earlier.
    orphans = sorted(reused - own - spared)
    durable.delete(*orphans)
    for checkpoint, name in filter(None, map(parse_object_key, orphans)):
        listed[checkpoint].sizes_bytes.pop(name, None)
    return changed


def image_keys_in(checkpoint: CheckpointId, listing: Listing) -> Iterator[str]:
    """Yield the keys of the images in a checkpoint's folder."""
    folder = checkpoint_folder(checkpoint)
    return (f"{folder}/{name}" for name in listing.sizes_bytes if name.startswith("image-"))


def _is_remains(
    key: str, rest: Mapping[CheckpointId, Listing], in_care: Collection[CheckpointId]
) -> bool:
    """Return whether the checkpoint that wrote an image has nothing but images any more."""
    place = parse_object_key(key)
    if place is None or place[0] in in_care:
        return False
    listing = rest.get(place[0])
    return listing is not None and not listing.has_records


def _needed_by(
    durable: Store,
    rest: Mapping[CheckpointId, Listing],
    keys: Collection[str],
    known: Known,
) -> set[str]:
    """Return those of `keys`, image keys, that a checkpoint of `rest` needs."""
    origins = {key: place[0] for key in keys if (place := parse_object_key(key)) is not None}
    oldest: dict[AttemptId, int] = {}
    for origin in origins.values():
        oldest[origin.attempt] = min(origin.step, oldest.get(origin.attempt, origin.step))
    needed: set[str] = set()
    for checkpoint, listing in rest.items():
        step = oldest.get(checkpoint.attempt)
        if step is None or checkpoint.step <= step:
            continue
        named = _needed(durable, checkpoint, listing, known)
        if named is None:
            needed |= {
                key
                for key, origin in origins.items()
                if origin.attempt == checkpoint.attempt and origin.step < checkpoint.step
            }
        else:
            needed |= named.intersection(origins)
    return needed


def _needed(
    durable: Store, checkpoint: CheckpointId, listing: Listing, known: Known
) -> frozenset[str] | None:
    """Return the keys of the images that a checkpoint reuses; None if a record is damaged."""
    try:
        if not listing.is_committed:
            return frozenset(_named_by_parts(durable, checkpoint, listing))
        if checkpoint not in known:
            key = manifest_key(checkpoint)
            manifest = unseal(durable.get(key), _Manifest, key)
            known[checkpoint] = reused_keys(checkpoint.attempt, manifest.parts)
    except ObjectNotFoundError:
        # Deleted after it was listed.
        return frozenset()
    except CheckpointDamagedError:
        return None
    return known[checkpoint]


def _named_by_parts(durable: Store, checkpoint: CheckpointId, listing: Listing) -> Iterator[str]:
    for name in listing.sizes_bytes:
        parsed = parse_part_name(name)
        if parsed is not None:
            key = f"{checkpoint_folder(checkpoint)}/{name}"
            for image in unseal(durable.get(key), _Part, key).reused:
                yield image_key(image.origin, *parsed)
