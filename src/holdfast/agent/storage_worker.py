"""What the agreement wants done in the stores, and what came of it, as facts.

Nothing here decides. Each deed runs on a thread, and always ends with a fact: what went wrong is
told to the agreement, which tries again, or tells the trainers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast.agent.state import AgentState
from holdfast.coordination import effects, inputs
from holdfast.coordination.settings import PULLS_MAX
from holdfast.engine.lifecycle.attempts import (
    AttemptStart,
    begin_attempt,
    newest_attempt,
    read_attempts,
)
from holdfast.engine.lifecycle.catalog import Listing, list_checkpoints
from holdfast.engine.lifecycle.commit import check_not_fenced, commit, read_part, remove
from holdfast.engine.lifecycle.leases import Lease, Leases, LeaseWriter
from holdfast.engine.lifecycle.run import check_run
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.transfer.copy import copy_part
from holdfast.engine.transfer.fetch import fetch_part
from holdfast.errors import (
    CheckpointDamagedError,
    FencedError,
    HoldfastError,
    ObjectNotFoundError,
    StorageError,
)
from holdfast.format.names import CheckpointId, part_key
from holdfast.format.records import CheckpointSpec, Manifest
from holdfast.format.timeline import last_steps
from holdfast.peers.directory import PeerDirectory
from holdfast.store.contract import Store
from holdfast.store.ram import RamStore

log = logging.getLogger(__name__)
T = TypeVar("T")

MISSING_MAX = 256
"""The newest parts that are remembered as missing at their source."""


class StorageWorker:
    """The agent's threads at its stores. `on_commit` is told of each manifest, in the loop."""

    def __init__(
        self, state: AgentState, peers: PeerDirectory, on_commit: Callable[[Manifest, float], None]
    ) -> None:
        self._state = state
        self._peers = peers
        self._on_commit = on_commit
        # What is written one after another must not hold up a commit, nor a start, nor copies.
        self._writing = ThreadPoolExecutor(1, "holdfast-write")
        self._committing = ThreadPoolExecutor(1, "holdfast-commit")
        self._looking = ThreadPoolExecutor(1, "holdfast-look")
        # Storage that hangs in anything else must not make a live attempt look dead.
        self._leasing = ThreadPoolExecutor(1, "holdfast-lease")
        self._pulling = ThreadPoolExecutor(PULLS_MAX, "holdfast-copies")
        self._changed = threading.Condition()
        self._in_hand: set[CheckpointId] = set()
        self._has_told_ram = False
        self._bad_sources: dict[str, type[Exception]] = {}
        self._missing: dict[tuple[CheckpointId, int], None] = {}
        """Parts that were not found where they were to be pulled from, in the order of that."""
        self._leases = Leases(state.durable.directory, state.config.run_id, state.clock)
        self._lease_writer = LeaseWriter(self._leases)
        self.problem: HoldfastError | None = None
        """What a listing or a beginning met last."""
        self._began_secs: dict[CheckpointId, float] = {}
        self._last_secs: float | None = None
        self._layouts: PartLayouts | None = None

    def close(self) -> None:
        """Ends the threads, after what they are doing."""
        pools = (self._writing, self._committing, self._looking, self._pulling, self._leasing)
        for pool in pools:
            pool.shutdown(cancel_futures=True)

    async def query(self, call: Callable[..., T], *arguments: object) -> T:
        """Runs a call that asks the stores for something."""
        return await asyncio.get_running_loop().run_in_executor(self._looking, call, *arguments)

    async def write(self, call: Callable[..., T], *arguments: object) -> T:
        """Runs a call that changes the stores, after those before it."""
        return await asyncio.get_running_loop().run_in_executor(self._writing, call, *arguments)

    @contextlib.contextmanager
    def alone_with(self, checkpoint: CheckpointId) -> Iterator[None]:
        """Meanwhile no other thread here commits that checkpoint, or removes it.

        A commit amid a removal would name bytes that are gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: checkpoint not in self._in_hand)
            self._in_hand.add(checkpoint)
        try:
            yield
        finally:
            with self._changed:
                self._in_hand.discard(checkpoint)
                self._changed.notify_all()

    # Deeds.

    async def persist(self, wanted: effects.Persist) -> inputs.PartsWritten | inputs.WriteFailed:
        """Makes parts that stand here durable."""
        began_secs = self._state.clock.monotonic()
        self._began_secs.setdefault(wanted.id, began_secs)
        if self._last_secs is not None:
            self._state.durable_at_secs = began_secs + self._last_secs
        try:
            await self.write(self._persist, wanted)
        except Exception as error:
            newer = await self._newer_attempt(error)
            log.warning("parts of %s are not durable: %s", wanted.id, error)
            return inputs.WriteFailed(wanted.id, _reason(error), newer)
        return inputs.PartsWritten(wanted.id, wanted.ranks)

    async def commit(self, wanted: effects.Commit) -> inputs.CommitWritten | inputs.CommitFailed:
        """Writes the manifest of what is durable."""
        loop = asyncio.get_running_loop()
        try:
            manifest = await loop.run_in_executor(self._committing, self._commit, wanted)
        except Exception as error:
            newer = await self._newer_attempt(error)
            log.warning("%s is not committed: %s", wanted.id, error)
            return inputs.CommitFailed(wanted.id, _reason(error), newer)
        now_secs = self._state.clock.monotonic()
        self._last_secs = now_secs - self._began_secs.pop(wanted.id, now_secs)
        self._began_secs.clear()
        self._on_commit(manifest, self._last_secs)
        return inputs.CommitWritten(wanted.id)

    async def pull(self, wanted: effects.Pull) -> inputs.ReplicaSealed | inputs.PullFailed:
        """Copies a part out of another host's RAM: what no rank here has put into a slot."""
        filled = await self._state.copies.wait(wanted.id, wanted.rank)
        slots = self._state.desk.copying(wanted.id, wanted.rank, filled)
        loop = asyncio.get_running_loop()
        try:
            with slots as reserve:
                pull = functools.partial(self._pull, wanted, reserve, is_filled=filled is not None)
                self._state.pulled_bytes += await loop.run_in_executor(self._pulling, pull)
        except Exception as error:
            if self._may_be_given_up(wanted, error):
                log.info("part %d of %s is gone: %s", wanted.rank, wanted.id, error)
            else:
                log.warning("part %d of %s is not copied: %s", wanted.rank, wanted.id, error)
                self._tell_copy(wanted, error)
            return inputs.PullFailed(wanted.id, wanted.rank)
        self._bad_sources.pop(wanted.source, None)
        return inputs.ReplicaSealed(wanted.id, wanted.rank, wanted.part_count)

    async def list_durable(self) -> inputs.DurableListed | inputs.ListingFailed:
        """Tells what the durable tier holds."""
        try:
            return await self.query(self._list_durable)
        except Exception as error:
            log.warning("the durable tier is not listed: %s", error)
            self._note(error)
            return inputs.ListingFailed(_reason(error))

    async def begin(
        self, wanted: effects.BeginAttempt
    ) -> inputs.AttemptBegun | inputs.AttemptTaken | inputs.BeginFailed:
        """Puts an attempt's record, if nobody else has."""
        try:
            is_begun = await self.query(self._begin, wanted)
        except Exception as error:
            log.warning("attempt %d is not begun: %s", wanted.attempt, error)
            self._note(error)
            return inputs.BeginFailed(wanted, _reason(error))
        return (inputs.AttemptBegun if is_begun else inputs.AttemptTaken)(wanted)

    async def renew_lease(self, wanted: effects.RenewLease) -> inputs.LeaseWritten:
        """Writes the lease of the attempt that this host leads."""
        lease = self._lease(wanted.attempt, wanted.incarnation, wanted.counter)
        await self._lease_call(self._lease_writer.write, lease)
        return inputs.LeaseWritten(wanted.attempt)

    async def release_lease(self, wanted: effects.ReleaseLease) -> inputs.LeaseWritten:
        """Removes the lease of an attempt that has ended."""
        await self._lease_call(self._lease_writer.remove, wanted.attempt)
        return inputs.LeaseWritten(wanted.attempt)

    async def read_lease(self, wanted: effects.ReadLease) -> inputs.LeaseRead | inputs.LeaseNotRead:
        """Reads the lease of an attempt that another host leads."""
        try:
            lease = await self._lease_call(self._leases.read, wanted.attempt)
        except HoldfastError as error:
            log.warning("the lease of attempt %d is not read: %s", wanted.attempt, error)
            self._note(error)
            return inputs.LeaseNotRead(wanted.attempt, _reason(error))
        return inputs.LeaseRead(wanted.attempt, lease)

    async def _lease_call(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._leasing, call, *arguments)

    def _lease(self, attempt: int, incarnation: int, counter: int) -> Lease:
        config, group = self._state.config, self._state.group
        first = next(iter(group.present), None) if group is not None else None
        return Lease(
            run_id=config.run_id,
            attempt=attempt,
            host=config.host,
            pid=first.pid if first is not None else os.getpid(),
            incarnation=incarnation,
            counter=counter,
        )

    def drop(self, checkpoint: CheckpointId) -> None:
        """Gives up a checkpoint's RAM here; what fails is told once, and leaves it in use."""
        try:
            listing = list_checkpoints(self._state.ram).get(checkpoint, Listing())
            remove(self._state.ram, checkpoint, listing)
        except StorageError as error:
            self.report_ram(error)

    def in_ram(self) -> dict[CheckpointId, inputs.Listed]:
        """The checkpoints in RAM here, and the ranks whose part is whole; none where RAM fails."""
        try:
            return _listed(list_checkpoints(self._state.ram))
        except StorageError as error:
            self.report_ram(error)
            return {}

    def report_ram(self, error: StorageError) -> None:
        """Says once that the RAM tier fails what the agent does to it."""
        if not self._has_told_ram:
            self._has_told_ram = True
            self._state.events.write("ram_unavailable", reason=str(error))

    def _may_be_given_up(self, wanted: effects.Pull, error: Exception) -> bool:
        """Whether the part was recycled at its source while it was pulled, which is no problem.

        The order that says so arrives after that. A part that is missing once more when the pull is
        tried again is still wanted, and really missing.
        """
        part = wanted.id, wanted.rank
        if not isinstance(error, ObjectNotFoundError) or part in self._missing:
            return False
        self._missing[part] = None
        while len(self._missing) > MISSING_MAX:
            del self._missing[next(iter(self._missing))]
        return True

    def _tell_copy(self, wanted: effects.Pull, error: Exception) -> None:
        """Says that a copy cannot be had from that host: once, until the next one can."""
        if self._bad_sources.get(wanted.source) is not type(error):
            self._bad_sources[wanted.source] = type(error)
            self._state.events.write(
                "copy_failed",
                wanted.id,
                rank=wanted.rank,
                source=wanted.source,
                reason=_reason(error),
            )

    # On the threads.

    def _persist(self, wanted: effects.Persist) -> None:
        state = self._state
        check_not_fenced(state.durable, wanted.id)
        part_count = self._part_count(wanted.id)
        layouts = None
        for rank in sorted(wanted.ranks):
            part = read_part(state.ram, wanted.id, rank, part_count)
            if layouts is None:
                layouts = self._layouts_of(part.checkpoint or self._spec(wanted.id, part_count))
            copy_part(state.ram, state.durable, part, layouts)

    def _part_count(self, checkpoint: CheckpointId) -> int:
        parts = list_checkpoints(self._state.ram).get(checkpoint, Listing()).parts
        if not parts:
            raise StorageError(f"save {checkpoint}: none of its parts stands in RAM any more")
        return next(iter(parts.values()))

    def _commit(self, wanted: effects.Commit) -> Manifest:
        durable = self._state.durable
        with self.alone_with(wanted.id):
            # A newer attempt may have begun while the bytes were written.
            check_not_fenced(durable, wanted.id)
            check_run(durable, str(durable.root), self._state.config.run_id)
            return commit(durable, wanted.id, wanted.part_count)

    def _pull(self, wanted: effects.Pull, reserve: Callable[[int], str], *, is_filled: bool) -> int:
        state = self._state
        source = self._peers.store_of(wanted.source)
        part = read_part(source, wanted.id, wanted.rank, wanted.part_count)
        target = RamStore(state.ram.root, reserve, state.clock, state.files)
        try:
            layouts = self._layouts_of(self._spec(wanted.id, wanted.part_count))
            return fetch_part(source, target, part, layouts, is_filled=is_filled)
        finally:
            target.close()

    def _spec(self, checkpoint: CheckpointId, part_count: int) -> CheckpointSpec:
        """What rank 0's part says of the checkpoint, from wherever that part stands."""
        state = self._state
        problems: list[str] = []
        is_missing = True
        stores: list[Store] = [state.ram, *self._peers.leading_stores(), state.durable]
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
            problems.append(f"{part_key(checkpoint, 0, part_count)} says nothing of it")
        kind = ObjectNotFoundError if is_missing else CheckpointDamagedError
        raise kind(f"save {checkpoint}: rank 0's part was not found ({'; '.join(problems)})")

    def _layouts_of(self, spec: CheckpointSpec) -> PartLayouts:
        """The layouts of a checkpoint's parts; most have the arrays of the one before.

        Threads that copy other checkpoints set theirs meanwhile; each goes on with its own.
        """
        layouts = self._layouts = PartLayouts(spec.arrays, self._layouts)
        return layouts

    def _list_durable(self) -> inputs.DurableListed:
        durable = self._state.durable
        attempts = read_attempts(durable)
        newest = newest_attempt(durable)
        listed = list_checkpoints(durable)
        committed = {c for c, listing in listed.items() if listing.is_committed}
        return inputs.DurableListed(
            newest_attempt=newest,
            leader=attempts[newest].host if newest in attempts else "",
            limits=last_steps(attempts),
            committed=frozenset(committed),
            parts=_listed({c: found for c, found in listed.items() if c not in committed}),
        )

    def _begin(self, wanted: effects.BeginAttempt) -> bool:
        config, durable = self._state.config, self._state.durable
        check_run(durable, str(durable.root), config.run_id)
        start = AttemptStart(
            run_id=config.run_id,
            origin=wanted.origin,
            host=config.host,
            pid=os.getpid(),
            time=self._state.clock.now(),
        )
        # The lease comes first: a start that finds the record finds a lease that is fresh.
        self._lease_writer.write(self._lease(wanted.attempt, 0, 0))
        is_begun = begin_attempt(durable, wanted.attempt, start) is not None
        if is_begun:
            with contextlib.suppress(StorageError):
                self._leases.remove_before(wanted.attempt)
        return is_begun

    def _note(self, error: Exception) -> None:
        self.problem = error if isinstance(error, HoldfastError) else None

    async def _newer_attempt(self, error: Exception) -> int:
        """The attempt that forbids what failed; 0 where it failed for another reason."""
        if not isinstance(error, FencedError):
            return 0
        try:
            return await self.query(newest_attempt, self._state.durable)
        except StorageError:
            return 0


def _listed(listings: dict[CheckpointId, Listing]) -> dict[CheckpointId, inputs.Listed]:
    """Those whose parts are of one plan; other ones are no checkpoint."""
    found = {}
    for checkpoint, listing in listings.items():
        counts = set(listing.parts.values())
        if len(counts) == 1:
            ranks = frozenset(listing.parts)
            found[checkpoint] = inputs.Listed(part_count=counts.pop(), ranks=ranks)
    return found


def _reason(error: Exception) -> str:
    return str(error) or repr(error)
