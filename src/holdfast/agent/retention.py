"""The keeper: which durable checkpoints stay, what is deleted, and what an opening finishes.

All that it removes goes through the one writing thread. What is decided on is removed in the same
call: nothing is decided on twice, and however long the writes between two calls take, each commit
finds removed what those before it left. What fails is told to the trainers and to the events, and
does not stop what comes after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.agent.coordinator import Coordinator
from holdfast.agent.protocol import Notice
from holdfast.agent.state import AgentState, Policies
from holdfast.agent.storage_worker import StorageWorker
from holdfast.coordination import effects, inputs
from holdfast.coordination.checkpoint_table import DELETED
from holdfast.coordination.messages import CheckpointStatus
from holdfast.engine.lifecycle.attempts import newest_attempt, read_attempts
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.commit import remove
from holdfast.engine.lifecycle.identity import place_of
from holdfast.engine.lifecycle.recovery import recover
from holdfast.engine.lifecycle.retention import Branches, branches, to_drop
from holdfast.errors import FencedError, HoldfastError, StorageError, WaitTimeoutError
from holdfast.format.check import check_manifest
from holdfast.format.names import CHECKPOINTS, CheckpointId, manifest_key
from holdfast.format.records import Manifest, decode_metrics, encode_metrics
from holdfast.format.sealed import unseal
from holdfast.format.timeline import last_steps
from holdfast.policy.contexts import CheckpointInfo
from holdfast.policy.preservation_policy import PreservationPolicy

NOTICE_OF = {
    CheckpointStatus.PROTECTED: "protected",
    CheckpointStatus.COMMITTED: "committed",
    CheckpointStatus.FAILED: "failed",
    CheckpointStatus.DROPPED: "dropped",
}

_NEVER = (0, -1)
"""The age of a checkpoint that is older than any."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tidied:
    """What one look at the durable tier has come to, as far as it got.

    `drops` are left to the user's own policy, which judges `timeline`.
    """

    cleared: list[CheckpointId] = field(default_factory=list)
    removed: list[CheckpointId] = field(default_factory=list)
    drops: list[CheckpointId] = field(default_factory=list)
    timeline: tuple[CheckpointId, ...] = ()


class Retention:
    """Owned by the event loop."""

    def __init__(
        self, state: AgentState, storage_worker: StorageWorker, coordinator: Coordinator
    ) -> None:
        self._state = state
        self._storage_worker = storage_worker
        self._coordinator = coordinator
        self._infos: dict[CheckpointId, CheckpointInfo] = {}
        self._judged: set[CheckpointId] = set()
        self._unsecured: tuple[int, int] | None = _NEVER
        """The age of the newest one that was dropped; None where a newer one is protected."""
        self._unjudged: list[CheckpointId] = []
        """The commits after which the user's own policy has not answered yet."""
        self._preserving: set[asyncio.Task[None]] = set()
        self._awaited: dict[CheckpointId, asyncio.Event] = {}
        """Set once no host holds what somebody here deletes and waits for."""

    async def recover(self) -> None:
        """Finishes what an interrupted run left nearly durable, and clears what never can be.

        To be called while no process works on the run, on any host.
        """
        whole = [c for c, listed in self._storage_worker.in_ram().items() if listed.is_whole]
        await self._recover(whole, None)

    def recover_earlier(self, attempt: int) -> None:
        """The same for what earlier attempts left, where this host leads one that has begun.

        What any host of the attempt holds is not touched, and becomes durable as ever.
        """
        held = self._coordinator.node.held_ids()
        self._begin(self._recover(held, attempt))

    async def _recover(self, held: Collection[CheckpointId], attempt: int | None) -> None:
        state = self._state
        try:
            limits = last_steps(await self._storage_worker.query(read_attempts, state.durable))
            in_care = [c for c in held if c.step <= limits.get(c.attempt, -1)]
            place = await self._storage_worker.query(place_of, state.durable.directory)
            recovery = await self._storage_worker.write(
                recover, state.durable, in_care, attempt, place
            )
        except HoldfastError as error:
            state.events.write("recovery_failed", reason=str(error))
        else:
            for checkpoint in recovery.committed:
                state.events.write("committed", checkpoint, by="recovery")
            for checkpoint in recovery.cleared:
                state.events.write("cleared", checkpoint)
            for key in recovery.mended:
                state.events.write("mended", key=key)

    def clear_ram(self, *, is_alone: bool) -> None:
        """Removes from RAM what trainers that are gone left half made.

        A part of several may be what other hosts wait for, unless this one `is_alone`.
        """
        ram = self._state.ram
        try:
            for checkpoint, listing in list_checkpoints(ram).items():
                if not (listing.is_complete if is_alone else listing.parts):
                    remove(ram, checkpoint, listing)
            # A trainer that died between filling a slot and naming it leaves it unfinished.
            ram.discard_unfinished(CHECKPOINTS)
        except StorageError as error:
            self._storage_worker.report_ram(error)

    async def find_attempt(self) -> None:
        """Learns in which attempt's story the agent's events belong."""
        state = self._state
        try:
            state.events.attempt = await self._storage_worker.query(newest_attempt, state.durable)
        except StorageError as error:
            state.events.write("durable_unreadable", reason=str(error))

    def committed(self, manifest: Manifest, secs: float) -> None:
        """A manifest was written here: tells it, and removes what the policies do not keep."""
        checkpoint = CheckpointId(manifest.step, manifest.attempt)
        self._infos[checkpoint] = _info(manifest)
        size_bytes = sum(part.image_size_bytes for part in manifest.parts)
        self._state.events.write("committed", checkpoint, bytes=size_bytes, secs=round(secs, 4))
        self._begin(self._preserve_after(checkpoint))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._preserving.add(task)
        task.add_done_callback(self._preserving.discard)

    @property
    def is_busy(self) -> bool:
        """Whether it is removing something."""
        return bool(self._preserving)

    async def wait_idle(self) -> None:
        """Waits until it is done."""
        if self._preserving:
            await asyncio.wait(self._preserving)

    def on_outcome(self, effect: effects.ReportOutcome) -> None:
        """Notify the trainers here that a checkpoint is protected, or how its save ended.

        That a durable one is protected concerns them only after a drop, which it makes good: each
        notice costs every trainer a call. An agent that was started anew does not know of earlier
        drops.
        """
        kind = NOTICE_OF[effect.status]
        if effect.status is CheckpointStatus.PROTECTED:
            makes_good = self._unsecured is not None and _age(effect.id) > self._unsecured
            if makes_good:
                self._unsecured = None
            elif effect.is_due:
                return
        elif effect.status is CheckpointStatus.DROPPED:
            if effect.reason == DELETED:
                kind = "deleted"
            elif effect.id.attempt < self._coordinator.node.attempt:
                kind = "left behind"
            else:
                self._unsecured = max(_age(effect.id), self._unsecured or _NEVER)
        info = self._infos.get(effect.id)
        is_known = effect.status is CheckpointStatus.COMMITTED and info is not None
        self._state.notices.post(
            Notice(
                kind=kind,
                id=_id(effect.id),
                reason=effect.reason,
                data=_info_message(effect.id, info) if is_known and info is not None else None,
            )
        )

    async def delete_everywhere(self, checkpoint: CheckpointId) -> None:
        """Removes a checkpoint from both tiers, and waits until no other host holds any of it.

        Raises:
            FencedError: an attempt that is not known here has begun; nothing is removed.
            StorageError: some of it is left; the call may be repeated.
            WaitTimeoutError: the hosts have not said in time that they gave it up; those that it
                is told later do so then.
        """
        coordinator = self._coordinator
        gone = self._awaited.setdefault(checkpoint, asyncio.Event())
        secs = coordinator.settings.deleting_secs
        try:
            await self._storage_worker.write(self._remove_everywhere, checkpoint)
            self._tell_removed([checkpoint], "asked")
            async with asyncio.timeout(secs):
                await gone.wait()
        except TimeoutError as error:
            successors = coordinator.node.successors
            leader = successors[0] if successors else self._state.config.host
            raise WaitTimeoutError(
                f"delete {checkpoint}: it is removed from the durable tier and from the memory of "
                f"host {self._state.config.host}, and the agent on host {leader}, which leads, "
                f"has not said within {secs:.0f} s that no other host holds it; see whether that "
                "agent lives. It is told as soon as it does; delete it again to wait for that"
            ) from error
        finally:
            if self._awaited.get(checkpoint) is gone:
                del self._awaited[checkpoint]
        # What another host was writing meanwhile has arrived.
        await self._storage_worker.write(self._remove_everywhere, checkpoint)

    def on_gone(self, checkpoint: CheckpointId) -> None:
        """No host holds anything of what was deleted here."""
        if checkpoint in self._awaited:
            self._awaited[checkpoint].set()

    async def is_committed(self, checkpoint: CheckpointId) -> bool:
        """Whether the durable tier has its manifest."""
        listed = await self._storage_worker.query(list_checkpoints, self._state.durable)
        return checkpoint in listed and listed[checkpoint].is_committed

    async def judged(self, keep: Sequence[CheckpointId]) -> None:
        """Drops what neither the user's own policy nor the built-in share keeps."""
        asked, self._judged = self._judged, set()
        unjudged, self._unjudged = self._unjudged, []
        try:
            await self._tidy(lambda tidied: self._remove_judged(tidied, asked - set(keep)))
        finally:
            for checkpoint in unjudged:
                self._tell_preserved(checkpoint)

    async def _preserve_after(self, newest: CheckpointId) -> None:
        """Apply preservation after a commit; trainers may wait for the notice, so it always comes.

        Where a user's own policy has to judge first, it comes with the answer.
        """
        try:
            await self._apply_preservation(newest)
        finally:
            if newest not in self._unjudged:
                self._tell_preserved(newest)

    def _tell_preserved(self, newest: CheckpointId) -> None:
        self._state.notices.post(Notice(kind="preserved", id=_id(newest)))

    async def _apply_preservation(self, newest: CheckpointId) -> None:
        pending = frozenset(self._coordinator.node.pending_ids())
        policies = self._state.durable_policies
        try:
            tidied = await self._tidy(
                lambda tidied: self._remove_unkept(tidied, newest, pending, policies)
            )
        except HoldfastError as error:
            self._state.events.write("preservation_failed", reason=str(error))
            self._state.notices.post(Notice(kind="warning", reason=str(error)))
            return
        if tidied.drops:
            self._judged = set(tidied.drops)
            self._unjudged.append(newest)
            infos = [_info_message(c, self._infos[c]) for c in tidied.timeline]
            self._state.notices.post(Notice(kind="judge", data=infos))

    async def _tidy(self, work: Callable[[_Tidied], None]) -> _Tidied:
        """Runs it on the writing thread; what it removed is told, also where it fails then."""
        tidied = _Tidied()
        try:
            await self._storage_worker.write(work, tidied)
        finally:
            for checkpoint in tidied.cleared:
                self._state.events.write("cleared", checkpoint)
            self._tell_removed(tidied.removed, "preservation")
        return tidied

    def _tell_removed(self, checkpoints: Iterable[CheckpointId], reason: str) -> None:
        """Also to the other hosts: they may hold it, and somebody may wait until it is durable."""
        for checkpoint in checkpoints:
            self._infos.pop(checkpoint, None)
            self._coordinator.submit(inputs.Deleted(checkpoint))
            self._state.events.write("deleted", checkpoint, reason=reason)

    # On the writing thread.

    def _remove_unkept(
        self,
        tidied: _Tidied,
        newest: CheckpointId,
        pending: frozenset[CheckpointId],
        policies: Policies,
    ) -> None:
        """Removes leftovers, and what the built-in share does not keep, unless users judge it."""
        self._clear_leftovers(tidied.cleared, newest, pending)
        if policies.preserve is None and not policies.user_preserves:
            return
        found, drops = self._decide_drops(policies.preserve)
        if policies.user_preserves:
            tidied.drops, tidied.timeline = drops, found.timeline
            return
        self._remove_all(drops, tidied.removed)

    def _remove_judged(self, tidied: _Tidied, judged: Collection[CheckpointId]) -> None:
        """Removes what the user's own policy does not keep, if the built-in share still does not.

        The newest one stays whatever they say.
        """
        found, by_agent = self._decide_drops(self._state.durable_policies.preserve)
        drops = set(judged).intersection(by_agent) - set(found.timeline[-1:])
        self._remove_all(sorted(drops), tidied.removed)

    def _remove_all(self, drops: Iterable[CheckpointId], removed: list[CheckpointId]) -> None:
        for checkpoint in drops:
            self._remove_everywhere(checkpoint)
            removed.append(checkpoint)

    def _clear_leftovers(
        self, cleared: list[CheckpointId], newest: CheckpointId, pending: frozenset[CheckpointId]
    ) -> None:
        """Removes what failed saves and deletes left of checkpoints up to `newest`, a commit.

        Every rank has sealed `newest`, so none writes to an earlier one of the attempt any more,
        and what an earlier attempt left of the same step is never restored.
        What an earlier attempt completed beyond it on the timeline is left to the next agent, which
        may finish it.
        """
        limits = last_steps(read_attempts(self._state.durable))
        for checkpoint, listing in list_checkpoints(self._state.durable).items():
            is_left = checkpoint.attempt <= newest.attempt and checkpoint.step <= newest.step
            if checkpoint.attempt < newest.attempt:
                is_abandoned = checkpoint.step > limits.get(checkpoint.attempt, -1)
                is_left |= is_abandoned or not listing.is_complete
            if is_left and not listing.is_committed and checkpoint not in pending:
                remove(self._state.durable, checkpoint, listing)
                cleared.append(checkpoint)

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

    def _remove_everywhere(self, checkpoint: CheckpointId) -> None:
        known, newest = self._coordinator.node.attempt, newest_attempt(self._state.durable)
        if newest > known:
            raise FencedError(
                f"delete {checkpoint}: attempt {newest} has taken the run over from attempt "
                f"{known}, and may go on from it; stop this process"
            )
        with self._storage_worker.alone_with(checkpoint):
            for store in (self._state.durable, self._state.ram):
                listing = list_checkpoints(store).get(checkpoint)
                if listing is not None:
                    remove(store, checkpoint, listing)


def _age(checkpoint: CheckpointId) -> tuple[int, int]:
    """An order of when checkpoints were taken: by attempt, then step."""
    return checkpoint.attempt, checkpoint.step


def _info(manifest: Manifest) -> CheckpointInfo:
    spec = manifest.checkpoint
    return CheckpointInfo(manifest.step, spec.time, decode_metrics(spec.metrics))


def _id(checkpoint: CheckpointId) -> tuple[int, int]:
    return checkpoint.step, checkpoint.attempt


def _info_message(checkpoint: CheckpointId, info: CheckpointInfo) -> dict[str, Any]:
    metrics = encode_metrics(dict(info.metrics)) if info.metrics is not None else None
    return {"id": _id(checkpoint), "time": info.time, "metrics": metrics}
