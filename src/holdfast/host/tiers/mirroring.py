"""Choose what is copied to the run's remote tier, and remove there what its policy does not keep.

The agent that leads the run chooses a committed checkpoint by the tier's policy. The coordination
has the hosts copy it, repeats what fails, and commits it there (`coordination.leader.mirror`).
Nothing waits for it. A failure is reported once, and the newest checkpoint that is due then is
copied next.

Invariants:
- Preservation of the durable tier spares the checkpoints that are or will be copied.
- An agent without trainers stays until the remote tier has the newest checkpoint, or has failed for
  `GIVE_UP_SECS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from holdfast.coordination import effects, inputs
from holdfast.engine.lifecycle.commit import is_committed
from holdfast.engine.tiers.remote_checkpoints import UploadedCheckpoint, uploaded_of
from holdfast.engine.tiers.shared_attempts import check_same_run
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    NotARunError,
    StorageError,
)
from holdfast.format.names import CheckpointId, age_of
from holdfast.format.records import Manifest
from holdfast.host.driver.agent_run import AgentRun, RemoteTarget
from holdfast.host.driver.attached_trainers import AttachedTrainers
from holdfast.host.driver.driver import Driver
from holdfast.host.tiers.mirror_worker import MirrorWorker
from holdfast.host.tiers.store_threads import in_thread
from holdfast.host.wire.protocol import Notice, RemoteStatus, Uploaded
from holdfast.observe.events.schema import (
    CheckpointUploaded,
    PreservationFailed,
    RemoteDeleted,
    UploadFailed,
)
from holdfast.policy.contexts import SaveContext

POLL_SECS = 1.0
IDLE_SECS = 30.0
RETRY_SECS = 10.0
"""The pause after the tiers could not be read."""
UNJUDGED_MAX = 64
"""How many of the newest checkpoints wait for the policy until the remote tier is listed."""
GIVE_UP_SECS = 3600.0
"""How long an agent without trainers tries to reach a remote tier that fails."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A checkpoint that the coordination was given, and when."""

    checkpoint: UploadedCheckpoint
    began_secs: float


@dataclass(slots=True)
class _Failing:
    """What fails at the remote tier, and since when; the first failure of several is reported."""

    reason: str = ""
    since_secs: float | None = None
    read_again_at_secs: float = 0.0
    """The end of the pause after the tiers could not be read."""


def may_copy(run: AgentRun, driver: Driver) -> bool:
    """Return whether this agent chooses what is copied: it leads, and the tier has a policy."""
    remote = run.remote
    return remote is not None and remote.save is not None and driver.view.is_leading


class Mirroring:
    """The remote tier of one agent's run; owned by the event loop, with reads on threads.

    `spare` is called with the checkpoints that are or will be copied, whenever they change.
    """

    def __init__(
        self,
        run: AgentRun,
        trainers: AttachedTrainers,
        driver: Driver,
        mirror_worker: MirrorWorker,
        spare: Callable[[frozenset[CheckpointId]], None],
    ) -> None:
        self._run = run
        self._trainers = trainers
        self._driver = driver
        self._mirror_worker = mirror_worker
        self._spare = spare
        self._held: frozenset[CheckpointId] = frozenset()
        """The checkpoints that are or will be copied."""
        self._changed = asyncio.Event()
        self._remote: RemoteTarget | None = None
        self._is_known = False
        """Whether the newest checkpoints of both tiers are known."""
        self._changes = 0
        """How often they became unknown; what was read before the last time is outdated."""
        self._newest: UploadedCheckpoint | None = None
        self._unjudged: deque[UploadedCheckpoint] = deque(maxlen=UNJUDGED_MAX)
        self._uploaded: UploadedCheckpoint | None = None
        self._target: UploadedCheckpoint | None = None
        self._asked: dict[CheckpointId, _Asked] = {}
        """The checkpoints that the coordination was given and has not copied yet."""
        self._wants_newest = False
        self._alone_since_secs: float | None = None
        """Since when the agent has no trainers and stays for the remote tier."""
        self._failing = _Failing()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Choose whatever becomes due, until cancelled."""
        while True:
            self._changed.clear()
            await self.act()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECS if self._run.remote else IDLE_SECS):
                    await self._changed.wait()

    async def act(self) -> None:
        """Choose the checkpoint that is due now, if one is, and have it copied."""
        remote = self._run.remote
        if remote is None or not self._may_copy():
            return
        if self._remote is not remote:
            self._remote = remote
            self._asked.clear()
            self._forget_newest()
        self._ask_again()
        if not self._is_known and self._run.clock.monotonic() >= self._failing.read_again_at_secs:
            await self._read_newest(remote)
        if self._is_known and self._may_copy():
            self._submit_newest()
            self._choose()

    def on_committed(self, manifest: Manifest) -> None:
        """Take a checkpoint that this host has committed in the durable tier."""
        committed = uploaded_of(manifest)
        self._newest = committed
        self._unjudged.append(committed)
        self._judge()
        self._changed.set()

    def on_ended(self, effect: effects.MirrorEnded) -> None:
        """Report that a checkpoint was copied, or the first failure of several."""
        request = self._asked.get(effect.id)
        if request is not None and effect.reason:
            self._begin(self._failed(effect.id, effect.reason))
        elif request is not None:
            self._succeeded(request, effect)

    def forget_timeline(self) -> None:
        """Look at both tiers again: another attempt has begun, maybe from an earlier checkpoint."""
        self._forget_newest()
        self._wants_newest = False
        self._newest = self._uploaded = self._target = self._alone_since_secs = None
        self._unjudged.clear()
        self._asked.clear()
        self._hold()
        self._changed.set()

    def upload(self, checkpoint: CheckpointId) -> Uploaded:
        """Return whether the tier has a checkpoint, the newest one of the durable tier.

        If not, it is copied, whatever the policy says, where this host leads.
        """
        is_there = age_of(self._driver.view.mirrored) >= checkpoint.age
        if not is_there:
            self._want_newest()
        return Uploaded(is_there=is_there, problem=self._failing.reason)

    def _want_newest(self) -> None:
        self._wants_newest = True
        self._changed.set()

    def holds_agent(self) -> bool:
        """Return whether an agent without trainers has to stay; asks for the newest checkpoint."""
        view = self._driver.view
        if not self._may_copy():
            return view.is_mirroring
        now_secs = self._run.clock.monotonic()
        if self._alone_since_secs is None:
            self._alone_since_secs = now_secs
            self._want_newest()
        if self._failing.since_secs is not None:
            # A failure while trainers lived says little: it may end soon.
            since_secs = max(self._failing.since_secs, self._alone_since_secs)
            if now_secs - since_secs > GIVE_UP_SECS:
                return False
        return not self._is_known or view.is_mirroring or self._is_behind()

    async def remove_remote(self, checkpoint: CheckpointId) -> None:
        """Remove a checkpoint that was deleted in the durable tier from the remote tier.

        Raises:
            StorageError: some of it may be left there; the call may be repeated.
        """
        remote = self._run.remote
        if remote is None:
            return
        self._asked.pop(checkpoint, None)
        if self._target is not None and self._target.id == checkpoint:
            self._target = None
        self._hold()
        durable = self._run.durable

        def remove_checkpoint() -> bool:
            try:
                check_same_run(durable, remote.store, self._run.config.run_id)
            except (NotARunError, CheckpointDamagedError, StorageError) as error:
                if isinstance(error, StorageError) and not remote.store.home.is_gone():
                    raise
                log.warning("%s is not removed from the remote tier: %s", checkpoint, error)
                return False
            return remote.checkpoints.remove_checkpoint(checkpoint)

        if await in_thread(remove_checkpoint):
            self._run.events.write(
                RemoteDeleted(
                    step=checkpoint.step, attempt=checkpoint.attempt.number, reason="asked"
                )
            )
        newest_ids = {each.id for each in (self._newest, self._uploaded) if each is not None}
        if checkpoint in newest_ids or not self._is_known:
            # What is being read now may have it.
            self._forget_newest()
            self._changed.set()

    def upload_status(self) -> RemoteStatus | None:
        """Return the state of the remote tier; None without one."""
        remote, uploaded, copies = self._run.remote, self._uploaded, self._driver.view.lead.copies
        if remote is None:
            return None
        target = copies.target if copies is not None else None
        return RemoteStatus(
            place=remote.store.home.location_text,
            newest_step=uploaded.id.step if uploaded is not None else None,
            uploading_step=target.id.step if target is not None else None,
            parts_done=copies.done_count if copies is not None else 0,
            part_count=target.part_count if target is not None else 0,
            is_behind=self._may_copy() and self._is_known and self._is_behind(),
            problem=self._failing.reason,
        )

    @property
    def awaited_place(self) -> str:
        """The remote tier that lacks the newest checkpoint; empty if none does."""
        remote = self._run.remote
        is_awaited = remote is not None and self._may_copy() and self._is_behind()
        return remote.place if remote is not None and is_awaited else ""

    @property
    def is_busy(self) -> bool:
        """Whether something is written to the remote tier, or removed there."""
        return bool(self._tasks) or self._mirror_worker.is_busy

    async def wait_idle(self) -> None:
        """Wait for what is under way now."""
        await self._mirror_worker.wait_idle()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # Decisions.

    def _may_copy(self) -> bool:
        return may_copy(self._run, self._driver)

    def _is_behind(self) -> bool:
        newest, uploaded = self._newest, self._uploaded
        return newest is not None and (uploaded is None or uploaded.id != newest.id)

    def _is_due(self, checkpoint: UploadedCheckpoint) -> bool:
        uploaded = self._uploaded
        if self._run.remote is None or self._run.remote.save is None:
            return False
        copies = self._driver.view.lead.copies
        context = SaveContext(
            now=self._run.clock.now(),
            is_saving_in_progress=copies is not None and copies.is_trying,
            reached_preemption=self._trainers.has_notice,
        )
        previous = [uploaded.info] if uploaded is not None else []
        return self._run.remote.save.should_save(checkpoint.id.step, previous, context=context)

    def _judge(self) -> None:
        """Choose the last of the new checkpoints that is due, once the uploaded one is known."""
        while self._is_known and self._unjudged:
            checkpoint = self._unjudged.popleft()
            if self._is_due(checkpoint):
                self._target = checkpoint
                self._hold()

    def _choose(self) -> None:
        """Have the checkpoint copied that is due now.

        One that was due stays so until it is copied, or a later one is due.
        """
        newest = self._newest
        if newest is not None and self._is_behind():
            is_chosen = newest.id in self._asked
            if not is_chosen and (self._wants_newest or self._is_due(newest)):
                self._target = newest
        target, self._target = self._target, None
        if target is not None and target.id not in self._asked:
            self._asked[target.id] = _Asked(target, self._run.clock.monotonic())
            copy = inputs.MirrorTarget(target.id, target.part_count)
            self._driver.submit(inputs.MirrorWanted(copy))
            # It has replaced one that waited, or whose last try had failed.
            copied = self._copied()
            self._asked = {c: request for c, request in self._asked.items() if c in copied}
        self._hold()

    def _ask_again(self) -> None:
        """Choose again what a leader before the present one was to copy: it is not known there."""
        copied = self._copied()
        for checkpoint in [c for c in self._asked if c not in copied]:
            request = self._asked.pop(checkpoint)
            if self._target is None or self._target.id < checkpoint:
                self._target = request.checkpoint

    def _submit_newest(self) -> None:
        """Submit what the tier has, if the present leader does not know it: for the other hosts."""
        copies, uploaded = self._driver.view.lead.copies, self._uploaded
        newest = uploaded.id if uploaded is not None else None
        if copies is not None and copies.newest != newest:
            self._driver.submit(inputs.MirrorFound(newest))

    def _copied(self) -> frozenset[CheckpointId]:
        copies = self._driver.view.lead.copies
        return copies.ids if copies is not None else frozenset()

    def _hold(self) -> None:
        """Spare what is or will be copied from preservation."""
        held = self._copied() | self._asked.keys()
        held |= {self._target.id} if self._target is not None else frozenset()
        if held != self._held:
            self._held = held
            self._spare(held)

    # Outcomes.

    def _succeeded(self, request: _Asked, effect: effects.MirrorEnded) -> None:
        secs = self._run.clock.monotonic() - request.began_secs
        self._uploaded = request.checkpoint
        del self._asked[effect.id]
        # While trainers live, the policy decides about the next one.
        self._wants_newest &= self._trainers.group is None or self._is_behind()
        if self._failing.reason:
            log.info("the remote tier can be written again")
        self._failing = _Failing()
        self._run.events.write(
            CheckpointUploaded(
                step=effect.id.step,
                attempt=effect.id.attempt.number,
                bytes=effect.written_bytes,
                hosts=effect.host_count,
                secs=round(secs, 4),
            )
        )
        self._hold()
        self._begin(self._preserve(effect.id))
        # The next one may be due already.
        self._changed.set()

    async def _failed(self, checkpoint: CheckpointId, reason: str) -> None:
        if not await self._is_there(checkpoint):
            log.info("the copy of %s ends: it was deleted", checkpoint)
            self._forget_newest()
            self._asked.pop(checkpoint, None)
            self._driver.submit(inputs.MirrorUnwanted(checkpoint))
            self._hold()
            return
        if self._report_failure(reason):
            step, attempt = checkpoint.step, checkpoint.attempt.number
            self._run.events.write(UploadFailed(step=step, attempt=attempt, reason=reason))

    def _report_failure(self, reason: str) -> bool:
        """Report a failure to the trainers if it is the first of several; return whether it is."""
        if self._failing.since_secs is None:
            self._failing.since_secs = self._run.clock.monotonic()
        log.warning("cannot copy to the remote tier: %s", reason)
        is_first, self._failing.reason = not self._failing.reason, reason
        remote = self._run.remote
        if is_first and remote is not None:
            self._trainers.notices.post(
                Notice(
                    kind="warning",
                    reason=f"checkpoints cannot be copied to the remote tier {remote.place} now, "
                    f"and are tried again: {reason}",
                )
            )
        return is_first

    async def _preserve(self, newest: CheckpointId) -> None:
        remote, held, now = self._run.remote, self._held, self._run.clock.now()
        policy = remote.preserve_now if remote is not None else None
        if remote is None or policy is None:
            return
        try:
            drops = await in_thread(lambda: remote.checkpoints.preserve(policy, newest, held, now))
        except HoldfastError as error:
            self._run.events.write(PreservationFailed(reason=f"{remote.place}: {error}"))
            return
        for dropped in drops:
            self._run.events.write(
                RemoteDeleted(
                    step=dropped.step, attempt=dropped.attempt.number, reason="preservation"
                )
            )

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What the tiers have.

    def _forget_newest(self) -> None:
        self._is_known = False
        self._changes += 1

    async def _read_newest(self, remote: RemoteTarget) -> None:
        """Read the newest checkpoints of both tiers; the agent may change them meanwhile."""
        self._newest, changes = None, self._changes
        try:
            durable, uploaded = await in_thread(remote.checkpoints.newest)
        except HoldfastError as error:
            self._failing.read_again_at_secs = self._run.clock.monotonic() + RETRY_SECS
            self._report_failure(str(error) or repr(error))
            return
        if changes != self._changes:
            # Another attempt has begun, or a checkpoint was removed: read them again.
            self._changed.set()
            return
        # One that was committed meanwhile is newer than what was read.
        self._newest = self._newest or durable
        self._uploaded, self._is_known = uploaded, True
        self._judge()

    async def _is_there(self, checkpoint: CheckpointId) -> bool:
        durable = self._run.durable
        try:
            return await in_thread(lambda: is_committed(durable, checkpoint))
        except HoldfastError:
            return True
