"""Apply retention: which durable checkpoints stay, which are deleted, and what an opening finishes.

Invariants:
- Everything is removed on the one writing thread.
- Images are removed by the host that leads, which commits too: the two exclude each other. Another
  host that deletes a checkpoint leaves its images to the leader's next commit.
- A decision and its removals are one call on that thread: nothing is decided twice, and however
  long the writes between two calls take, each commit finds everything removed that earlier ones
  dropped.
- A failure is reported to the trainers and the events, and does not stop later work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.coordination import effects, inputs
from holdfast.coordination.messages import DELETED, CheckpointStatus
from holdfast.engine.lifecycle.attempts import (
    attempt_numbers,
    mend_attempts,
    newest_number,
    read_attempts,
)
from holdfast.engine.lifecycle.catalog import (
    Listing,
    info_of,
    list_checkpoints,
    list_folder,
    read_manifests,
)
from holdfast.engine.lifecycle.commit import remove
from holdfast.engine.lifecycle.newest import list_newest
from holdfast.engine.lifecycle.recovery import recover
from holdfast.engine.lifecycle.references import image_keys_in, remove_durable
from holdfast.engine.lifecycle.retention import Branches, branches, to_drop
from holdfast.engine.lifecycle.run import mend_run
from holdfast.errors import (
    FencedError,
    HoldfastError,
    RunBusyError,
    StorageError,
    WaitTimeoutError,
)
from holdfast.format.names import (
    CHECKPOINTS,
    NO_AGE,
    NO_ATTEMPT,
    Age,
    AttemptId,
    CheckpointId,
    age_of,
)
from holdfast.format.records import AttemptRecord, Manifest, encode_metrics
from holdfast.format.timeline import last_steps
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.attached_trainers import AttachedTrainers, Policies
from holdfast.host.driver.driver import Driver
from holdfast.host.tiers.ram_tier import RamTier
from holdfast.host.tiers.storage_worker import StorageWorker
from holdfast.host.wire.protocol import Notice
from holdfast.observe.events.schema import (
    CheckpointCleared,
    CheckpointCommitted,
    CheckpointDeleted,
    DurableUnreadable,
    PreservationFailed,
    RecordMended,
    RecoveryFailed,
)
from holdfast.policy.contexts import CheckpointInfo
from holdfast.policy.preservation_policy import PreservationPolicy

NOTICE_OF = {
    CheckpointStatus.PROTECTED: "protected",
    CheckpointStatus.COMMITTED: "committed",
    CheckpointStatus.FAILED: "failed",
    CheckpointStatus.DROPPED: "dropped",
}

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tidied:
    """The results of one pass over the durable tier, as far as it got.

    `drops` are left to the user's own policy, which judges `timeline`.
    """

    cleared: list[CheckpointId] = field(default_factory=list)
    removed: list[CheckpointId] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    drops: list[CheckpointId] = field(default_factory=list)
    timeline: tuple[CheckpointId, ...] = ()


class Retention:
    """The retention of one agent; owned by the event loop."""

    def __init__(
        self,
        run: AgentRun,
        ram: RamTier,
        trainers: AttachedTrainers,
        driver: Driver,
        storage_worker: StorageWorker,
    ) -> None:
        self._run = run
        self._ram = ram
        self._trainers = trainers
        self._driver = driver
        self._storage_worker = storage_worker
        self._infos: dict[CheckpointId, CheckpointInfo] = {}
        self._unsecured: Age | None = NO_AGE
        """The age of the newest dropped checkpoint; None if a newer one is protected."""
        self._unpreserved: set[CheckpointId] = set()
        """The commits after which preservation has not ended yet."""
        self._asked: dict[CheckpointId, set[CheckpointId]] = {}
        """For each commit that the user's own policy still has to judge: what may be removed."""
        self._preserving: set[asyncio.Task[None]] = set()
        self._swept_attempt = NO_ATTEMPT
        """The attempt whose first commit was followed by a check of all records."""
        self.has_recovered = False
        """Whether what earlier attempts left was recovered before a trainer attached."""
        self._awaited: dict[CheckpointId, asyncio.Event] = {}
        """For each deletion that is waited for: set once no host holds the checkpoint."""
        self._spared: frozenset[CheckpointId] = frozenset()

    async def recover(self) -> None:
        """Commit what an interrupted run left whole and durable; clear what never can be restored.

        Call it only while no process of this folder works on the run. If the newest attempt began
        elsewhere and may be live, nothing is touched: the next attempt recovers it.
        """
        whole = [c for c, listed in self._ram.checkpoints().items() if listed.is_whole]
        await self._recover(whole, None)

    def recover_earlier(self, attempt: AttemptId) -> None:
        """Recover what attempts before `attempt` left; called where this host leads that attempt.

        Checkpoints that any host of the attempt holds are not touched, and become durable as usual.
        """
        held = {c.id for c in self._driver.view.lead.checkpoints if c.is_held}
        self._begin(self._recover(held, attempt))

    async def _recover(self, held: Collection[CheckpointId], attempt: AttemptId | None) -> None:
        worker = self._storage_worker
        try:
            if attempt is None:
                listing = await worker.threads.query(
                    lambda: worker.list_for_opening(is_for_start=True)
                )
                self._run.events.attempt = listing.newest_number
                newest = listing.newest_attempt
                if newest and not (listing.is_over or worker.has_begun(newest)):
                    return
                self.has_recovered = True
            else:
                shared = worker.opening.of_attempt(attempt)
                if shared is not None and not shared.uncommitted:
                    return
                # An earlier attempt may have committed some of it since it was listed.
                listing = await worker.threads.query(
                    list_newest, self._run.durable, worker.known_attempts
                )
            limits = last_steps(listing.attempts)
            in_care = [c for c in held if c.step <= limits.get(c.attempt, -1)]
            recovery = await worker.threads.write(
                recover,
                self._run.durable,
                in_care,
                attempt,
                worker.reused_images,
                listing,
            )
            if recovery.committed or recovery.cleared or recovery.mended:
                worker.opening.forget_listing()
        except HoldfastError as error:
            worker.opening.forget_listing()
            self._run.events.write(RecoveryFailed(reason=str(error)))
        else:
            for checkpoint in recovery.committed:
                self._run.events.write(
                    CheckpointCommitted(
                        step=checkpoint.step, attempt=checkpoint.attempt.number, by="recovery"
                    )
                )
            self._report_cleared(recovery.cleared)
            self._report_mended(recovery.mended)

    def clear_ram(self, *, is_alone: bool) -> None:
        """Remove incomplete checkpoints of trainers that are gone from RAM.

        Unless this host `is_alone`, a checkpoint with any part stays: other hosts may wait for it.
        """
        ram = self._ram.store
        try:
            for checkpoint, listing in list_checkpoints(ram).items():
                if not (listing.is_complete if is_alone else listing.parts):
                    remove(ram, checkpoint, listing)
            # A trainer that died between filling a slot and naming it leaves it unfinished.
            ram.discard_unfinished(CHECKPOINTS)
        except StorageError as error:
            self._ram.report(error)

    async def find_attempt(self) -> None:
        """Read the newest attempt, in whose file the agent's events belong."""
        try:
            self._run.events.attempt = await self._storage_worker.threads.query(
                newest_number, self._run.durable
            )
        except StorageError as error:
            self._run.events.write(DurableUnreadable(reason=str(error)))

    def committed(self, manifest: Manifest, secs: float | None) -> None:
        """Report a manifest that was written here, and remove what the policies do not keep.

        `secs`: how long writing took; None if no part was written here.
        """
        checkpoint = manifest.id
        self._remember(manifest)
        size_bytes = sum(part.image_size_bytes for part in manifest.parts)
        self._run.events.write(
            CheckpointCommitted(
                step=checkpoint.step,
                attempt=checkpoint.attempt.number,
                bytes=size_bytes,
                secs=secs if secs is None else round(secs, 4),
            )
        )
        self._unpreserved.add(checkpoint)
        self._begin(self._preserve_after(checkpoint))

    def spare(self, checkpoints: frozenset[CheckpointId]) -> None:
        """Spare these checkpoints from preservation; apply it to those that were spared before."""
        is_released = bool(self._spared - checkpoints)
        self._spared = checkpoints
        newest = max(self._infos, key=age_of, default=None)
        if is_released and newest is not None and self._driver.view.is_leading:
            self._begin(self._apply_preservation(newest))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._preserving.add(task)
        task.add_done_callback(self._preserving.discard)

    @property
    def is_busy(self) -> bool:
        """Whether a removal is under way."""
        return bool(self._preserving)

    async def wait_idle(self) -> None:
        """Wait for the removals that are under way."""
        if self._preserving:
            await asyncio.wait(self._preserving)

    def on_outcome(self, effect: effects.ReportOutcome) -> None:
        """Notify the trainers here that a checkpoint is protected, or how its save ended.

        The protection of a durable checkpoint matters to them only after a drop, which it makes
        good: each notice costs every trainer a call. A restarted agent does not know of earlier
        drops.
        """
        kind = NOTICE_OF[effect.status]
        if effect.status is CheckpointStatus.PROTECTED:
            makes_good = self._unsecured is not None and effect.id.age > self._unsecured
            if makes_good:
                self._unsecured = None
            elif effect.is_due:
                return
        elif effect.status is CheckpointStatus.DROPPED:
            if effect.reason == DELETED:
                kind = "deleted"
            elif effect.id.attempt != self._driver.attempt:
                kind = "left behind"
            else:
                self._unsecured = max(effect.id.age, self._unsecured or NO_AGE)
        info = self._infos.get(effect.id)
        is_known = effect.status is CheckpointStatus.COMMITTED and info is not None
        self._trainers.notices.post(
            Notice(
                kind=kind,
                id=effect.id,
                reason=effect.reason,
                data=_info_message(effect.id, info) if is_known and info is not None else None,
            )
        )
        if is_known and effect.id not in self._unpreserved:
            # Trainers that attached since its commit are notified of it again, and would wait.
            self._notify_preserved(effect.id)

    async def delete_everywhere(self, checkpoint: CheckpointId) -> None:
        """Remove a checkpoint from both tiers, and wait until no other host holds any of it.

        Raises:
            FencedError: an attempt that is unknown here has begun; nothing is removed.
            StorageError: some of it is left; the call may be repeated.
            WaitTimeoutError: the hosts have not confirmed in time that they released it; hosts that
                receive the order later release it then.
        """
        # Registered before the removal is submitted: the confirmation may follow at once.
        confirmed = self._awaited.setdefault(checkpoint, asyncio.Event())
        secs = self._driver.settings.deleting_secs
        try:
            await self._storage_worker.threads.write(self._remove_everywhere, checkpoint)
            self._report_removed([checkpoint], "asked")
            async with asyncio.timeout(secs):
                await confirmed.wait()
        except TimeoutError as error:
            successors = self._driver.view.successors
            leader = successors[0] if successors else self._run.config.host
            raise WaitTimeoutError(
                f"delete {checkpoint}: it is removed from the durable tier and from the memory of "
                f"host {self._run.config.host}, but the leader, the agent on host {leader}, "
                f"has not confirmed within {secs:.0f} s that no other host holds it; check whether "
                "that agent runs. It is notified as soon as it does; delete the checkpoint again "
                "to wait for that"
            ) from error
        finally:
            # A concurrent call may have removed the shared event, and a later call registered its
            # own.
            if self._awaited.get(checkpoint) is confirmed:
                del self._awaited[checkpoint]
        # Parts that another host was writing during the first removal have arrived by now.
        await self._storage_worker.threads.write(self._remove_everywhere, checkpoint)

    def on_gone(self, checkpoint: CheckpointId) -> None:
        """Record that no host holds anything of a checkpoint that was deleted here."""
        if checkpoint in self._awaited:
            self._awaited[checkpoint].set()

    async def judged(self, newest: CheckpointId, keep: Sequence[CheckpointId]) -> None:
        """Remove the checkpoints that neither the user's policy nor the built-in share keeps.

        Args:
            newest: The commit after which the policy was asked. The answer holds for earlier ones
                too, which are not asked about again, but not for one that came in the meantime.
            keep: What the policy keeps.
        """
        # Taken before the first await: a commit during it asks the policy again.
        drops = self._asked.get(newest, set())
        answered = [commit for commit in self._asked if commit.age <= newest.age]
        for commit in answered:
            del self._asked[commit]
        try:
            await self._tidy(lambda tidied: self._remove_judged(tidied, drops - set(keep)))
        finally:
            for commit in answered:
                self._notify_preserved(commit)

    async def _preserve_after(self, newest: CheckpointId) -> None:
        """Apply preservation after a commit, and post `preserved` in any case: trainers may wait.

        If a user's own policy has to judge first, the notice is posted with its answer.
        """
        try:
            await self._apply_preservation(newest)
        finally:
            if newest not in self._asked:
                self._notify_preserved(newest)

    def _notify_preserved(self, newest: CheckpointId) -> None:
        self._unpreserved.discard(newest)
        self._trainers.notices.post(Notice(kind="preserved", id=newest))

    async def _apply_preservation(self, newest: CheckpointId) -> None:
        pending = frozenset(self._driver.view.pending_ids())
        policies = self._trainers.job.durable
        try:
            tidied = await self._tidy(
                lambda tidied: self._remove_unkept(tidied, newest, pending, policies)
            )
        except HoldfastError as error:
            self._run.events.write(PreservationFailed(reason=str(error)))
            self._trainers.notices.post(Notice(kind="warning", reason=str(error)))
            return
        if tidied.drops:
            infos = [_info_message(c, self._infos[c]) for c in tidied.timeline]
            self._asked[newest] = set(tidied.drops)
            self._trainers.notices.post(Notice(kind="judge", id=newest, data=infos))

    async def _tidy(self, work: Callable[[_Tidied], None]) -> _Tidied:
        """Run `work` on the writing thread; report its removals, also if it fails later.

        It ends where a newer attempt has begun: preservation follows the commits of that one. The
        same trainers begin one when they overwrite a step.
        """
        tidied = _Tidied()
        try:
            await self._storage_worker.threads.write(work, tidied)
        except FencedError as error:
            log.info("preservation: %s", error)
        finally:
            self._report_mended(tidied.mended)
            self._report_cleared(tidied.cleared)
            self._report_removed(tidied.removed, "preservation")
        return tidied

    def _report_mended(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._run.events.write(RecordMended(key=key))

    def _report_cleared(self, checkpoints: Iterable[CheckpointId]) -> None:
        for checkpoint in checkpoints:
            self._run.events.write(
                CheckpointCleared(step=checkpoint.step, attempt=checkpoint.attempt.number)
            )

    def _report_removed(self, checkpoints: Iterable[CheckpointId], reason: str) -> None:
        """Report removals to the events and to the coordination.

        Other hosts may hold the checkpoints, and callers may wait until they are durable.
        """
        for checkpoint in checkpoints:
            self._infos.pop(checkpoint, None)
            self._driver.submit(inputs.Deleted(checkpoint))
            self._run.events.write(
                CheckpointDeleted(
                    step=checkpoint.step, attempt=checkpoint.attempt.number, reason=reason
                )
            )

    # On the writing thread.

    def _remove_unkept(
        self,
        tidied: _Tidied,
        newest: CheckpointId,
        pending: frozenset[CheckpointId],
        policies: Policies,
    ) -> None:
        """Remove leftovers, and what the built-in share drops unless a user's policy judges it."""
        if self._swept_attempt != newest.attempt:
            self._sweep_records(tidied, newest.attempt)
            self._swept_attempt = newest.attempt
        attempts, listed = self._attempts(), self._list()
        self._clear_leftovers(tidied.cleared, newest, pending, attempts, listed)
        if policies.preserve is None and not policies.user_preserves:
            return
        run_branches, drops = self._decide_drops(policies.preserve, attempts, listed)
        if policies.user_preserves:
            # This agent has not committed all of them.
            self._read_infos([c for c in run_branches.timeline if c not in self._infos])
            tidied.drops, tidied.timeline = drops, run_branches.timeline
            return
        self._remove_all(drops, tidied.removed, listed)

    def _sweep_records(self, tidied: _Tidied, attempt: AttemptId) -> None:
        """Check all records of the run and of its attempts, and remove old leases.

        An opening reads no more of them than it needs.
        """
        durable = self._run.durable
        tidied.mended += mend_run(durable, durable.home.recorded_place())
        tidied.mended += mend_attempts(durable, attempt_numbers(durable), {})
        self._storage_worker.leases.remove_old(attempt)

    def _remove_judged(self, tidied: _Tidied, judged: Collection[CheckpointId]) -> None:
        """Remove what the user's own policy does not keep, if the built-in share still does not.

        The newest checkpoint stays, whatever the policies decide.
        """
        attempts, listed = self._attempts(), self._list()
        policy = self._trainers.job.durable.preserve
        run_branches, by_agent = self._decide_drops(policy, attempts, listed)
        drops = set(judged).intersection(by_agent) - set(run_branches.timeline[-1:])
        self._remove_all(sorted(drops), tidied.removed, listed)

    def _remove_all(
        self,
        drops: Iterable[CheckpointId],
        removed: list[CheckpointId],
        listed: dict[CheckpointId, Listing],
    ) -> None:
        for checkpoint in drops:
            # One that is being copied to the remote tier is judged again after that.
            if checkpoint not in self._spared:
                self._remove_everywhere(checkpoint, listed)
                removed.append(checkpoint)

    def _attempts(self) -> dict[int, AttemptRecord]:
        records = self._storage_worker.known_attempts
        return read_attempts(self._run.durable, known=records)

    def _clear_leftovers(
        self,
        cleared: list[CheckpointId],
        newest: CheckpointId,
        pending: frozenset[CheckpointId],
        attempts: Mapping[int, AttemptRecord],
        listed: dict[CheckpointId, Listing],
    ) -> None:
        """Remove what failed saves and deletes left of checkpoints up to `newest`, a commit.

        Every rank has sealed `newest`, so no rank writes to an earlier checkpoint of the attempt
        any more, and a checkpoint of the same step from an earlier attempt is never restored.
        Checkpoints beyond it that an earlier attempt completed on the timeline are left to the next
        agent, which may finish them.
        """
        limits = last_steps(attempts)
        remains = []
        for checkpoint, listing in listed.items():
            is_newer = checkpoint.attempt.number > newest.attempt.number
            is_left = not is_newer and checkpoint.step <= newest.step
            if checkpoint.attempt != newest.attempt and not is_newer:
                is_abandoned = checkpoint.step > limits.get(checkpoint.attempt, -1)
                is_left |= is_abandoned or not listing.is_complete
            if is_left and not listing.is_committed and checkpoint not in pending:
                remains.append(checkpoint)
        if remains:
            cleared += self._remove_durable(listed, remains, pending)

    def _decide_drops(
        self,
        policy: PreservationPolicy | None,
        attempts: Mapping[int, AttemptRecord],
        listed: Mapping[CheckpointId, Listing],
    ) -> tuple[Branches, list[CheckpointId]]:
        """Return the branches, and what the built-in share drops: without one, all but the last."""
        committed = [c for c, listing in listed.items() if listing.is_committed]
        run_branches = branches(committed, attempts)
        if policy is None:
            return run_branches, [c for c in committed if c not in run_branches.timeline[-1:]]
        self._read_infos([c for c in committed if c not in self._infos])
        return run_branches, to_drop(
            run_branches, policy, self._infos.__getitem__, self._run.clock.now()
        )

    def _read_infos(self, checkpoints: Sequence[CheckpointId]) -> None:
        for manifest in read_manifests(self._run.durable, checkpoints):
            self._remember(manifest)

    def _remember(self, manifest: Manifest) -> None:
        self._infos[manifest.id] = info_of(manifest)
        self._storage_worker.reused_images.note(manifest)

    def _remove_everywhere(
        self, checkpoint: CheckpointId, listed: dict[CheckpointId, Listing] | None = None
    ) -> None:
        """Remove a checkpoint from both tiers; `listed` is the durable one's listing, if known."""
        present, newest = self._driver.attempt, newest_number(self._run.durable)
        if newest and not present:
            raise RunBusyError(
                f"delete {checkpoint}: a start is under way here, and waits to learn whether "
                f"attempt {newest}, of another host, has ended; try again when it has begun"
            )
        if newest > present.number:
            raise FencedError(
                f"delete {checkpoint}: attempt {newest} has taken the run over from attempt "
                f"{present}, and may continue from it; stop this process"
            )
        self._storage_worker.opening.forget_listing()
        with self._storage_worker.threads.alone_with(checkpoint):
            view, durable, ram = self._driver.view, self._run.durable, self._ram.store
            if view.is_leading:
                listed = self._list() if listed is None else listed
                self._remove_durable(listed, [checkpoint], view.pending_ids())
            else:
                listing = list_folder(durable, checkpoint)
                remove(durable, checkpoint, listing, set(image_keys_in(checkpoint, listing)))
            in_ram = list_folder(ram, checkpoint)
            if in_ram.sizes_bytes:
                remove(ram, checkpoint, in_ram)

    def _list(self) -> dict[CheckpointId, Listing]:
        return self._storage_worker.reused_images.list_checkpoints(self._run.durable)

    def _remove_durable(
        self,
        listed: dict[CheckpointId, Listing],
        removed: Collection[CheckpointId],
        in_care: Collection[CheckpointId],
    ) -> list[CheckpointId]:
        images = self._storage_worker.reused_images
        return remove_durable(self._run.durable, listed, removed, images=images, in_care=in_care)


def _info_message(checkpoint: CheckpointId, info: CheckpointInfo) -> dict[str, Any]:
    metrics = encode_metrics(dict(info.metrics)) if info.metrics is not None else None
    return {"id": checkpoint, "time": info.time, "metrics": metrics}
