"""List what one process of a job can read: its host's RAM, the other hosts' RAM, durable tiers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.clock import Clock
from holdfast.engine.lifecycle.catalog import Listing, list_folder
from holdfast.engine.reading.view import RamTiers, View, newest_view_of, view_of
from holdfast.errors import HoldfastError
from holdfast.format.names import CheckpointId
from holdfast.host.wire.protocol import Empty, PeerAddresses
from holdfast.peers.address import PeerAddress, parsed_addresses
from holdfast.store.contract import ReadableStore
from holdfast.store.durable import DurableStore
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.opening.job_context import JobContext

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunViews:
    """The views of the run that a process of its job has. Owned by the training thread."""

    _job: JobContext
    _session: AgentSession
    _clock: Clock

    def load(self) -> View:
        """List what can be read now in this host's RAM, other hosts' RAM and the durable tiers."""
        return self._view(view_of)

    def load_newest(self) -> View:
        """List the newest checkpoints that can be read now, with few requests.

        Until this process has saved, the durable tier is listed by the agent, once for all ranks of
        this host; the remote tier is listed by each rank. If one of these checkpoints cannot be
        read, `load` lists what is there then.
        """
        newest = self._session.newest_listing()
        return self._view(functools.partial(newest_view_of, newest=newest, remote=self._job.remote))

    def load_here(self) -> View:
        """List what this host's RAM and the run's directory or bucket have."""
        tiers = RamTiers(self._session.place.ram_folder, (), self._clock)
        return view_of([*tiers.stores(), self._job.durable], self._job.durable)

    def list_ram(self, checkpoint: CheckpointId) -> Listing:
        """List what this host's RAM has of a checkpoint."""
        stores = RamTiers(self._session.place.ram_folder, (), self._clock).stores()
        return list_folder(stores[0], checkpoint) if stores else Listing()

    def _view(self, view_of_stores: Callable[[list[ReadableStore], DurableStore], View]) -> View:
        job = self._job
        job.attempt.id = self._session.place.attempt
        view = view_of_stores(self._stores(), job.durable)
        if view.unlisted and job.peers.update_addresses(_addresses(self._session)):
            # A restarted agent serves at another address than when the job began.
            view = view_of_stores(self._stores(), job.durable)
        return view

    def _stores(self) -> list[ReadableStore]:
        job = self._job
        tiers = RamTiers(self._session.place.ram_folder, job.peers.ram_stores(), self._clock)
        remote = [job.remote] if job.remote is not None else []
        return [*tiers.stores(), job.durable, *remote]


def ram_of(job: JobContext, session: AgentSession, clock: Clock, rank: int) -> ReadableStore | None:
    """Return the RAM tier of a rank's host; None: it cannot be read from here."""
    host, own = job.hosts[rank], job.config.host
    if host != own:
        return job.peers.by_host().get(host)
    return next(iter(RamTiers(session.place.ram_folder, (), clock).stores()), None)


def _addresses(session: AgentSession) -> dict[str, PeerAddress]:
    """Return the addresses of other hosts that this host's agent knows; none if it fails."""
    try:
        return parsed_addresses(session.call("peers", Empty(), PeerAddresses).addresses)
    except HoldfastError as error:
        log.warning(
            "the addresses of the other hosts are unknown, the agent's call failed: %s", error
        )
        return {}
