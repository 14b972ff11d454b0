"""Copy committed checkpoints to the run's remote tier, off the path of the training.

The agent that leads the run chooses a checkpoint by the tier's policy, copies its parts, commits it
there, and removes what the tier's other policy does not keep. Nothing waits for it: a failure is
reported once, and the upload is tried again with growing pauses, of the newest checkpoint that is
due then.

Invariants:
- One checkpoint is uploaded at a time. `AgentState.uploading` names it, and preservation of the
  durable tier spares it.
- A checkpoint is committed there after all of its parts, and only while no newer attempt is known
  to either tier.
- An agent without trainers stays until the remote tier has the newest checkpoint, or was
  unreachable for `GIVE_UP_SECS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.agent import control_block
from holdfast.agent.coordinator import Coordinator
from holdfast.agent.part_uploads import PartUploads, UploadOrder, in_thread
from holdfast.agent.protocol import Notice, RemoteStatus
from holdfast.agent.state import REMOTE_ADVICE, AgentState, RemoteTarget
from holdfast.agent.storage_worker import StorageWorker
from holdfast.agent.upload_requests import ask_all
from holdfast.coordination import effects, inputs
from holdfast.coordination.rank_runs import Runs, ranks_in, runs_of
from holdfast.engine.lifecycle.attempts import newest_number
from holdfast.engine.lifecycle.commit import check_not_fenced, is_committed
from holdfast.engine.lifecycle.manifests import info_of, read_manifests
from holdfast.engine.lifecycle.run import check_run
from holdfast.engine.tiers.checkpoint_copy import commit_copy
from holdfast.engine.tiers.remote_checkpoints import RemoteCheckpoints, UploadedCheckpoint
from holdfast.engine.tiers.shared_attempts import check_same_run
from holdfast.errors import (
    CheckpointDamagedError,
    FencedError,
    HoldfastError,
    NotARunError,
    StorageError,
)
from holdfast.events.schema import (
    CheckpointUploaded,
    PreservationFailed,
    RemoteDeleted,
    UploadFailed,
)
from holdfast.format.names import CheckpointId
from holdfast.format.records import Manifest
from holdfast.format.sealed import seal
from holdfast.peers.directory import PeerDirectory
from holdfast.policy.contexts import SaveContext

POLL_SECS = 1.0
WATCH_SECS = 30.0
"""How often it is read whether a newer attempt has begun in the remote tier alone."""
RETRY_SECS_MIN, RETRY_SECS_MAX = 1.0, 60.0
UNJUDGED_MAX = 64
"""How many of the newest checkpoints wait for the policy until the remote tier is listed."""
GIVE_UP_SECS = 3600.0
"""How long an agent without trainers tries to reach a remote tier that fails."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Upload:
    """The checkpoint that is being uploaded; `changes` is the uploader's count when it began."""

    chosen: UploadedCheckpoint
    changes: int
    part_count: int = 0
    written_bytes: int = 0
    host_count: int = 1
    parts_by_host: dict[str, int] = field(default_factory=dict)

    def note_parts(self, host: str, count: int) -> None:
        """Note how many parts a host has uploaded."""
        self.parts_by_host[host] = count


class Uploader:
    """The uploads of one agent; owned by the event loop, with the stores' calls on threads.

    `on_released` is called when a checkpoint is not being uploaded any more.
    """

    def __init__(
        self,
        state: AgentState,
        storage_worker: StorageWorker,
        coordinator: Coordinator,
        peers: PeerDirectory,
        on_released: Callable[[], None],
    ) -> None:
        self._state = state
        self._storage_worker = storage_worker
        self._coordinator = coordinator
        self._peers = peers
        self.parts = PartUploads(state)
        """This host's uploads, for the agent that leads, which may be this one."""
        self._on_released = on_released
        self._changed = asyncio.Event()
        self._round = 0
        self._remote: RemoteTarget | None = None
        self._checkpoints: RemoteCheckpoints | None = None
        self._is_known = False
        """Whether the newest checkpoints of both tiers are known."""
        self._changes = 0
        """How often they became unknown; what was read before the last time is outdated."""
        self._newest: UploadedCheckpoint | None = None
        self._unjudged: deque[UploadedCheckpoint] = deque(maxlen=UNJUDGED_MAX)
        self._uploaded: UploadedCheckpoint | None = None
        self._target: UploadedCheckpoint | None = None
        self._active: _Upload | None = None
        self._wants_newest = False
        self._alone_since_secs: float | None = None
        """Since when the agent has no trainers and stays for the remote tier."""
        self._is_fenced = False
        self._newer_attempt = 0
        """An attempt that was seen in the remote tier and is newer than the one here; 0: none."""
        self._problem = ""
        self._failures = 0
        self._failing_since_secs: float | None = None
        self._retry_at_secs = 0.0

    async def run(self) -> None:
        """Upload whatever becomes due, until cancelled."""
        while True:
            self._changed.clear()
            await self.act()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECS):
                    await self._changed.wait()

    async def watch_takeovers(self) -> None:
        """Look for a newer attempt in the remote tier, until cancelled; uploads may be rare."""
        while True:
            await asyncio.sleep(WATCH_SECS)
            await self.look_for_takeover()

    async def look_for_takeover(self) -> None:
        """Stop the attempt here if a newer one was seen in the remote tier, also the time before.

        An attempt of this host is recorded there before it begins here. So one look is not enough.
        """
        remote = self._state.remote
        if remote is None or not self._may_upload() or self._is_fenced:
            return
        present, durable = self._coordinator.node.attempt, self._state.durable

        def look() -> int:
            newest = newest_number(remote.store)
            if newest > present.number:
                # Another run may be there by now.
                check_same_run(durable, remote.store, self._state.config.run_id)
            return newest

        try:
            newest = await in_thread(look)
        except HoldfastError as error:
            log.info("the attempts in the remote tier cannot be used: %s", error)
            return
        if newest <= self._coordinator.node.attempt.number:
            return
        if newest == self._newer_attempt:
            await self._check_fenced(FencedError(f"attempt {newest} has begun there"))
        self._newer_attempt = newest

    async def act(self) -> None:
        """Upload the checkpoint that is due now, if one is."""
        try:
            await self._advance()
        except Exception as error:
            await self._failed(error)

    def on_committed(self, manifest: Manifest) -> None:
        """Take a checkpoint that this host has committed in the durable tier."""
        one = UploadedCheckpoint(manifest.id, info_of(manifest))
        self._newest = one
        self._unjudged.append(one)
        self._judge()
        self._changed.set()

    def forget_timeline(self) -> None:
        """Look at both tiers again: another attempt has begun, maybe from an earlier checkpoint."""
        self._forget_newest()
        self._is_fenced = self._wants_newest = False
        self._newest = self._uploaded = self._target = self._alone_since_secs = None
        self._unjudged.clear()
        self._hold()
        self._changed.set()

    def want_newest(self) -> None:
        """Upload the newest checkpoint, whatever the policy says, where this host leads."""
        self._wants_newest = True
        self._changed.set()

    def holds_agent(self) -> bool:
        """Return whether an agent without trainers has to stay; asks for the newest checkpoint."""
        if not self._may_upload() or self._is_fenced:
            return self.parts.is_busy
        now_secs = self._state.clock.monotonic()
        if self._alone_since_secs is None:
            self._alone_since_secs = now_secs
            self.want_newest()
        if self._failing_since_secs is not None:
            # A failure while trainers lived says little: it may end soon.
            since_secs = max(self._failing_since_secs, self._alone_since_secs)
            if now_secs - since_secs > GIVE_UP_SECS:
                return False
        return not self._is_known or self._active is not None or self._is_behind()

    async def remove_remote(self, checkpoint: CheckpointId) -> None:
        """Remove a checkpoint that was deleted in the durable tier from the remote tier.

        Raises:
            StorageError: some of it may be left there; the call may be repeated.
        """
        remote = self._state.remote
        if remote is None:
            return
        if self._target is not None and self._target.id == checkpoint:
            self._target = None
            self._hold()
        checkpoints, durable = self._checkpoints_of(remote), self._state.durable

        def remove_checkpoint() -> bool:
            try:
                check_same_run(durable, remote.store, self._state.config.run_id)
            except (NotARunError, CheckpointDamagedError, StorageError) as error:
                if isinstance(error, StorageError) and not remote.store.home.is_gone():
                    raise
                log.warning("%s is not removed from the remote tier: %s", checkpoint, error)
                return False
            return checkpoints.remove_checkpoint(checkpoint)

        if await in_thread(remove_checkpoint):
            self._state.events.write(
                RemoteDeleted(
                    step=checkpoint.step, attempt=checkpoint.attempt.number, reason="asked"
                )
            )
        known = {one.id for one in (self._newest, self._uploaded) if one is not None}
        if checkpoint in known or not self._is_known:
            # What is being read now may have it.
            self._forget_newest()
            self._changed.set()

    def upload_status(self) -> RemoteStatus | None:
        """Return the state of the uploads; None without a remote tier."""
        remote, active, uploaded = self._state.remote, self._active, self._uploaded
        if remote is None:
            return None
        return RemoteStatus(
            place=remote.store.home.location_text,
            newest_step=uploaded.id.step if uploaded is not None else None,
            uploading_step=active.chosen.id.step if active is not None else None,
            parts_done=sum(active.parts_by_host.values()) if active is not None else 0,
            part_count=active.part_count if active is not None else 0,
            is_behind=self._may_upload() and self._is_known and self._is_behind(),
            problem=self._problem,
        )

    @property
    def awaited_place(self) -> str:
        """The remote tier that lacks the newest checkpoint; empty if none does."""
        remote = self._state.remote
        is_awaited = remote is not None and self._may_upload() and self._is_behind()
        return remote.place if remote is not None and is_awaited else ""

    # Decisions.

    def _may_upload(self) -> bool:
        remote = self._state.remote
        return remote is not None and remote.save is not None and self._coordinator.node.is_leading

    def _is_behind(self) -> bool:
        newest, uploaded = self._newest, self._uploaded
        return newest is not None and (uploaded is None or uploaded.id != newest.id)

    def _is_due(self, one: UploadedCheckpoint) -> bool:
        state, uploaded = self._state, self._uploaded
        if state.remote is None or state.remote.save is None:
            return False
        members = state.group.present if state.group is not None else []
        cells = state.control.cells
        context = SaveContext(
            now=state.clock.now(),
            is_saving_in_progress=self._active is not None,
            reached_preemption=any(cells[control_block.notice_cell(m.seat)] for m in members),
        )
        previous = [uploaded.info] if uploaded is not None else []
        return state.remote.save.should_save(one.id.step, previous, context=context)

    def _judge(self) -> None:
        """Choose the last of the new checkpoints that is due, once the uploaded one is known."""
        while self._is_known and self._unjudged:
            one = self._unjudged.popleft()
            if self._is_due(one):
                self._target = one
                self._hold()

    def _choose(self) -> UploadedCheckpoint | None:
        """Return the checkpoint to upload now.

        One that was due stays so until it is uploaded, or a later one is due.
        """
        newest = self._newest
        if (
            newest is not None
            and self._is_behind()
            and (self._wants_newest or self._is_due(newest))
        ):
            self._target = newest
        return self._target

    def _hold(self) -> None:
        active = self._active.chosen if self._active is not None else None
        held = frozenset(one.id for one in (active, self._target) if one is not None)
        is_released = bool(self._state.uploading - held)
        self._state.uploading = held
        if is_released:
            self._on_released()

    # Uploads.

    async def _advance(self) -> None:
        remote = self._state.remote
        if remote is None or not self._may_upload() or self._is_fenced:
            return
        if self._state.clock.monotonic() < self._retry_at_secs:
            return
        checkpoints = self._checkpoints_of(remote)
        if not self._is_known:
            await self._read_newest(checkpoints)
        chosen = self._choose() if self._is_known else None
        if chosen is None:
            return
        upload = self._active = _Upload(chosen, self._changes)
        self._hold()
        try:
            began_secs = self._state.clock.monotonic()
            await self._upload(remote, checkpoints, upload)
            self._succeeded(upload, self._state.clock.monotonic() - began_secs)
        finally:
            self._active = None
            self._hold()
        await self._preserve(remote, checkpoints, chosen.id)
        # The next one may be due already.
        self._changed.set()

    def _forget_newest(self) -> None:
        self._is_known = False
        self._changes += 1

    async def _read_newest(self, checkpoints: RemoteCheckpoints) -> None:
        """Read the newest checkpoints of both tiers; the agent may change them meanwhile."""
        self._newest, changes = None, self._changes
        durable, uploaded = await in_thread(checkpoints.newest)
        if changes != self._changes:
            # Another attempt has begun, or a checkpoint was removed: read them again.
            self._changed.set()
            return
        # One that was committed meanwhile is newer than what was read.
        self._newest = self._newest or durable
        self._uploaded, self._is_known = uploaded, True
        self._judge()

    async def _upload(
        self, remote: RemoteTarget, checkpoints: RemoteCheckpoints, upload: _Upload
    ) -> None:
        state, checkpoint = self._state, upload.chosen.id

        def prepare() -> Manifest | None:
            check_run(remote.store, remote.place, state.config.run_id, REMOTE_ADVICE)
            check_not_fenced(remote.store, checkpoint)
            if is_committed(remote.store, checkpoint):
                return None
            return next(read_manifests(state.durable, [checkpoint]))

        manifest = await in_thread(prepare)
        if manifest is None:
            return
        upload.part_count = part_count = len(manifest.parts)
        await self._upload_parts(remote, upload)
        await in_thread(
            lambda: checkpoints.commit_checkpoint(
                checkpoint,
                lambda images: commit_copy(
                    seal(manifest), remote.store, checkpoint, part_count, images.committing
                ),
            )
        )

    async def _upload_parts(self, remote: RemoteTarget, upload: _Upload) -> None:
        """Upload all parts: each host those of its ranks, and this host the rest."""
        self._round += 1
        own = self._state.config.host
        shares = {
            host: self._order(remote, upload, ranks)
            for host, ranks in self._ranks_by_host(upload.part_count).items()
        }
        mine = shares.pop(own, self._order(remote, upload, ()))
        others = asyncio.create_task(ask_all(self._peers, own, shares, upload.note_parts))
        try:
            own_bytes = await self.parts.finish(mine)
            done = set(ranks_in(mine.ranks))
            upload.note_parts(own, len(done))
            for found, written_bytes in (await others).values():
                done |= found
                upload.written_bytes += written_bytes
                upload.host_count += bool(found)
        finally:
            others.cancel()
        left = runs_of(set(range(upload.part_count)) - done)
        if left:
            # Also the parts of hosts that have left: the durable tier has all of them.
            order = self._order(remote, upload, (*mine.ranks, *left))
            own_bytes = await self.parts.finish(order)
        upload.written_bytes += own_bytes

    def _order(self, remote: RemoteTarget, upload: _Upload, ranks: Runs) -> UploadOrder:
        return UploadOrder(place=remote.place, id=upload.chosen.id, round=self._round, ranks=ranks)

    def _ranks_by_host(self, part_count: int) -> dict[str, Runs]:
        """Return the hosts of the attempt's ranks, if the checkpoint has as many parts."""
        lead = self._coordinator.node.survey(self._state.clock.monotonic())
        if lead is None or lead.rank_count != part_count:
            return {}
        return {one.host: one.ranks for one in lead.hosts if one.ranks}

    def _succeeded(self, upload: _Upload, secs: float) -> None:
        if upload.changes == self._changes:
            self._uploaded = upload.chosen
            # While trainers live, the policy decides about the next one.
            self._wants_newest &= self._state.group is None or self._is_behind()
        if self._target is upload.chosen:
            self._target = None
        if self._problem:
            log.info("the remote tier can be written again")
        self._problem, self._failures, self._failing_since_secs = "", 0, None
        self._state.events.write(
            CheckpointUploaded(
                step=upload.chosen.id.step,
                attempt=upload.chosen.id.attempt.number,
                bytes=upload.written_bytes,
                hosts=upload.host_count,
                secs=round(secs, 4),
            )
        )

    async def _preserve(
        self, remote: RemoteTarget, checkpoints: RemoteCheckpoints, newest: CheckpointId
    ) -> None:
        policy, uploading, now = remote.preserve, self._state.uploading, self._state.clock.now()
        if policy is None:
            return
        try:
            drops = await in_thread(lambda: checkpoints.preserve(policy, newest, uploading, now))
        except FencedError:
            raise
        except HoldfastError as error:
            self._state.events.write(PreservationFailed(reason=f"{remote.place}: {error}"))
            return
        for one in drops:
            self._state.events.write(
                RemoteDeleted(step=one.step, attempt=one.attempt.number, reason="preservation")
            )

    async def _failed(self, raised: Exception) -> None:
        """Schedule the next try, and report the first failure of several."""
        error = _first(raised)
        now_secs = self._state.clock.monotonic()
        self._failures += 1
        pause_secs = min(RETRY_SECS_MIN * 2 ** min(self._failures - 1, 10), RETRY_SECS_MAX)
        self._retry_at_secs = now_secs + pause_secs
        target = self._target
        if isinstance(error, FencedError):
            await self._check_fenced(error)
            return
        if target is not None and not await self._is_there(target.id):
            log.info("the upload of %s ends: it was deleted", target.id)
            self._forget_newest()
            self._target = None
            self._hold()
            return
        if self._failing_since_secs is None:
            self._failing_since_secs = now_secs
        is_first, self._problem = not self._problem, str(error) or repr(error)
        log.warning("cannot copy to the remote tier: %s; next try in %.0f s", error, pause_secs)
        if is_first and self._state.remote is not None:
            if target is not None:
                step, attempt = target.id.step, target.id.attempt.number
                self._state.events.write(
                    UploadFailed(step=step, attempt=attempt, reason=self._problem)
                )
            self._state.notices.post(
                Notice(
                    kind="warning",
                    reason=f"checkpoints cannot be copied to the remote tier "
                    f"{self._state.remote.place} now, and are tried again: {self._problem}",
                )
            )

    async def _check_fenced(self, error: FencedError) -> None:
        """Stop the attempt here if a newer one has begun in the remote tier alone.

        Without one the timeline here has changed, and the checkpoint is not on it any more.
        """
        self._forget_newest()
        self._target = None
        self._hold()
        listed = await self._storage_worker.list_durable(
            effects.ListDurable(self._coordinator.node.attempt, since_step=0)
        )
        if not isinstance(listed, inputs.DurableListed):
            return
        if listed.newest_attempt > self._coordinator.node.attempt:
            log.error("the run was taken over in its remote tier: %s", error)
            self._is_fenced = True
            self._coordinator.submit(listed)

    async def _is_there(self, checkpoint: CheckpointId) -> bool:
        durable = self._state.durable
        try:
            return await in_thread(lambda: is_committed(durable, checkpoint))
        except HoldfastError:
            return True

    def _checkpoints_of(self, remote: RemoteTarget) -> RemoteCheckpoints:
        if self._checkpoints is None or self._remote is not remote:
            self._remote = remote
            self._checkpoints = RemoteCheckpoints(self._state.durable, remote.store)
            self._forget_newest()
        return self._checkpoints


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
