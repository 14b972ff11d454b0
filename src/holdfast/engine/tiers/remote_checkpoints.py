"""The checkpoints of the remote tier: what it lacks, and what its policy removes from it.

Invariant: nothing is removed there for an attempt that a newer one has fenced.

See docs/decisions/0030.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime

from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.engine.lifecycle.catalog import Listing, info_of, read_manifests
from holdfast.engine.lifecycle.commit import check_not_fenced
from holdfast.engine.lifecycle.newest import newest_committed
from holdfast.engine.lifecycle.references import ReusedImages, remove_durable
from holdfast.engine.lifecycle.retention import branches, to_drop
from holdfast.format.names import CheckpointId
from holdfast.format.records import Manifest
from holdfast.policy.contexts import CheckpointInfo
from holdfast.policy.preservation_policy import PreservationPolicy
from holdfast.store.durable import DurableStore


@dataclass(frozen=True, slots=True)
class UploadedCheckpoint:
    """A committed checkpoint of a durable tier, and what policies see of it."""

    id: CheckpointId
    info: CheckpointInfo
    part_count: int


def uploaded_of(manifest: Manifest) -> UploadedCheckpoint:
    """Return what policies see of a committed checkpoint."""
    return UploadedCheckpoint(manifest.id, info_of(manifest), len(manifest.parts))


class RemoteCheckpoints:
    """The remote tier of a run, as the agent that leads the run works on it. Thread-safe."""

    def __init__(self, durable: DurableStore, remote: DurableStore) -> None:
        self._durable = durable
        self._remote = remote
        self._lock = threading.Lock()
        self._images = ReusedImages()
        self._infos: dict[CheckpointId, CheckpointInfo] = {}

    def newest(self) -> tuple[UploadedCheckpoint | None, UploadedCheckpoint | None]:
        """Return the newest checkpoint on the timeline of the durable and of the remote tier.

        Raises:
            StorageError, CheckpointDamagedError: a tier cannot be read.
        """
        attempts = read_attempts(self._durable)
        checkpoints: list[UploadedCheckpoint | None] = []
        for store in (self._durable, self._remote):
            newest = newest_committed(store, attempts)
            manifests = read_manifests(store, [newest] if newest is not None else [])
            checkpoints.append(next(map(uploaded_of, manifests), None))
        return checkpoints[0], checkpoints[1]

    def commit_checkpoint(
        self, checkpoint: CheckpointId, commit: Callable[[ReusedImages], Manifest]
    ) -> None:
        """Commit a checkpoint in the remote tier by `commit`, unless it is deleted meanwhile.

        Raises:
            FencedError: a newer attempt has begun, maybe by a start that shares this tier alone.
        """
        with self._lock:
            check_not_fenced(self._remote, checkpoint)
            manifest = commit(self._images)
        self._images.note(manifest)
        self._infos[checkpoint] = info_of(manifest)

    def remove_checkpoint(self, checkpoint: CheckpointId) -> bool:
        """Remove a checkpoint that a call deletes; return whether there was any of it.

        Its manifest in the durable tier must be removed before, so that no upload commits it again.
        """
        with self._lock:
            listed = self._images.list_checkpoints(self._remote)
            if checkpoint not in listed:
                return False
            return bool(self._remove(listed, [checkpoint], ()))

    def preserve(
        self,
        policy: PreservationPolicy,
        newest: CheckpointId,
        uploading: Collection[CheckpointId],
        now: datetime,
    ) -> list[CheckpointId]:
        """Remove what the policy does not keep, and what interrupted uploads have left.

        Args:
            policy: the policy of the tier.
            newest: the checkpoint that was uploaded last. Nothing of later attempts is removed.
            uploading: checkpoints that are being uploaded.
            now: the time.

        Returns:
            The committed checkpoints that were removed.

        Raises:
            FencedError, StorageError: nothing more is removed.
        """
        with self._lock:
            check_not_fenced(self._remote, newest)
            attempts = read_attempts(self._remote)
            listed = self._images.list_checkpoints(self._remote)
            committed = [c for c, listing in listed.items() if listing.is_committed]
            self._read_infos([c for c in committed if c not in self._infos])
            drops = to_drop(branches(committed, attempts), policy, self._infos.__getitem__, now)
            remains = [
                c
                for c, listing in listed.items()
                if not listing.is_committed and c.attempt <= newest.attempt and c not in uploading
            ]
            self._remove(listed, [*remains, *drops], uploading)
            return drops

    def _read_infos(self, checkpoints: list[CheckpointId]) -> None:
        for manifest in read_manifests(self._remote, checkpoints):
            self._images.note(manifest)
            self._infos[manifest.id] = info_of(manifest)

    def _remove(
        self,
        listed: dict[CheckpointId, Listing],
        removed: Iterable[CheckpointId],
        in_care: Collection[CheckpointId],
    ) -> list[CheckpointId]:
        removed = list(removed)
        for checkpoint in removed:
            self._infos.pop(checkpoint, None)
        return remove_durable(self._remote, listed, removed, images=self._images, in_care=in_care)
