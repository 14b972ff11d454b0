"""The checkpoints in a store, derived from one listing of names and sizes, and their manifests.

A listing proves that objects exist, not that they are intact: readers check that.

See docs/decisions/0029.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

from holdfast import waits
from holdfast.errors import CheckpointDamagedError, HoldfastError, StorageError
from holdfast.format.check import check_manifest
from holdfast.format.names import (
    CHECKPOINTS,
    MANIFESTS,
    NO_ATTEMPT,
    CheckpointId,
    checkpoint_folder,
    manifest_key,
    parse_checkpoint_name,
    parse_manifest_key,
    parse_object_key,
    parse_part_name,
    parse_reused_image_name,
)
from holdfast.format.records import Manifest, decode_metrics
from holdfast.format.sealed import unseal
from holdfast.policy.contexts import CheckpointInfo
from holdfast.store.contract import ReadableStore, StoredObject

PEERS_AT_ONCE = 16
PEERS_SECS = 30.0
_MANIFESTS_FOLDER = MANIFESTS.rpartition("/")[2]


@dataclass(slots=True)
class Listing:
    """The objects of one checkpoint in one store.

    Attributes:
        sizes_bytes: the sizes of the objects in its folder, by file name.
        is_committed: whether its manifest exists.
    """

    sizes_bytes: dict[str, int] = field(default_factory=dict)
    is_committed: bool = False

    @property
    def parts(self) -> dict[int, int]:
        """The part count by rank, for each part record whose image exists."""
        counts = {}
        for name in self.sizes_bytes:
            parsed = parse_part_name(name)
            if parsed is not None:
                rank, count = parsed
                if f"image-{rank:05d}-of-{count:05d}.safetensors" in self.sizes_bytes:
                    counts[rank] = count
        return counts

    @property
    def is_complete(self) -> bool:
        """Whether all parts exist."""
        return has_all_parts(self.parts)

    @property
    def has_records(self) -> bool:
        """Whether it has a record, and not only images, which later checkpoints may need."""
        return self.is_committed or any(name.endswith(".json") for name in self.sizes_bytes)

    @property
    def size_bytes(self) -> int:
        """The bytes of all images here; in RAM also of those that it reuses."""
        return sum(s for n, s in self.sizes_bytes.items() if n.startswith("image-"))

    @property
    def written_bytes(self) -> int:
        """The bytes of the images that were written for this checkpoint."""
        reused = (s for n, s in self.sizes_bytes.items() if parse_reused_image_name(n) is not None)
        return self.size_bytes - sum(reused)


Listings = Mapping[str, Mapping[CheckpointId, Listing]]
"""The listings of several stores: by store name, then by checkpoint."""


def listed_size_bytes(tier: Mapping[CheckpointId, Listing], key: str) -> int | None:
    """Return the size of an object by the listings of its tier; None if it is not listed."""
    place = parse_object_key(key)
    if place is None or place[0] not in tier:
        return None
    return tier[place[0]].sizes_bytes.get(place[1])


def list_stores(
    stores: Sequence[ReadableStore],
    peers_secs: float = PEERS_SECS,
    peers_at_once: int = PEERS_AT_ONCE,
) -> tuple[Listings, tuple[str, ...]]:
    """List all stores, peers and a remote tier concurrently.

    At most `peers_at_once` of them are listed at a time. Those that could not be started within
    `peers_secs`, because too many before them did not answer, are reported; each request has a
    timeout of its own.

    Returns:
        The listings, and for each of them without one the reason; such a store counts as empty.

    Raises:
        StorageError: another store cannot be listed.
    """
    peers = [store for store in stores if store.is_optional]
    with waits.thread_pool(min(peers_at_once, len(peers)) or 1, "holdfast-list") as pool:
        listings = {store.name: pool.submit(list_checkpoints, store) for store in peers}
        try:
            tiers = {s.name: list_checkpoints(s) for s in stores if s not in peers}
            waits.await_all(listings.values(), peers_secs)
        finally:
            # Cancels queued requests; running ones end by their own timeouts.
            pool.shutdown(wait=False, cancel_futures=True)
    passed_over = []
    for store in peers:
        tiers[store.name] = {}
        try:
            tiers[store.name] = waits.result(listings[store.name])
        except StorageError as error:
            passed_over.append(str(error))
        except CancelledError:
            passed_over.append(f"list {store.name}: others did not answer for {peers_secs:.0f} s")
        # RAM holds no commits. A stray manifest there must not hide the durable one.
        for listing in tiers[store.name].values() if store.is_in_memory else ():
            listing.is_committed = False
    return {store.name: tiers[store.name] for store in stores}, tuple(passed_over)


def has_all_parts(parts: Mapping[int, int]) -> bool:
    """Return whether these parts (part count by rank) are one complete checkpoint."""
    counts = set(parts.values())
    return len(counts) == 1 and counts == {len(parts)}


def left_over(tier: Mapping[CheckpointId, Listing]) -> set[CheckpointId]:
    """Return the checkpoints without a manifest that the next commit removes from a durable tier.

    A later one of the same attempt, or of a newer one, is committed. So they are what is left of an
    interrupted delete, or of a save that failed, also if all parts are there. A tier in RAM has no
    manifests, and none of these.
    """
    remains = set()
    newest_attempt = NO_ATTEMPT
    for checkpoint in sorted(tier, reverse=True):
        if tier[checkpoint].is_committed:
            newest_attempt = max(newest_attempt, checkpoint.attempt)
        elif checkpoint.attempt <= newest_attempt:
            remains.add(checkpoint)
    return remains


def list_folder(store: ReadableStore, checkpoint: CheckpointId) -> Listing:
    """Return the listing of one checkpoint's folder, without whether it is committed."""
    folder = checkpoint_folder(checkpoint)
    names = ((stored.key[len(folder) + 1 :], stored.size_bytes) for stored in store.list(folder))
    return Listing({name: size_bytes for name, size_bytes in names if "/" not in name})


def list_checkpoints(store: ReadableStore) -> dict[CheckpointId, Listing]:
    """Return the listings of all checkpoints in a store, by ascending step, then attempt."""
    return listings_of(store.list(CHECKPOINTS))


def listings_of(objects: Iterable[StoredObject]) -> dict[CheckpointId, Listing]:
    """Return the checkpoints that these objects, listed by key, belong to, in ascending order."""
    tier: dict[CheckpointId, Listing] = {}
    last_folder, sizes_bytes = "", None
    for stored in objects:
        folder, _, name = stored.key[len(CHECKPOINTS) + 1 :].partition("/")
        if folder != last_folder:
            # Objects of a folder are adjacent; parse each folder's name once, of maybe thousands.
            checkpoint, last_folder = parse_checkpoint_name(folder), folder
            sizes_bytes = None
            if checkpoint is not None:
                sizes_bytes = tier.setdefault(checkpoint, Listing()).sizes_bytes
        if sizes_bytes is not None and name and "/" not in name:
            sizes_bytes[name] = stored.size_bytes
        elif folder == _MANIFESTS_FOLDER:
            committed = parse_manifest_key(stored.key)
            if committed is not None:
                tier.setdefault(committed, Listing()).is_committed = True
    return {c: tier[c] for c in sorted(tier) if tier[c].sizes_bytes or tier[c].is_committed}


def read_manifests(store: ReadableStore, checkpoints: Sequence[CheckpointId]) -> Iterator[Manifest]:
    """Read the manifests concurrently, and yield them in the order of `checkpoints`.

    Raises:
        CheckpointDamagedError, StorageError, NewerFormatError: one of them cannot be read. The
            error of a damaged one names the tier, since a run may have two.
    """
    keys = [manifest_key(checkpoint) for checkpoint in checkpoints]
    for key, data in zip(keys, store.get_many(keys), strict=True):
        if isinstance(data, HoldfastError):
            raise data
        try:
            manifest = unseal(data, Manifest, key)
            check_manifest(manifest, key)
        except CheckpointDamagedError as error:
            raise CheckpointDamagedError(f"{store.name}: {error}") from error
        yield manifest


def info_of(manifest: Manifest) -> CheckpointInfo:
    """Return what policies see of a committed checkpoint."""
    spec = manifest.checkpoint
    return CheckpointInfo(manifest.step, spec.time, decode_metrics(spec.metrics))
