"""Write and read the leases of attempts in all durable tiers, on threads that nothing waits for.

A service that does not answer holds a request for minutes. The leases in the other tier must be
renewed meanwhile: a start on another host would take the attempt for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import wait

from holdfast import waits
from holdfast.coordination import effects, inputs
from holdfast.coordination.lease_seen import LeaseSeen
from holdfast.engine.lifecycle.attempts import newest_attempt, newest_number
from holdfast.engine.lifecycle.leases import Lease, Leases, LeaseWriter, newest_lease
from holdfast.errors import HoldfastError
from holdfast.format.names import NO_ATTEMPT, AttemptId
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.attached_trainers import AttachedTrainers
from holdfast.host.tiers.store_threads import in_thread
from holdfast.host.wire.agent_directory import user_name
from holdfast.store.durable import DurableStore

RELEASE_SECS = 5.0
"""How long to wait for the removal of leases, and for a look for newer attempts.

A lease that is not removed delays a start elsewhere.
"""

LOOKS_EVERY = 6
"""How many renewals there are between two looks for a newer attempt: half a minute."""

LeaseCall = Callable[[LeaseWriter], None]


class TierLeases:
    """The calls on one tier's leases, one at a time; a later call replaces one that waits.

    Owned by the event loop.
    """

    def __init__(self, writer: LeaseWriter) -> None:
        self.writer = writer
        self._next: LeaseCall | None = None
        self._calling: asyncio.Task[None] | None = None

    def call_soon(self, call: LeaseCall) -> asyncio.Task[None]:
        """Make a call soon; the task ends once no call is left."""
        self._next = call
        if self._calling is None or self._calling.done():
            self._calling = asyncio.create_task(self._call())
        return self._calling

    async def _call(self) -> None:
        while self._next is not None:
            call, self._next = self._next, None
            await in_thread(functools.partial(call, self.writer))


class AttemptLeases:
    """The leases in the durable tiers of one agent's run. Owned by the event loop."""

    def __init__(self, run: AgentRun, trainers: AttachedTrainers) -> None:
        self._run = run
        self._trainers = trainers
        self._tier_leases: dict[DurableStore, TierLeases] = {}

    async def renew(self, wanted: effects.RenewLease) -> inputs.LeaseWritten:
        """Write the lease of the attempt that this host leads, in each durable tier.

        One tier that answers is enough for the next renewal, which the other one gets in its turn.
        Every `LOOKS_EVERY` times a newer attempt is looked for: one that saves to RAM alone learns
        of it nowhere else.
        """
        lease = self.lease(
            wanted.attempt, wanted.incarnation, wanted.counter, is_storing=wanted.is_storing
        )
        calls = self._call_leases(lambda writer: writer.write(lease))
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        is_due = wanted.counter % LOOKS_EVERY == 0
        newer = await self._newer_than(wanted.attempt) if is_due else NO_ATTEMPT
        return inputs.LeaseWritten(wanted.attempt, newer)

    async def _newer_than(self, attempt: AttemptId) -> AttemptId:
        """Return the newest attempt of the run's directory, if it is newer and can be read soon."""

        def look() -> AttemptId:
            # What cannot be read is no reason to stop: the stores check it again.
            with contextlib.suppress(HoldfastError):
                if newest_number(self._run.durable) > attempt.number:
                    return newest_attempt(self._run.durable)
            return NO_ATTEMPT

        looking = asyncio.ensure_future(in_thread(look))
        await asyncio.wait([looking], timeout=RELEASE_SECS)
        return looking.result() if looking.done() else NO_ATTEMPT

    async def release(self, wanted: effects.ReleaseLease) -> inputs.LeaseWritten:
        """Remove the lease of an attempt that has ended."""
        calls = self._call_leases(lambda writer: writer.remove(wanted.attempt))
        # The agent may end with this.
        await asyncio.wait(calls, timeout=RELEASE_SECS)
        return inputs.LeaseWritten(wanted.attempt)

    async def read(self, number: int) -> LeaseSeen | None:
        """As `newest`, on a thread of its own."""
        return await in_thread(lambda: self.newest(number))

    def newest(self, number: int) -> LeaseSeen | None:
        """Return the newest lease of the attempt with that number; None if no tier has one.

        Raises:
            HoldfastError: No tier can be read.
        """
        return newest_lease(self._leases(), number)

    def writers(self) -> list[LeaseWriter]:
        """Return what writes the leases of each tier."""
        return [leases.writer for leases in self._leases_by_tier()]

    def _call_leases(self, call: LeaseCall) -> list[asyncio.Task[None]]:
        """Begin a call on the leases of each durable tier."""
        return [leases.call_soon(call) for leases in self._leases_by_tier()]

    def _leases_by_tier(self) -> list[TierLeases]:
        """Return what writes the leases of each tier; the run may have got another remote tier."""
        run_id, before = self._run.config.run_id, self._tier_leases
        self._tier_leases = {
            store: before.get(store) or TierLeases(LeaseWriter(Leases(store.fleeting, run_id)))
            for store in self._durable_tiers()
        }
        return list(self._tier_leases.values())

    def _durable_tiers(self) -> list[DurableStore]:
        remote = self._run.remote
        return [self._run.durable, *([remote.store] if remote is not None else [])]

    def _leases(self) -> list[Leases]:
        """Return the leases of each durable tier."""
        run_id = self._run.config.run_id
        return [Leases(store.fleeting, run_id) for store in self._durable_tiers()]

    def lease(
        self, attempt: AttemptId, incarnation: int, counter: int, *, is_storing: bool = False
    ) -> Lease:
        """Return the lease of an attempt that this host leads or begins."""
        config, group = self._run.config, self._trainers.group
        first = next(iter(group.present), None) if group is not None else None
        return Lease(
            run_id=config.run_id,
            attempt=attempt,
            host=config.host,
            pid=first.pid if first is not None else os.getpid(),
            user=user_name(),
            incarnation=incarnation,
            counter=counter,
            is_storing=is_storing,
        )

    def remove_old(self, attempt: AttemptId) -> None:
        """Remove the leases of earlier attempts, which are only leftovers.

        Storage that does not answer holds the calling thread for `RELEASE_SECS` at most.
        """
        removals = [
            waits.begin_call(functools.partial(leases.remove_before, attempt.number))
            for leases in self._leases()
        ]
        wait(removals, RELEASE_SECS)
