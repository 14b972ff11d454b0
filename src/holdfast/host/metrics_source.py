"""Gather the metrics of one agent: its counts, and gauges of the state that it has now.

Which losses the run survives is known only after other hosts have answered, which may take seconds.
So the leading agent asks them in the background, at most every `OUTLOOK_SECS`, and only while
metrics are gathered; a gathering never waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.attached_trainers import AttachedTrainers
from holdfast.host.driver.driver import Driver
from holdfast.host.tiers.ram_tier import RamTier
from holdfast.observe.metrics.measures import Measures
from holdfast.observe.metrics.metric_families import AgentMetrics
from holdfast.observe.run_status import JobStatus

OUTLOOK_SECS = 2.0


class MetricsSource:
    """The metrics of one agent; owned by the event loop.

    Args:
        run: The agent's run.
        ram: This host's RAM tier.
        trainers: The attached trainers.
        driver: The driver of this host's node.
        measures: What the agent has counted.
        ask_job: Asks all hosts for the state of the run.
    """

    def __init__(
        self,
        run: AgentRun,
        ram: RamTier,
        trainers: AttachedTrainers,
        driver: Driver,
        measures: Measures,
        ask_job: Callable[[], Awaitable[JobStatus]],
    ) -> None:
        self._run = run
        self._ram = ram
        self._trainers = trainers
        self._driver = driver
        self._measures = measures
        self._ask_job = ask_job
        self._asking: asyncio.Task[None] | None = None
        self._asked_secs = -OUTLOOK_SECS
        self._of_job: dict[str, float] = {}

    def gather(self) -> AgentMetrics:
        """Return all metrics, with what other hosts have answered so far."""
        self._refresh()
        return AgentMetrics(
            run=self._run.path,
            host=self._run.config.host,
            families=self._measures.families(self._gauges()),
        )

    async def close(self) -> None:
        """End the question to the other hosts, if one is under way."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    def _gauges(self) -> dict[str, float]:
        view = self._driver.view
        present = self._trainers.present
        gauges = {
            "holdfast_attempt": float(self._run.events.attempt),
            "holdfast_trainers": float(len(present)),
            "holdfast_pending_checkpoints": float(len(view.pending_ids())),
            "holdfast_ram_slots_bytes": float(self._ram.pool.size_bytes()),
            "holdfast_ram_free_bytes": float(
                self._ram.pool.left_bytes() if self._trainers.job.has_ram else 0
            ),
        }
        highest = self._trainers.published().highest
        if highest >= 0:
            gauges["holdfast_step"] = float(highest)
        return gauges | (self._of_job if view.is_leading else {})

    def _refresh(self) -> None:
        now_secs = self._run.clock.monotonic()
        is_due = now_secs - self._asked_secs >= OUTLOOK_SECS
        if self._asking is None and is_due and self._driver.view.is_leading:
            self._asked_secs = now_secs
            self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        try:
            self._of_job = gauges_of(await self._ask_job())
        finally:
            self._asking = None


def gauges_of(job: JobStatus) -> dict[str, float]:
    """Return the gauges of a run on all its hosts."""
    gauges = {
        "holdfast_hosts": float(len(job.hosts)),
        "holdfast_silent_hosts": float(sum(1 for host in job.hosts if host.problem)),
    }
    if job.goes_on_from:
        survived = job.goes_on_from[0].lost_domains_max
        domains = len({host.domain for host in job.hosts})
        gauges["holdfast_survivable_domain_losses"] = float(
            domains if survived is None else survived
        )
    elif job.leader_answers:
        gauges["holdfast_survivable_domain_losses"] = 0.0
    return gauges
