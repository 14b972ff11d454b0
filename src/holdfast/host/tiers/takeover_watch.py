"""Find that another attempt has taken the run over in its remote tier alone.

The agent that copies there looks for it: copies may be rare, and a start on another host may have
another directory.
"""

from __future__ import annotations

import asyncio
import logging

from holdfast.coordination import effects, inputs
from holdfast.engine.lifecycle.attempts import newest_number
from holdfast.engine.tiers.shared_attempts import check_same_run
from holdfast.errors import HoldfastError
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.driver import Driver
from holdfast.host.tiers.mirroring import may_copy
from holdfast.host.tiers.storage_worker import StorageWorker
from holdfast.host.tiers.store_threads import in_thread

WATCH_SECS = 30.0
"""How often it is read whether a newer attempt has begun in the remote tier alone."""

log = logging.getLogger(__name__)


class TakeoverWatch:
    """The look for a newer attempt in the remote tier. Owned by the event loop."""

    def __init__(self, run: AgentRun, driver: Driver, storage_worker: StorageWorker) -> None:
        self._run = run
        self._driver = driver
        self._storage_worker = storage_worker
        self._newer_attempt = 0
        """The number of an attempt that is newer in the remote tier than the one here; 0: none."""

    async def run(self) -> None:
        """Look for a newer attempt in the remote tier, until cancelled; copies may be rare."""
        while True:
            await asyncio.sleep(WATCH_SECS)
            await self.look()

    async def look(self) -> None:
        """Stop the attempt here if a newer one was seen in the remote tier, also the time before.

        An attempt of this host is recorded there before it begins here. So one look is not enough.
        """
        remote = self._run.remote
        if remote is None or not may_copy(self._run, self._driver):
            return
        present, durable = self._driver.attempt, self._run.durable

        def look() -> int:
            newest = newest_number(remote.store)
            if newest > present.number:
                # Another run may be there by now.
                check_same_run(durable, remote.store, self._run.config.run_id)
            return newest

        try:
            newest = await in_thread(look)
        except HoldfastError as error:
            log.info("the attempts in the remote tier cannot be used: %s", error)
            return
        if newest <= self._driver.attempt.number:
            return
        if newest == self._newer_attempt:
            await self._submit_listing()
        self._newer_attempt = newest

    async def _submit_listing(self) -> None:
        """Submit a listing of both tiers: a newer attempt has begun in the remote tier alone."""
        listed = await self._storage_worker.list_durable(
            effects.ListDurable(self._driver.attempt, since_step=0)
        )
        if not isinstance(listed, inputs.DurableListed):
            return
        if listed.newest_attempt > self._driver.attempt:
            log.error("attempt %s has begun in the remote tier", listed.newest_attempt)
            self._driver.submit(listed)
