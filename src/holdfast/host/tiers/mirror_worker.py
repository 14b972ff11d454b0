"""Carry out the coordination's effects on the remote tier: write parts, and commit.

Nothing is decided here. Each part that is written, and the first failure, is submitted as an input.
All calls that a service may hold are on threads that do not delay the end of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.coordination import effects, inputs
from holdfast.engine.lifecycle.attempts import newest_attempt
from holdfast.engine.lifecycle.catalog import Listing, list_folder, read_manifests
from holdfast.engine.lifecycle.commit import check_not_fenced
from holdfast.engine.lifecycle.run import check_run
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.tiers.checkpoint_copy import commit_copy, copy_part_once, part_copies
from holdfast.errors import FencedError, HoldfastError, StorageError
from holdfast.format.names import NO_ATTEMPT, AttemptId, CheckpointId
from holdfast.format.records import Manifest
from holdfast.format.sealed import seal
from holdfast.host.driver.agent_run import REMOTE_ADVICE, AgentRun, RemoteTarget
from holdfast.host.driver.attached_trainers import AttachedTrainers
from holdfast.host.tiers.ram_tier import RamTier
from holdfast.host.tiers.store_threads import in_thread

PARTS_AT_ONCE = 2
"""How many parts an agent uploads at a time; each takes a few requests' worth of memory."""


@dataclass(slots=True)
class _Job:
    """The parts of one checkpoint that are written in one round."""

    id: CheckpointId
    round: int
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    source: asyncio.Task[tuple[Manifest, PartLayouts, Listing]] | None = None
    has_failed: bool = False


class MirrorWorker:
    """The operations of one agent on the remote tier; owned by the event loop."""

    def __init__(
        self,
        run: AgentRun,
        ram: RamTier,
        trainers: AttachedTrainers,
        submit: Callable[[inputs.Input], None],
    ) -> None:
        self._run = run
        self._ram = ram
        self._trainers = trainers
        self._submit = submit
        self._slots = asyncio.Semaphore(PARTS_AT_ONCE)
        self._job: _Job | None = None
        self._commits: set[asyncio.Task[None]] = set()

    def write_parts(self, effect: effects.MirrorParts) -> None:
        """Begin to write parts; those of another checkpoint or round are not written any more."""
        job = self._job
        if job is None or (job.id, job.round) != (effect.id, effect.round):
            for task in job.tasks if job is not None else ():
                task.cancel()
            job = self._job = _Job(effect.id, effect.round)
        job.tasks += (asyncio.create_task(self._write(job, rank)) for rank in sorted(effect.ranks))

    def cancel(self) -> None:
        """Forget what is under way; its threads end with their present request."""
        for task in self._tasks():
            task.cancel()
        self._job = None
        self._commits.clear()

    @property
    def is_busy(self) -> bool:
        """Whether a part or a manifest is being written."""
        return any(not task.done() for task in self._tasks())

    async def wait_idle(self) -> None:
        """Wait for what is under way now."""
        tasks = self._tasks()
        if tasks:
            await asyncio.wait(tasks)

    def commit(self, effect: effects.MirrorCommit) -> None:
        """Begin to write the manifest of a checkpoint whose parts are all there."""
        task = asyncio.create_task(self._commit(effect))
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [*(self._job.tasks if self._job is not None else ()), *self._commits]

    async def _commit(self, effect: effects.MirrorCommit) -> None:
        try:
            remote = self._remote()
            await in_thread(lambda: self._put_manifest(remote, effect))
        except Exception as error:
            newer = await self._newer_attempt(error)
            reason = str(error) or repr(error)
            self._submit(inputs.MirrorCommitFailed(effect.id, reason, newer))
        else:
            self._submit(inputs.MirrorCommitWritten(effect.id))

    async def _write(self, job: _Job, rank: int) -> None:
        async with self._slots:
            if job.has_failed:
                return
            try:
                remote = self._remote()
                if job.source is None:
                    prepared = in_thread(lambda: self._prepare(remote, job.id))
                    job.source = asyncio.create_task(prepared)
                manifest, layouts, listed = await job.source
                written_bytes = await in_thread(
                    lambda: self._copy(remote, manifest, rank, layouts, listed)
                )
            except Exception as error:
                newer = await self._newer_attempt(error)
                if not job.has_failed:
                    job.has_failed = True
                    reason = str(error) or repr(error)
                    self._submit(inputs.MirrorPartsFailed(job.id, job.round, reason, newer))
            else:
                self._submit(inputs.MirrorPartWritten(job.id, job.round, rank, written_bytes))

    def _remote(self) -> RemoteTarget:
        if self._run.remote is None:
            raise StorageError(
                f"copy from {self._run.path} to its remote tier: this host's agent knows of none; "
                "give all processes of the job the same remote="
            )
        return self._run.remote

    # On the threads.

    def _prepare(
        self, remote: RemoteTarget, checkpoint: CheckpointId
    ) -> tuple[Manifest, PartLayouts, Listing]:
        check_run(remote.store, remote.place, self._run.config.run_id, REMOTE_ADVICE)
        check_not_fenced(remote.store, checkpoint)
        (manifest,) = read_manifests(self._run.durable, [checkpoint])
        layouts = PartLayouts(manifest.checkpoint.arrays)
        return manifest, layouts, list_folder(remote.store, checkpoint)

    def _copy(
        self,
        remote: RemoteTarget,
        manifest: Manifest,
        rank: int,
        layouts: PartLayouts,
        listed: Listing,
    ) -> int:
        if rank >= len(manifest.parts):
            raise StorageError(
                f"copy {manifest.id}: it has {len(manifest.parts)} parts, and none of rank {rank}"
            )
        stores = (
            [self._ram.store, self._run.durable]
            if self._trainers.job.has_ram
            else [self._run.durable]
        )
        return copy_part_once(part_copies(manifest, rank, stores, layouts), remote.store, listed)

    def _put_manifest(self, remote: RemoteTarget, effect: effects.MirrorCommit) -> None:
        check_run(remote.store, remote.place, self._run.config.run_id, REMOTE_ADVICE)
        (manifest,) = read_manifests(self._run.durable, [effect.id])
        remote.checkpoints.commit_checkpoint(
            effect.id,
            lambda images: commit_copy(
                seal(manifest), remote.store, effect.id, effect.part_count, images.committing
            ),
        )

    async def _newer_attempt(self, error: Exception) -> AttemptId:
        """Return the attempt in the remote tier that fenced an operation; none if none did."""
        remote = self._run.remote
        if remote is None or not isinstance(error, FencedError):
            return NO_ATTEMPT
        try:
            return await in_thread(lambda: newest_attempt(remote.store))
        except HoldfastError:
            return NO_ATTEMPT
