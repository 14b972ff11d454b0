"""Find the hosts of a job and the addresses of their agents, and join this host's agent.

The processes exchange this through the framework's key-value service. In a job of one host no agent
serves other hosts, and no other host is contacted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast import launchers, waits
from holdfast.adapt.contract import Processes
from holdfast.clock import Clock
from holdfast.coordination.messages import REASON_CHARS_MAX
from holdfast.engine.reading.exchange import ExchangePlace
from holdfast.errors import AgentUnavailableError
from holdfast.format.names import NO_ATTEMPT, AttemptId
from holdfast.host.wire.client import AgentClient
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.launch import ensure_agent, opening_secs
from holdfast.host.wire.protocol import AgentStatus, Attach, Expect
from holdfast.local_agent.client import AgentGoneError
from holdfast.local_agent.launch import LEAVING_POLL_SECS, START_SECS
from holdfast.local_agent.place import host_name
from holdfast.peers.address import PeerAddress, parsed_addresses
from holdfast.peers.config import PeerConfig, read_token
from holdfast.store.durable import DurableStore
from holdfast.store.location import RunLocation, open_durable
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.opening.opening import OpenRun
from holdfast.trainer.opening.ram_tier import check_foreign_ram
from holdfast.trainer.options import Options
from holdfast.trainer.planning import NO_REPLICAS, Replicas
from holdfast.trainer.ranks.peer_token import share_token
from holdfast.trainer.ranks.rendezvous import Rendezvous
from holdfast.trainer.ranks.topology import JobHosts, meet, place_of

if TYPE_CHECKING:
    from holdfast.peers.store import PeerStore


log = logging.getLogger(__name__)


@dataclass(slots=True)
class PresentAttempt:
    """The present attempt, which is set after the process has joined."""

    id: AttemptId = NO_ATTEMPT


class JobPeers:
    """The RAM of the job's other hosts, the nearest first. Owned by the training thread."""

    def __init__(
        self, addresses: Mapping[str, PeerAddress], store_at: Callable[[PeerAddress], PeerStore]
    ) -> None:
        self._addresses = dict(addresses)
        self._store_at = store_at
        self._stores = {host: store_at(address) for host, address in addresses.items()}

    def by_host(self) -> dict[str, PeerStore]:
        """Return each host's RAM store by the host's name."""
        return dict(self._stores)

    def ram_stores(self) -> list[PeerStore]:
        """Return each host's RAM store, at the newest address known."""
        return list(self._stores.values())

    def update_addresses(self, addresses: Mapping[str, PeerAddress]) -> bool:
        """Adopt newer addresses of the job's hosts and return whether any was newer."""
        has_changed = False
        for host, address in addresses.items():
            present = self._addresses.get(host)
            if present is not None and address.since > present.since:
                self._stores[host].close()
                self._addresses[host], self._stores[host] = address, self._store_at(address)
                has_changed = True
        return has_changed

    def close(self) -> None:
        """Close the connections to other hosts."""
        for store in self._stores.values():
            store.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """What one process needs to join its host's agent and to read from the other hosts.

    Attributes:
        config: The agent of this host.
        attach: The request to join it.
        attempt: The newest attempt known here; set once the process has joined.
        replicas: The failure domains, from which replicas are planned.
        peers: The RAM of the other hosts.
        durable: The durable tier, for reading.
        remote: The remote tier, for reading; None if the run has none.
        hosts: The host of each rank.
    """

    config: AgentConfig
    attach: Attach
    attempt: PresentAttempt
    replicas: Replicas
    peers: JobPeers
    durable: DurableStore
    remote: DurableStore | None = None
    hosts: tuple[str, ...] = ()

    @property
    def reads_together(self) -> bool:
        """Whether several ranks may read from a bucket, and so divide what they read."""
        is_remote = self.durable.is_remote or (self.remote is not None and self.remote.is_remote)
        return len(self.hosts) > 1 and is_remote

    def exchange_place(
        self, session: AgentSession, is_lost: Callable[[], bool]
    ) -> ExchangePlace | None:
        """Return where this rank passes on what it has read; None without a RAM tier."""
        ram_folder = session.place.ram_folder
        if ram_folder is None:
            return None
        return ExchangePlace(
            rank=session.rank,
            ram_folder=ram_folder,
            hosts=self.hosts,
            peers=self.peers.by_host(),
            is_lost=is_lost,
        )

    def close(self) -> None:
        """Close the connections to other hosts, and release the run's directory."""
        self.peers.close()
        self.durable.home.release()


def find_job(
    run: OpenRun, options: Options, rendezvous: Rendezvous, processes: Processes, clock: Clock
) -> JobContext:
    """Find the job's hosts, and start this host's agent if there are several.

    Raises:
        InvalidArgumentError: Two ranks of one host contradict each other, or two ranks would save
            different steps, or take a failed save differently.
        AgentUnavailableError: An agent does not start, or serves no other hosts; or RAM here is
            that of another place of the run.
        StorageError: The run's token cannot be written.
        ProcessLostError: Another process did not join in time.
    """
    with rendezvous.propagating_errors("look at this host's RAM"):
        check_foreign_ram(run.run_id, run.durable, clock)
    hosts = meet(rendezvous, place_of(processes, options, None))
    rendezvous.reports.hosts = hosts.host_of_each()
    attempt = PresentAttempt()
    config = _config(run, options, None)
    peers = JobPeers({}, _nowhere)
    if hosts.count > 1:
        token_file = share_token(run.location, run.run_id, rendezvous, clock)
        with rendezvous.propagating_errors("meet the hosts"):
            config = _config(run, options, options.peer_config(token_file))
            address = _start(config, _expect(run, options, processes), clock)
        hosts = meet(rendezvous, place_of(processes, options, address))
        peers = _job_peers(run, config, hosts, attempt, clock)
    attach = _attach(run, options, processes, hosts)
    replicas = Replicas(hosts.domains(), attach.copies) if hosts.count > 1 else NO_REPLICAS
    return JobContext(
        config=config,
        attach=attach,
        attempt=attempt,
        replicas=replicas,
        peers=peers,
        # Several processes here share the page cache: what one has read, the others read from it.
        durable=open_durable(
            run.durable.home, clock, reads_directly=hosts.count_ranks(host_name()) == 1
        ),
        remote=run.remote,
        hosts=hosts.host_of_each(),
    )


def _config(run: OpenRun, options: Options, peers: PeerConfig | None) -> AgentConfig:
    """Return the configuration of this host's agent; its folder is chosen when it starts."""
    # Raises if the directory was removed, and follows one that was moved.
    run.durable.home.current_folder()
    return AgentConfig(
        run=run.durable.home.location_text,
        run_id=run.run_id,
        host=host_name(),
        folder="",
        linger_secs=_linger_secs(options),
        peers=peers,
    )


def _expect(run: OpenRun, options: Options, processes: Processes) -> Expect:
    """Return the request to stay until this process attaches."""
    home = run.durable.home
    return Expect(
        run=home.location_text,
        directory=home.identity_text,
        takeover=options.takeover and launchers.launched().may_fence(processes.count),
    )


def _start(config: AgentConfig, expect: Expect, clock: Clock) -> str:
    """Start this host's agent if none runs, and return its address for other hosts.

    The agent stays until this process attaches: the other hosts will use this address.
    """
    status = _await_agent(config, expect, clock)
    if status.peer_address is None:
        raise AgentUnavailableError(
            f"join the agent of {config.run} on host {config.host}: expected an agent that serves "
            "other hosts, because this job has several; found one that serves none. It may have "
            "been started by a job of one host: stop it (`holdfast stop`), or see its log"
        )
    return status.peer_address


def _await_agent(config: AgentConfig, expect: Expect, clock: Clock) -> AgentStatus:
    """Return the status of this host's agent, which stays until this process attaches."""
    until_secs, reason = clock.monotonic() + START_SECS, "it leaves"
    while clock.monotonic() < until_secs:
        folder, _ = ensure_agent(config, clock, opening_secs(config))
        client = AgentClient(folder)
        try:
            status = client.call("expect", expect, AgentStatus)
            if status.leaves_in_secs != 0.0:
                return status
        except (AgentGoneError, FileNotFoundError) as error:
            reason = str(error)
        finally:
            client.close()
        waits.sleep(clock, LEAVING_POLL_SECS)
    raise AgentUnavailableError(
        f"join the agent of {config.run} on host {config.host}: none stayed within "
        f"{START_SECS:.0f} s ({reason}); see {RunLocation(config.run).agent_log(config.host)}"
    )


def _attach(run: OpenRun, options: Options, processes: Processes, hosts: JobHosts) -> Attach:
    """Return the request of a process that joins its agent for the first time."""
    ram, own = options.ram, host_name()
    addresses = {host.name: host.peer_address for host in hosts.hosts if host.name != own}
    launch = launchers.launched()
    larger_job = launch.larger_job(processes.count)[:REASON_CHARS_MAX]
    may_fence = launch.may_fence(processes.count)
    if options.takeover and not may_fence:
        log.warning(
            "open %s: takeover=True is not used: this process was started by %s, and its framework "
            "has %d; such processes would fence each other",
            *(run.location, larger_job, processes.count),
        )
    return Attach(
        group=run.group,
        rank=processes.rank,
        count=processes.count,
        attempt=None,
        takeover=options.takeover and may_fence,
        durable=options.durable_policies,
        ram=options.ram_policies,
        remote=options.remote_request,
        ram_limit_bytes=ram.limit_bytes if ram is not None else None,
        linger_secs=_linger_secs(options),
        leader=hosts.leader,
        host_count=hosts.count,
        addresses={host: address for host, address in addresses.items() if address is not None},
        domain=next(host.domain for host in hosts.hosts if host.name == own),
        copies=ram.copies if ram is not None else 1,
        metrics=options.metrics,
        larger_job=larger_job,
    )


def _job_peers(
    run: OpenRun, config: AgentConfig, hosts: JobHosts, attempt: PresentAttempt, clock: Clock
) -> JobPeers:
    """Return the other hosts' RAM: hosts of this host's failure domain first, then the others.

    Within each group a host starts with the names that sort after its own, so that not all hosts
    contact the same one first.
    """
    # Only a job of several hosts needs an HTTP client.
    from holdfast.peers.client import PeerAccess
    from holdfast.peers.store import PeerStore

    assert config.peers is not None
    tls, token = config.peers.tls, read_token(config.peers.token_file)
    (own,) = (host for host in hosts.hosts if host.name == config.host)
    others = [host for host in hosts.hosts if host is not own]
    others.sort(key=lambda host: (host.domain != own.domain, host.name < own.name, host.name))

    def store_at(address: PeerAddress) -> PeerStore:
        access = PeerAccess(
            address=address,
            run_id=run.run_id,
            token=token,
            tls=tls,
            attempt=lambda: attempt.id,
        )
        return PeerStore(access, clock)

    addresses = {host.name: host.peer_address for host in others if host.peer_address is not None}
    return JobPeers(parsed_addresses(addresses), store_at)


def _nowhere(address: PeerAddress) -> PeerStore:
    raise AssertionError(f"a job of one host has no peer at {address}")


def _linger_secs(options: Options) -> float:
    """Return how long the agent outlives its trainers, in seconds.

    Without a RAM tier it holds nothing for the next attempt, so it ends at once.
    """
    return options.ram.linger_secs if options.ram is not None else 0.0
