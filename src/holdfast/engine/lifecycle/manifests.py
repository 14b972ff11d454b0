"""Reading the manifests of several checkpoints, and what policies need of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.errors import CheckpointDamagedError, HoldfastError
from holdfast.format.check import check_manifest
from holdfast.format.names import CheckpointId, manifest_key
from holdfast.format.records import Manifest, decode_metrics
from holdfast.format.sealed import unseal
from holdfast.policy.contexts import CheckpointInfo
from holdfast.store.contract import ReadableStore


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
