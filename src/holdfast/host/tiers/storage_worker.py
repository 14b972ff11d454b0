"""Carry out the coordination's effects on the stores, and return the outcomes as inputs.

Nothing is decided here. Each operation runs on a thread and always ends with an input: errors are
reported to the coordination, which retries or notifies the trainers.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable

from holdfast.coordination import effects, inputs
from holdfast.coordination.settings import LEASE_SECS
from holdfast.engine.lifecycle.attempts import AttemptStart, begin_attempt, newest_attempt
from holdfast.engine.lifecycle.catalog import list_checkpoints, list_folder
from holdfast.engine.lifecycle.commit import (
    check_not_fenced,
    commit,
    is_committed,
    read_part,
    remove,
)
from holdfast.engine.lifecycle.leases import LeaseWriter
from holdfast.engine.lifecycle.newest import NewestListing, list_newest
from holdfast.engine.lifecycle.recovery import finish_copies
from holdfast.engine.lifecycle.references import ReusedImages
from holdfast.engine.lifecycle.run import check_run, deletion_text
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.tiers.shared_attempts import begin_in_both
from holdfast.engine.transfer.copy import copy_part
from holdfast.engine.transfer.fetch import fetch_part
from holdfast.errors import (
    CheckpointDamagedError,
    FencedError,
    HoldfastError,
    ObjectNotFoundError,
    StorageError,
    StorageRefusedError,
)
from holdfast.format.names import NO_ATTEMPT, STEP_MAX, AttemptId, CheckpointId, part_key
from holdfast.format.records import AttemptRecord, CheckpointSpec, Manifest
from holdfast.format.timeline import last_steps
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.attached_trainers import AttachedTrainers
from holdfast.host.tiers.attempt_leases import AttemptLeases
from holdfast.host.tiers.opening_listing import OpeningListing
from holdfast.host.tiers.ram_attempts import (
    foreign_attempts,
    forget_attempts,
    is_noted,
    note_attempt,
)
from holdfast.host.tiers.ram_place import note_place, place_of
from holdfast.host.tiers.ram_tier import RamTier, listed_parts
from holdfast.host.tiers.store_threads import StoreThreads
from holdfast.observe.events.schema import CopyFailed
from holdfast.peers.directory import PeerDirectory
from holdfast.store.contract import ReadableStore
from holdfast.store.ram import RamStore

log = logging.getLogger(__name__)

SPEC_SECS = 10.0
"""How long rank 0's part is awaited in the durable tier while its host is silent."""
SPEC_POLL_SECS = 0.25
SPEC_REST_SECS = 30.0
"""For how long nothing is awaited there after a wait in vain."""
MISSING_MAX = 256
"""How many of the newest parts that were missing at their source are remembered."""


class StorageWorker:
    """The operations on one agent's stores. `on_commit` is called in the loop for each manifest."""

    def __init__(
        self,
        run: AgentRun,
        ram: RamTier,
        trainers: AttachedTrainers,
        peers: PeerDirectory,
        on_commit: Callable[[Manifest, float | None], None],
    ) -> None:
        self._run = run
        self._ram = ram
        self._trainers = trainers
        self._peers = peers
        self._on_commit = on_commit
        self.threads = StoreThreads()
        self.leases = AttemptLeases(run, trainers)
        self.reused_images = ReusedImages()
        self._bad_sources: dict[str, type[Exception]] = {}
        self._missing: dict[tuple[CheckpointId, int], None] = {}
        """Parts that were missing at the source of a pull, the oldest first."""
        self.problem: HoldfastError | None = None
        """The last error of a listing, a start or a lease."""
        self._began_secs: dict[CheckpointId, float] = {}
        self._layouts: PartLayouts | None = None
        self._no_spec_until_secs = -math.inf
        self.known_attempts: dict[int, AttemptRecord] = {}
        """The records of attempts that were read since the last start, by number."""
        self._known_remote_attempts: dict[int, AttemptRecord] = {}
        self._put_attempt = NO_ATTEMPT
        """The attempt whose record this agent has put last, or has tried to."""
        self.opening = OpeningListing(self._run.clock)

    async def is_committed(self, checkpoint: CheckpointId) -> bool:
        """Return whether the durable tier has the checkpoint's manifest."""
        return await self.threads.query(is_committed, self._run.durable, checkpoint)

    # Operations.

    async def persist(self, effect: effects.Persist) -> inputs.PartsWritten | inputs.WriteFailed:
        """Make parts in this host's RAM durable."""
        self._began_secs.setdefault(effect.id, self._run.clock.monotonic())
        try:
            await self.threads.write(self._persist, effect)
        except Exception as raised:
            newer = await self._newer_attempt(raised)
            error = await self._explained(raised)
            log.warning("cannot write parts of %s to the durable tier: %s", effect.id, error)
            return inputs.WriteFailed(effect.id, self._reason_here(error), newer)
        return inputs.PartsWritten(effect.id, effect.ranks)

    async def commit(self, effect: effects.Commit) -> inputs.CommitWritten | inputs.CommitFailed:
        """Write the manifest of a durable checkpoint."""
        try:
            manifest = await self.threads.commit(self._commit, effect)
        except Exception as raised:
            newer = await self._newer_attempt(raised)
            error = await self._explained(raised)
            log.warning("cannot commit %s: %s", effect.id, error)
            return inputs.CommitFailed(effect.id, self._reason_here(error), newer)
        began_secs = self._began_secs.get(effect.id)
        secs = None if began_secs is None else self._run.clock.monotonic() - began_secs
        # Earlier ones are not committed any more; the next one's parts may be under way.
        self._began_secs = {c: s for c, s in self._began_secs.items() if c > effect.id}
        self._on_commit(manifest, secs)
        return inputs.CommitWritten(effect.id)

    async def pull(self, effect: effects.Pull) -> inputs.ReplicaSealed | inputs.PullFailed:
        """Copy a part from another host's RAM, as far as no rank here has copied it into a slot."""
        filled = await self._ram.replicas.wait(effect.id, effect.rank)
        slot = self._ram.slots.replica_slot(effect.id, effect.rank, filled)
        try:
            with slot as reserve:
                pull = functools.partial(self._pull, effect, reserve, is_filled=filled is not None)
                self._ram.pulled_bytes += await self.threads.pull(pull)
        except Exception as error:
            if self.may_be_recycled(effect, error):
                log.info("part %d of %s is no longer there: %s", effect.rank, effect.id, error)
            else:
                log.warning("cannot copy part %d of %s: %s", effect.rank, effect.id, error)
                self._report_copy(effect, error)
            return inputs.PullFailed(effect.id, effect.rank)
        self._bad_sources.pop(effect.source, None)
        return inputs.ReplicaSealed(effect.id, effect.rank, effect.part_count)

    async def list_durable(
        self, effect: effects.ListDurable
    ) -> inputs.DurableListed | inputs.ListingFailed:
        """Return the contents of the durable tier."""
        try:
            return await self.threads.query(self._list_durable, effect)
        except Exception as error:
            log.warning("cannot list the durable tier: %s", error)
            self._note(error)
            return inputs.ListingFailed(_reason(error), _is_final(error))

    async def newest_for(self, attempt: AttemptId) -> NewestListing | None:
        """Return the newest checkpoints for readers of an attempt, listed once on this host.

        Returns:
            None once something here has changed the durable tier, or may have: a reader then lists
            it by itself.
        """
        listing = self.opening.of_attempt(attempt)
        if listing is None and self.opening.is_open_for(attempt):
            await self.threads.query(self.list_for_opening)
            listing = self.opening.of_attempt(attempt)
        return listing

    async def begin(
        self, effect: effects.BeginAttempt
    ) -> inputs.AttemptBegun | inputs.AttemptTaken | inputs.BeginFailed:
        """Write an attempt's record, unless another host has written it."""
        try:
            is_begun = await self.threads.query(self._begin, effect, self.leases.writers())
        except Exception as error:
            log.warning("cannot begin attempt %s: %s", effect.attempt, error)
            self._note(error)
            return inputs.BeginFailed(effect, _reason(error), _is_final(error))
        return (inputs.AttemptBegun if is_begun else inputs.AttemptTaken)(effect)

    async def read_lease(self, wanted: effects.ReadLease) -> inputs.LeaseRead | inputs.LeaseNotRead:
        """Read the lease of an attempt that another agent leads."""
        try:
            lease = await self.leases.read(wanted.attempt.number)
        except HoldfastError as error:
            log.warning("cannot read the lease of attempt %s: %s", wanted.attempt, error)
            self._note(error)
            return inputs.LeaseNotRead(wanted.attempt, _reason(error), _is_final(error))
        return inputs.LeaseRead(wanted.attempt, lease)

    def may_be_recycled(self, effect: effects.Pull, error: Exception) -> bool:
        """Return whether the part may have been recycled at its source during the pull: no problem.

        The order to drop it arrives later. A part that is missing again when the pull is retried is
        still wanted, and really missing.
        """
        part = effect.id, effect.rank
        if not isinstance(error, ObjectNotFoundError) or part in self._missing:
            return False
        self._missing[part] = None
        while len(self._missing) > MISSING_MAX:
            del self._missing[next(iter(self._missing))]
        return True

    def _report_copy(self, effect: effects.Pull, error: Exception) -> None:
        """Report that no replica can be pulled from that host: once, until a pull succeeds."""
        if self._bad_sources.get(effect.source) is not type(error):
            self._bad_sources[effect.source] = type(error)
            self._run.events.write(
                CopyFailed(
                    step=effect.id.step,
                    attempt=effect.id.attempt.number,
                    rank=effect.rank,
                    source=effect.source,
                    reason=_reason(error),
                )
            )

    # On the threads.

    def _persist(self, effect: effects.Persist) -> None:
        try:
            self._persist_parts(effect)
        finally:
            self.opening.forget_listing()

    def _persist_parts(self, effect: effects.Persist) -> None:
        check_not_fenced(self._run.durable, effect.id)
        part_count = self._part_count(effect.id)
        layouts = None
        for rank in sorted(effect.ranks):
            part = read_part(self._ram.store, effect.id, rank, part_count)
            if layouts is None:
                layouts = self._layouts_of(part.checkpoint or self._spec(effect.id, part_count))
            copy_part(self._ram.store, self._run.durable, part, layouts)

    def _part_count(self, checkpoint: CheckpointId) -> int:
        parts = list_folder(self._ram.store, checkpoint).parts
        if not parts:
            raise StorageError(f"save {checkpoint}: none of its parts is in RAM any more")
        return next(iter(parts.values()))

    def _commit(self, effect: effects.Commit) -> Manifest:
        durable = self._run.durable
        with self.threads.alone_with(effect.id):
            # A newer attempt may have begun while the bytes were written.
            check_not_fenced(durable, effect.id)
            check_run(durable, durable.home.location_text, self._run.config.run_id)
            try:
                return commit(durable, effect.id, effect.part_count, self.reused_images.committing)
            finally:
                self.opening.forget_listing()

    def _pull(self, effect: effects.Pull, reserve: Callable[[int], str], *, is_filled: bool) -> int:
        source = self._peers.store_of(effect.source)
        part = read_part(source, effect.id, effect.rank, effect.part_count)
        # A separate store, because its slots come from `reserve`.
        target = RamStore(self._ram.store.root, reserve, self._run.clock, self._run.files)
        try:
            layouts = self._layouts_of(self._spec(effect.id, effect.part_count))
            return fetch_part(source, target, part, layouts, is_filled=is_filled)
        finally:
            target.close()

    def _spec(self, checkpoint: CheckpointId, part_count: int) -> CheckpointSpec:
        """Return the checkpoint's spec from rank 0's part, wherever that part is.

        A host of rank 0 that is cut off makes its parts durable once it misses this host. So while
        it is silent, its part is awaited in the durable tier; after one wait in vain no other one
        follows for a while, since the host may be lost.

        Raises:
            ObjectNotFoundError: no store has the part.
            CheckpointDamagedError: no store has a readable part with a spec.
        """
        clock = self._run.clock
        deadline = clock.monotonic() + SPEC_SECS
        while True:
            try:
                return self._find_spec(checkpoint, part_count)
            except ObjectNotFoundError:
                now_secs = clock.monotonic()
                if not self._peers.is_leader_silent() or now_secs < self._no_spec_until_secs:
                    raise
                if now_secs >= deadline:
                    self._no_spec_until_secs = now_secs + SPEC_REST_SECS
                    raise
            clock.sleep(SPEC_POLL_SECS)

    def _find_spec(self, checkpoint: CheckpointId, part_count: int) -> CheckpointSpec:
        problems: list[str] = []
        is_missing = True
        stores: list[ReadableStore] = [
            self._ram.store,
            *self._peers.leading_stores(),
            self._run.durable,
        ]
        for store in stores:
            try:
                first = read_part(store, checkpoint, 0, part_count)
            except HoldfastError as error:
                problems.append(str(error))
                is_missing &= isinstance(error, ObjectNotFoundError)
                continue
            if first.checkpoint is not None:
                return first.checkpoint
            is_missing = False
            problems.append(f"{part_key(checkpoint, 0, part_count)} has no checkpoint spec")
        kind = ObjectNotFoundError if is_missing else CheckpointDamagedError
        raise kind(f"save {checkpoint}: rank 0's part was not found ({'; '.join(problems)})")

    def _layouts_of(self, spec: CheckpointSpec) -> PartLayouts:
        """Return the layouts of a checkpoint's parts; most have the arrays of the one before.

        Threads that copy other checkpoints set theirs meanwhile; each continues with its own.
        """
        layouts = self._layouts = PartLayouts(spec.arrays, self._layouts)
        return layouts

    def _list_durable(self, effect: effects.ListDurable) -> inputs.DurableListed:
        remote = self._list_remote(effect)
        if effect.attempt:
            listing = self.opening.take_for_leader(effect.attempt, effect.since_step)
            listing = listing or self._list_newest(effect.since_step)
        else:
            listing = self.opening.take_for_start() or self._list_for_start()
        newer = listing
        if remote is not None and remote.newest_number > listing.newest_number:
            # Begun by a start that shares the remote tier alone, maybe from an earlier checkpoint
            # than the newest one that this listing goes back to.
            newer, listing = remote, self._list_newest(0)
        remote_only = frozenset[CheckpointId]()
        if remote is not None:
            remote_only = remote.committed_ids - listing.committed_ids
        newest = newer.attempts.get(newer.newest_number)
        return inputs.DurableListed(
            newest_attempt=newer.newest_attempt,
            leader=newest.host if newest is not None else "",
            is_begun_here=self.has_begun(newer.newest_attempt),
            is_over=newer.is_over,
            limits=last_steps(newer.attempts),
            committed=listing.committed_ids | remote_only,
            remote_only=remote_only,
            parts=listed_parts(listing.uncommitted),
        )

    def _list_remote(self, effect: effects.ListDurable) -> NewestListing | None:
        """Return the newest checkpoints of the remote tier; None without one.

        A live attempt goes on without it. A start needs it: another start may have begun there.

        Raises:
            CheckpointDamagedError, StorageError: it cannot be listed, and no attempt is live here.
        """
        remote = self._run.remote
        if remote is None:
            return None
        since_step = effect.since_step if effect.attempt else self._oldest_step_in_ram()
        if not effect.attempt:
            self._known_remote_attempts = {}
        try:
            listing = list_newest(remote.store, self._known_remote_attempts, since_step)
            if not effect.attempt:
                finish_copies(remote.store, listing)
            return listing
        except (CheckpointDamagedError, StorageError) as error:
            if self._trainers.group is None:
                raise type(error)(f"list the remote tier {remote.place}: {error}") from error
            log.warning("the remote tier %s cannot be listed now: %s", remote.place, error)
            return None

    def list_for_opening(self, *, is_for_start: bool = False) -> NewestListing:
        """List the newest checkpoints, for the later steps of an opening too."""
        changes = self.opening.changes
        since_step = self._oldest_step_in_ram()
        listing = list_newest(self._run.durable, self.known_attempts, since_step, self.has_ended)
        self.opening.keep(listing, changes, is_for_start=is_for_start)
        return listing

    def _list_for_start(self) -> NewestListing:
        """List for a start of an agent that has run for a while.

        The run may have been put back to an earlier state since, and trained on elsewhere. So the
        records are read again, of which others may have the numbers of those read before.
        """
        self.known_attempts = {}
        return self.list_for_opening()

    def _oldest_step_in_ram(self) -> int:
        return min((c.step for c in self._ram.checkpoints()), default=STEP_MAX)

    def _list_newest(self, since_step: int) -> NewestListing:
        return list_newest(self._run.durable, self.known_attempts, since_step)

    def has_begun(self, attempt: AttemptId) -> bool:
        """Return whether an agent of this folder has begun the attempt: this one, or a dead one."""
        is_put = bool(attempt) and attempt == self._put_attempt
        return is_put or is_noted(self._run.folder, attempt)

    def has_ended(self, record: AttemptRecord) -> bool:
        """Return whether an attempt of this host's name that began elsewhere has no valid lease.

        Its agent, of another user, folder or container, cannot be asked.
        """
        if record.host != self._run.config.host or self.has_begun(record.attempt):
            return False
        lease = self.leases.newest(record.attempt.number)
        return lease is None or lease.age_secs >= LEASE_SECS

    def _begin(self, wanted: effects.BeginAttempt, writers: list[LeaseWriter]) -> bool:
        config, durable = self._run.config, self._run.durable
        check_run(durable, durable.home.location_text, config.run_id)
        remote = self._run.remote
        if remote is not None:
            advice = "start again with the run's own remote tier, or with a new one"
            check_run(remote.store, remote.place, config.run_id, advice)
        start = AttemptStart(
            run_id=config.run_id,
            origin=wanted.origin,
            host=config.host,
            pid=os.getpid(),
            time=self._run.clock.now(),
        )
        # The note and the lease are written first: the next agent of this folder that finds the
        # record finds the note, and another start a fresh lease.
        self._put_attempt = wanted.attempt
        try:
            note_attempt(self._run.folder, wanted.attempt)
        except OSError as error:
            log.warning(
                "attempt %s is not noted in %s; if this agent is killed, the next start waits for "
                "the attempt's lease: %s",
                wanted.attempt,
                self._run.folder,
                error,
            )
        for writer in writers:
            writer.write(self.leases.lease(wanted.attempt, 0, 0))
        try:
            if remote is None:
                is_whole = self.opening.has_whole(wanted.attempt.number - 1)
                record = begin_attempt(durable, wanted.attempt, start, is_previous_whole=is_whole)
            else:
                record = begin_in_both(durable, remote.store, wanted.attempt, start)
        except HoldfastError:
            self.opening.forget_listing()
            # A start that fails leaves no lease; one that tries again writes another.
            for writer in writers:
                writer.remove(wanted.attempt)
            raise
        if record is None:
            self.opening.forget_listing()
        else:
            self.opening.begun(record)
        return record is not None

    def note_joined(self, attempt: AttemptId) -> None:
        """Note the attempt and the run's place beside this host's RAM, which may get its parts."""
        self.threads.query_soon(self._note_joined, attempt)

    def _note_joined(self, attempt: AttemptId) -> None:
        try:
            held = {checkpoint.attempt for checkpoint in self._ram.checkpoints()}
            note_attempt(self._run.folder, attempt)
            forget_attempts(self._run.folder, {attempt, *held})
            note_place(self._run.folder, place_of(self._run.durable.home))
        except OSError as error:
            log.info("attempt %s is not noted beside the RAM tier: %s", attempt, error)

    async def drop_foreign(self) -> set[AttemptId]:
        """Drop what RAM has of attempts that are not this run's; return these attempts."""
        return await self.threads.query(self._drop_foreign)

    def _drop_foreign(self) -> set[AttemptId]:
        ram = self._ram.store
        try:
            listed = list_checkpoints(ram)
            attempts = {checkpoint.attempt for checkpoint in listed}
            foreign = foreign_attempts(
                self._run.folder, self._run.durable, attempts, self.known_attempts
            )
            for checkpoint, listing in listed.items():
                if checkpoint.attempt in foreign:
                    log.warning(
                        "step %d in RAM is of another attempt %s than %s has, which was put back "
                        "to an earlier state or trained apart; it is dropped",
                        checkpoint.step,
                        checkpoint.attempt,
                        self._run.path,
                    )
                    remove(ram, checkpoint, listing)
        except HoldfastError as error:
            log.warning("the attempts of what is in RAM cannot be compared: %s", error)
            return set()
        return foreign

    def _note(self, error: Exception) -> None:
        self.problem = error if isinstance(error, HoldfastError) else None

    async def look_for_run(self) -> None:
        """Note at the run's home if its bucket no longer has it."""
        await self.threads.look(self._look_for_run)

    def _look_for_run(self) -> None:
        """Read whether a bucket still has the run, and note it at the run's home if not.

        A directory needs no read: its home knows. If the bucket cannot be read, nothing is noted.
        """
        durable = self._run.durable
        if not durable.is_remote:
            return
        try:
            text = deletion_text(durable, durable.home.location_text, self._run.config.run_id)
        except StorageError as error:
            log.info("it cannot be read whether the bucket still has the run: %s", error)
            return
        if text is not None:
            durable.home.note_gone(text)

    async def _explained(self, error: Exception) -> Exception:
        """Return why an operation failed: objects of a run that was deleted are missing."""
        if isinstance(error, ObjectNotFoundError):
            await self.look_for_run()
            reason = await self.threads.query(self._run.durable.home.unusable_reason)
            if reason is not None:
                return StorageError(reason)
        return error

    def _reason_here(self, error: Exception) -> str:
        """Return the reason of a failed save, as text; all hosts of a job report it."""
        config = self._run.config
        return f"host {config.host}: {_reason(error)}" if config.peers else _reason(error)

    async def _newer_attempt(self, error: Exception) -> AttemptId:
        """Return the attempt that fenced a failed operation; none if it failed otherwise."""
        if not isinstance(error, FencedError):
            return NO_ATTEMPT
        try:
            return await self.threads.query(newest_attempt, self._run.durable)
        except HoldfastError:
            return NO_ATTEMPT


def _is_final(error: Exception) -> bool:
    return isinstance(error, StorageRefusedError)


def _reason(error: Exception) -> str:
    return str(error) or repr(error)
