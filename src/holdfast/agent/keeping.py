"""The keeper: makes checkpoints durable, commits them, and removes what is not to be kept.

All writing to the durable tier goes through its one thread, one thing after another. What fails is
told to the trainers and to the events, and does not stop what comes after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from holdfast.agent.deciding import Decider
from holdfast.agent.ledger import Entry
from holdfast.agent.protocol import Notice
from holdfast.agent.state import AgentState
from holdfast.engine.attempts import newest_attempt, read_attempts
from holdfast.engine.catalog import Listing, list_checkpoints
from holdfast.engine.commit import check_not_fenced, commit, read_part, remove
from holdfast.engine.copying import copy_part
from holdfast.engine.recover import recover
from holdfast.engine.retain import Branches, branches, to_drop
from holdfast.errors import CheckpointDamagedError, FencedError, HoldfastError, StorageError
from holdfast.format.check import check_manifest
from holdfast.format.names import CHECKPOINTS, CheckpointId, manifest_key
from holdfast.format.records import Manifest, decode_metrics, encode_metrics
from holdfast.format.sealed import unseal
from holdfast.policy.contexts import CheckpointInfo, PreservationContext
from holdfast.policy.preservation_policy import PreservationPolicy, kept

RETRY_SECS = 5.0

log = logging.getLogger(__name__)
T = TypeVar("T")


class Keeper:
    """Owned by the event loop; `_pool`'s thread does what blocks, on stores and values alone."""

    def __init__(self, state: AgentState, decider: Decider) -> None:
        self._state = state
        self._decider = decider
        self._pool = ThreadPoolExecutor(1, "holdfast-keep")
        self._task: asyncio.Task[None] | None = None
        self._retry_at = 0.0
        self._last_secs: float | None = None
        self._infos: dict[CheckpointId, CheckpointInfo] = {}
        self._judged: set[CheckpointId] = set()
        self._has_told_ram = False

    async def adopt(self) -> None:
        """Reads what an agent before this one left in RAM, and finishes what is nearly durable."""
        state = self._state
        await self.take_stock()
        try:
            state.events.attempt = await self._run(newest_attempt, state.durable)
        except StorageError as error:
            state.events.write("durable_unreadable", reason=str(error))
        in_care = [e.id for e in state.ledger if e.is_complete]
        if state.group is None:
            try:
                recovery = await self._run(recover, state.durable, in_care)
            except HoldfastError as error:
                state.events.write("recovery_failed", reason=str(error))
            else:
                for checkpoint in recovery.committed:
                    state.events.write("committed", checkpoint, by="recovery")
                for checkpoint in recovery.cleared:
                    state.events.write("cleared", checkpoint)
                for key in recovery.mended:
                    state.events.write("mended", key=key)

    async def take_stock(self) -> None:
        """Enters into the ledger what stands in RAM and is not in it, without having been told.

        Where no trainer is left, what cannot become whole is removed.
        """
        state = self._state
        try:
            in_ram = await self._run(list_checkpoints, state.ram)
        except StorageError as error:
            self._tell_ram(error)
            return
        try:
            on_disk = await self._run(list_checkpoints, state.durable)
        except StorageError as error:
            # Nothing is taken for durable then; making it so again does no harm.
            on_disk = {}
            state.events.write("durable_unreadable", reason=str(error))
        found = []
        for checkpoint, listing in in_ram.items():
            counts = set(listing.parts.values())
            if checkpoint in state.ledger.entries or len(counts) != 1:
                continue
            entry = state.ledger.entry(checkpoint, counts.pop(), state.clock.now())
            durable = on_disk.get(checkpoint, Listing())
            entry.ram, entry.durable = set(listing.parts), set(durable.parts)
            entry.is_committed = durable.is_committed
            entry.is_durable_due = entry.is_complete
            found.append(str(checkpoint))
        if found:
            state.events.write("adopted", checkpoints=found)
        if state.group is None:
            try:
                for checkpoint, listing in in_ram.items():
                    known = state.ledger.entries.get(checkpoint)
                    if known is None or not known.is_complete:
                        state.ledger.entries.pop(checkpoint, None)
                        await self._run(remove, state.ram, checkpoint, listing)
                # A trainer that died between filling a slot and naming it leaves it unfinished.
                await self._run(state.ram.discard_unfinished, CHECKPOINTS)
            except StorageError as error:
                self._tell_ram(error)

    @property
    def is_busy(self) -> bool:
        """Whether something is being made durable."""
        return self._task is not None and not self._task.done()

    def tick(self) -> None:
        """Starts what is to be done next."""
        if self.is_busy:
            return
        state = self._state
        now = state.clock.monotonic()
        if state.group is None and now >= self._retry_at:
            state.ledger.want_newest_durable()
            self._retry_at = now + RETRY_SECS
        entry = state.ledger.next_to_persist()
        if entry is not None:
            self._task = asyncio.create_task(self._make_durable(entry))

    async def drop_ram(self, entries: Sequence[Entry]) -> None:
        """Gives up the RAM of these checkpoints; what fails is told, and tried again later."""
        for entry in entries:
            try:
                listing = list_checkpoints(self._state.ram).get(entry.id, Listing())
                remove(self._state.ram, entry.id, listing)
            except StorageError as error:
                self._tell_ram(error)
                continue
            entry.ram.clear()
            if not entry.is_pending:
                self._state.ledger.entries.pop(entry.id, None)

    async def recycle(self) -> None:
        """Gives up the RAM that newer checkpoints and the RAM tier's policy leave free."""
        complete = sorted(
            (e for e in self._state.ledger if e.is_complete_in_ram), key=lambda e: e.id
        )
        policy = self._state.ram_policies.preserve
        preserved: set[CheckpointId] = set()
        if policy is not None:
            by_step = {e.id.step: e for e in complete}
            infos = [CheckpointInfo(e.id.step, e.time) for e in by_step.values()]
            context = PreservationContext(self._state.clock.now())
            flags = kept(policy, infos, context=context)
            preserved = {e.id for e, k in zip(by_step.values(), flags, strict=True) if k}
        await self.drop_ram(self._state.ledger.recyclable(preserved))

    async def delete(self, checkpoints: Sequence[CheckpointId], reason: str) -> None:
        """Removes checkpoints from every tier.

        Raises:
            StorageError: some are left; the call may be repeated.
        """
        for checkpoint in checkpoints:
            entry = self._state.ledger.entries.pop(checkpoint, None)
            try:
                await self._run(self._remove_everywhere, checkpoint)
            except StorageError:
                # What is left of it in RAM is given up with the next recycling.
                if entry is not None:
                    entry.is_durable_due = False
                    self._state.ledger.entries.setdefault(checkpoint, entry)
                raise
            if entry is not None and entry.is_pending:
                # Somebody may wait until it is durable.
                await self._state.notices.post(Notice(kind="deleted", id=_id(checkpoint)))
            self._infos.pop(checkpoint, None)
            if entry is not None or reason != "preservation":
                self._state.wake()
            self._state.events.write("deleted", checkpoint, reason=reason)

    async def parts_in_ram(self) -> dict[CheckpointId, set[int]]:
        """The ranks whose part stands in RAM, of each checkpoint; none where RAM fails."""
        try:
            listed = await self._run(list_checkpoints, self._state.ram)
        except StorageError as error:
            self._tell_ram(error)
            return {}
        return {checkpoint: set(listing.parts) for checkpoint, listing in listed.items()}

    async def is_committed(self, checkpoint: CheckpointId) -> bool:
        """Whether the durable tier has its manifest."""
        listed = await self._run(list_checkpoints, self._state.durable)
        return checkpoint in listed and listed[checkpoint].is_committed

    async def judged(self, keep: Sequence[CheckpointId]) -> None:
        """Drops what neither the user's own policy nor the built-in share keeps."""
        asked, self._judged = self._judged, set()
        found, by_agent = await self._run(self._decide_drops, self._state.durable_policies.preserve)
        drops = (asked & set(by_agent)) - set(keep) - set(found.timeline[-1:])
        await self.delete(sorted(drops), "preservation")

    def close(self) -> None:
        """Ends the thread, after what it is doing."""
        self._pool.shutdown()

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    async def _make_durable(self, entry: Entry) -> None:
        state = self._state
        started = state.clock.monotonic()
        state.durable_at_secs = None if self._last_secs is None else started + self._last_secs
        try:
            size = await self._run(
                self._persist, entry.id, entry.part_count, frozenset(entry.durable)
            )
        except Exception as error:
            # The top of a task: whatever it was, the trainers are told, and the next one is tried.
            log.warning("checkpoint %s is not durable", entry.id, exc_info=True)
            entry.failure = str(error) or repr(error)
            self._retry_at = state.clock.monotonic() + RETRY_SECS
            state.events.write("failed", entry.id, reason=entry.failure)
            failed = Notice(kind="failed", id=_id(entry.id), reason=entry.failure)
            await state.notices.post(failed)
            if isinstance(error, FencedError):
                # It stands on an abandoned branch: no later try can help it.
                await self.drop_ram([entry])
        else:
            entry.is_committed = True
            entry.durable = set(range(entry.part_count))
            self._last_secs = state.clock.monotonic() - started
            secs = round(self._last_secs, 4)
            state.events.write("committed", entry.id, bytes=size, secs=secs)
            info = self._infos[entry.id]
            data = _info_message(entry.id, info)
            await state.notices.post(Notice(kind="committed", id=_id(entry.id), data=data))
            await self._apply_preservation(entry.id)
        await self.recycle()
        if not entry.ram and not entry.is_pending:
            state.ledger.entries.pop(entry.id, None)
        # The task is done once this returns; the next one is due then.
        asyncio.get_running_loop().call_soon(state.wake)

    def _persist(self, checkpoint: CheckpointId, part_count: int, durable: frozenset[int]) -> int:
        """Copies what is not durable yet, then commits; returns the bytes of all images."""
        state = self._state
        check_not_fenced(state.durable, checkpoint)
        first = read_part(state.durable if 0 in durable else state.ram, checkpoint, 0, part_count)
        if first.checkpoint is None:
            raise CheckpointDamagedError(f"commit {checkpoint}: rank 0's part says nothing of it")
        for rank in range(part_count):
            if rank not in durable:
                part = read_part(state.ram, checkpoint, rank, part_count)
                copy_part(state.ram, state.durable, part, first.checkpoint)
        # A newer attempt may have begun while the bytes were written.
        check_not_fenced(state.durable, checkpoint)
        manifest = commit(state.durable, checkpoint, part_count)
        self._infos[checkpoint] = _info(manifest)
        return sum(part.image_size_bytes for part in manifest.parts)

    async def _apply_preservation(self, newest: CheckpointId) -> None:
        policies = self._state.durable_policies
        pending = frozenset(e.id for e in self._state.ledger if e.is_pending)
        try:
            for checkpoint in await self._run(self._clear_leftovers, newest, pending):
                self._state.events.write("cleared", checkpoint)
            if policies.preserve is None and not policies.user_preserves:
                return
            found, drops = await self._run(self._decide_drops, policies.preserve)
            if not policies.user_preserves:
                await self.delete(drops, "preservation")
            elif drops:
                self._judged = set(drops)
                infos = [_info_message(c, self._infos[c]) for c in found.timeline]
                await self._state.notices.post(Notice(kind="judge", data=infos))
        except HoldfastError as error:
            self._state.events.write("preservation_failed", reason=str(error))
            await self._state.notices.post(Notice(kind="warning", reason=str(error)))

    def _clear_leftovers(
        self, newest: CheckpointId, pending: frozenset[CheckpointId]
    ) -> list[CheckpointId]:
        """Removes what failed saves and deletes left of checkpoints before `newest`, a commit.

        Every rank has sealed `newest`, so none writes to an earlier one of the attempt any more.
        What an earlier attempt completed beyond it is left to the next agent, which may finish it.
        """
        cleared = []
        for checkpoint, listing in list_checkpoints(self._state.durable).items():
            is_left = checkpoint.attempt <= newest.attempt and checkpoint.step < newest.step
            if checkpoint.attempt < newest.attempt:
                is_left |= not listing.is_complete
            if is_left and not listing.is_committed and checkpoint not in pending:
                remove(self._state.durable, checkpoint, listing)
                cleared.append(checkpoint)
        return cleared

    def _decide_drops(
        self, policy: PreservationPolicy | None
    ) -> tuple[Branches, list[CheckpointId]]:
        """What the built-in share does not keep; without one that is all but the newest."""
        listed = list_checkpoints(self._state.durable)
        committed = [c for c, listing in listed.items() if listing.is_committed]
        found = branches(committed, read_attempts(self._state.durable))
        if policy is None:
            return found, [c for c in committed if c not in found.timeline[-1:]]
        for checkpoint in committed:
            if checkpoint not in self._infos:
                self._infos[checkpoint] = self._read_info(checkpoint)
        return found, to_drop(found, policy, self._infos.__getitem__, self._state.clock.now())

    def _read_info(self, checkpoint: CheckpointId) -> CheckpointInfo:
        key = manifest_key(checkpoint)
        manifest = unseal(self._state.durable.get(key), Manifest, key)
        check_manifest(manifest, key)
        return _info(manifest)

    def _tell_ram(self, error: StorageError) -> None:
        """Says once that the RAM tier fails what the agent does to it."""
        if not self._has_told_ram:
            self._has_told_ram = True
            self._state.events.write("ram_unavailable", reason=str(error))

    def _remove_everywhere(self, checkpoint: CheckpointId) -> None:
        for store in reversed(self._state.stores):
            listing = list_checkpoints(store).get(checkpoint)
            if listing is not None:
                remove(store, checkpoint, listing)


def _info(manifest: Manifest) -> CheckpointInfo:
    spec = manifest.checkpoint
    return CheckpointInfo(manifest.step, spec.time, decode_metrics(spec.metrics))


def _id(checkpoint: CheckpointId) -> tuple[int, int]:
    return checkpoint.step, checkpoint.attempt


def _info_message(checkpoint: CheckpointId, info: CheckpointInfo) -> dict[str, Any]:
    metrics = encode_metrics(dict(info.metrics)) if info.metrics is not None else None
    return {"id": _id(checkpoint), "time": info.time, "metrics": metrics}
