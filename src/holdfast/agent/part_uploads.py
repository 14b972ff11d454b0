"""Upload this host's parts of a checkpoint to the remote tier, as the agent that leads asks.

The request is idempotent and repeated: each answer is the state of the upload by then. Another
checkpoint, or another round of the same one, replaces what is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec

from holdfast.agent.daemon_threads import begin_call
from holdfast.agent.state import AgentState
from holdfast.coordination.messages import check_id, check_runs
from holdfast.coordination.rank_runs import Runs, ranks_in
from holdfast.engine.lifecycle.catalog import Listing, list_folder
from holdfast.engine.lifecycle.manifests import read_manifests
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.tiers.checkpoint_copy import copy_part_once, part_copies
from holdfast.errors import HoldfastError, InvalidArgumentError, StorageError
from holdfast.format.json_codec import decode
from holdfast.format.names import PART_COUNT_MAX, CheckpointId
from holdfast.format.records import Manifest
from holdfast.store.durable import DurableStore

PARTS_AT_ONCE = 2
"""How many parts an agent uploads at a time; each takes a few requests' worth of memory."""
PLACE_CHARS_MAX = 8192

T = TypeVar("T")


class UploadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one checkpoint that a host is to upload.

    Attributes:
        place: the remote tier.
        round: the number of the leader's try; a new one repeats failed parts.
    """

    place: Annotated[str, msgspec.Meta(max_length=PLACE_CHARS_MAX)]
    id: CheckpointId
    round: Annotated[int, msgspec.Meta(ge=0)]
    ranks: Runs


class UploadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far an order was carried out; `problem` is why one of its parts failed."""

    done: tuple[int, ...]
    written_bytes: int
    problem: str


def decode_order(data: bytes) -> UploadOrder:
    """Return the order in `data`, which another host sent.

    Raises:
        InvalidArgumentError: it is no order of this version.
    """
    try:
        order = decode(data, UploadOrder)
        check_id(order.id)
        check_runs(order.ranks, PART_COUNT_MAX)
        return order
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise InvalidArgumentError(f"an order to upload cannot be decoded: {error}") from error


@dataclass(slots=True)
class _Job:
    """One checkpoint whose parts are uploaded here."""

    order: UploadOrder
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    source: asyncio.Task[tuple[Manifest, PartLayouts, Listing]] | None = None
    done: set[int] = field(default_factory=set)
    written_bytes: int = 0
    error: HoldfastError | None = None

    def is_of(self, order: UploadOrder) -> bool:
        return msgspec.structs.replace(order, ranks=()) == msgspec.structs.replace(
            self.order, ranks=()
        )


class PartUploads:
    """The parts that one agent uploads; owned by the event loop."""

    def __init__(self, state: AgentState) -> None:
        self._state = state
        self._slots = asyncio.Semaphore(PARTS_AT_ONCE)
        self._job: _Job | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a part is being uploaded."""
        return self._job is not None and any(not t.done() for t in self._job.tasks.values())

    def start_upload(self, order: UploadOrder) -> UploadReport:
        """Begin the parts of an order that were not begun yet, and return how far all are.

        Raises:
            InvalidArgumentError: this agent's run has another remote tier.
        """
        job = self._job_of(order)
        return UploadReport(
            done=tuple(sorted(job.done)),
            written_bytes=job.written_bytes,
            problem=str(job.error) if job.error is not None else "",
        )

    async def finish(self, order: UploadOrder) -> int:
        """Upload the parts of an order; return the bytes that were written by then.

        Raises:
            HoldfastError: one of them failed.
        """
        job = self._job_of(order)
        await asyncio.gather(*(job.tasks[rank] for rank in ranks_in(order.ranks)))
        if job.error is not None:
            raise job.error
        return job.written_bytes

    def cancel(self) -> None:
        """Forget the parts that are under way; their threads end with their present request."""
        job, self._job = self._job, None
        for task in job.tasks.values() if job is not None else ():
            task.cancel()

    def _job_of(self, order: UploadOrder) -> _Job:
        remote = self._state.remote
        if remote is None or remote.place != order.place:
            raise InvalidArgumentError(
                f"upload to {order.place}: expected the remote tier of this agent's run, "
                f"{remote.place if remote is not None else 'none'}"
            )
        job = self._job
        if job is None or not job.is_of(order):
            self.cancel()
            job = self._job = _Job(order)
        for rank in ranks_in(order.ranks):
            if rank not in job.tasks:
                job.tasks[rank] = asyncio.create_task(self._upload(job, remote.store, rank))
        return job

    async def _upload(self, job: _Job, remote: DurableStore, rank: int) -> None:
        state = self._state
        async with self._slots:
            if job.error is not None:
                return
            try:
                if job.source is None:
                    job.source = asyncio.create_task(in_thread(lambda: self._prepare(job, remote)))
                manifest, layouts, listed = await job.source

                def copy() -> int:
                    stores = [state.ram, state.durable] if state.has_ram else [state.durable]
                    copies = part_copies(manifest, rank, stores, layouts)
                    return copy_part_once(copies, remote, listed)

                job.written_bytes += await in_thread(copy)
                job.done.add(rank)
            except HoldfastError as error:
                job.error = job.error or error

    def _prepare(self, job: _Job, remote: DurableStore) -> tuple[Manifest, PartLayouts, Listing]:
        checkpoint = job.order.id
        (manifest,) = read_manifests(self._state.durable, [checkpoint])
        count, ranks = len(manifest.parts), ranks_in(job.order.ranks)
        if any(rank >= count for rank in ranks):
            raise StorageError(f"upload {checkpoint}: it has {count} parts, not {max(ranks) + 1}")
        return manifest, PartLayouts(manifest.checkpoint.arrays), list_folder(remote, checkpoint)


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call that may take long on a thread that does not delay the end of the process."""
    return await asyncio.wrap_future(begin_call(call))
