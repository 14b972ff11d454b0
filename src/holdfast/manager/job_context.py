"""The hosts of a job: who they are, where their agents are reached, and how this process joins.

The processes tell each other through the framework's key-value service. On one host nothing is
served and nothing is looked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.adapt.contract import Processes
from holdfast.agent.agent_directory import host_name
from holdfast.agent.client import AgentClient
from holdfast.agent.config import AgentConfig
from holdfast.agent.launch import AgentStart, begin_start, ensure_agent
from holdfast.agent.protocol import AgentStatus, Attach, Empty, Notice, PeerAddresses
from holdfast.clock import Clock
from holdfast.engine.reading.view import RamTiers, View, look
from holdfast.errors import AgentUnavailableError, HoldfastError
from holdfast.job.opening import OpenRun
from holdfast.job.options import Options
from holdfast.job.rendezvous import Rendezvous
from holdfast.job.topology import MEET_SECS, JobHosts, meet, place_of
from holdfast.manager.agent_session import AgentSession
from holdfast.manager.planning import NO_REPLICAS, Replicas
from holdfast.peers.address import PeerAddress, parsed_addresses
from holdfast.peers.config import PeerConfig, make_token, read_token
from holdfast.store.contract import Store
from holdfast.store.disk import DiskStore

if TYPE_CHECKING:
    from holdfast.peers.store import PeerStore

TOKEN_FILE = "agents-{}.token"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Attempt:
    """A number that is known later."""

    number: int = 0


class JobPeers:
    """The RAM of the job's other hosts, the nearest first. Owned by the training thread."""

    def __init__(
        self, addresses: Mapping[str, PeerAddress], store_at: Callable[[PeerAddress], PeerStore]
    ) -> None:
        self._addresses = dict(addresses)
        self._store_at = store_at
        self._stores = {host: store_at(address) for host, address in addresses.items()}

    def stores(self) -> list[PeerStore]:
        """Each host's RAM, where it was reached last."""
        return list(self._stores.values())

    def update_addresses(self, addresses: Mapping[str, PeerAddress]) -> bool:
        """Takes newer addresses of the job's hosts; whether there was any."""
        has_changed = False
        for host, address in addresses.items():
            known = self._addresses.get(host)
            if known is not None and address.since > known.since:
                self._stores[host].close()
                self._addresses[host], self._stores[host] = address, self._store_at(address)
                has_changed = True
        return has_changed

    def close(self) -> None:
        """Closes the connections."""
        for store in self._stores.values():
            store.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """How one process joins its host's agent, and reads from the other hosts'.

    `attempt` is the newest attempt that is known here; it is set once the process has joined.
    `replicas` is what plans have to know of the hosts. `durable` is the durable tier, to be read.
    """

    config: AgentConfig
    attach: Attach
    attempt: Attempt
    replicas: Replicas
    peers: JobPeers
    durable: DiskStore

    def begin_agent(self) -> AgentStart:
        """Start this host's agent where there is none, and do not wait for it; `join` does."""
        return begin_start(self.config)

    def join(
        self,
        start: AgentStart,
        clock: Clock,
        on_notice: Callable[[Notice], None],
        on_return: Callable[[], None],
    ) -> AgentSession:
        """Joins this host's agent, which `begin_agent` has found or started."""
        return AgentSession(
            self.config, self.attach, clock, on_notice, on_return, self.durable.directory, start
        )

    def load_view(self, session: AgentSession, clock: Clock) -> View:
        """What can be read now: of this host's RAM, the other hosts' and the durable tier."""
        self.attempt.number = session.place.attempt
        view = look(self._stores(session, clock), self.durable)
        if view.unlisted and self.peers.update_addresses(_addresses(session)):
            # An agent that was started anew serves elsewhere than it did when the job began.
            view = look(self._stores(session, clock), self.durable)
        return view

    def _stores(self, session: AgentSession, clock: Clock) -> list[Store]:
        tiers = RamTiers(session.place.ram_folder, self.peers.stores(), clock)
        return [*tiers.stores(), self.durable]

    def close(self) -> None:
        """Closes the connections to other hosts."""
        self.peers.close()


def find_job(
    run: OpenRun, options: Options, rendezvous: Rendezvous, processes: Processes, clock: Clock
) -> JobContext:
    """Finds the job's hosts; starts this host's agent where there are several.

    Raises:
        InvalidArgumentError: two ranks of one host contradict each other.
        AgentUnavailableError: an agent does not start, or serves nobody.
        StorageError: the run's token cannot be written.
        ProcessLostError: another process did not come.
    """
    hosts = meet(rendezvous, place_of(processes, options.ram, None))
    attempt = Attempt()
    config = _config(run, options, None)
    peers = JobPeers({}, _nowhere)
    if hosts.count > 1:
        # A copy of the run has another id, and so a token of its own.
        token_file = str(run.durable.root / TOKEN_FILE.format(run.run_id))

        def tokened(_: list[str]) -> str:
            make_token(token_file, clock.token())
            return ""

        rendezvous.decide("make the agents' token", "", tokened, MEET_SECS)
        with rendezvous.propagating_errors("meet the hosts"):
            config = _config(run, options, _peer_config(options, token_file))
            address = _start(config, clock)
        hosts = meet(rendezvous, place_of(processes, options.ram, address))
        peers = _job_peers(run, config, hosts, attempt, clock)
    attach = _attach(run, options, processes, hosts)
    replicas = Replicas(hosts.domains(), attach.copies) if hosts.count > 1 else NO_REPLICAS
    return JobContext(
        config=config,
        attach=attach,
        attempt=attempt,
        replicas=replicas,
        peers=peers,
        # Of several processes here, those that come later find in the page cache what they share.
        durable=DiskStore(
            run.durable.directory, clock, reads_directly=hosts.count_ranks(host_name()) == 1
        ),
    )


def _peer_config(options: Options, token_file: str) -> PeerConfig:
    ram = options.ram
    if ram is None:
        return PeerConfig(token_file=token_file)
    return PeerConfig(
        token_file=token_file, address=ram.serving_address, port=ram.port, tls=ram.tls
    )


def _config(run: OpenRun, options: Options, peers: PeerConfig | None) -> AgentConfig:
    """The agent that this process needs; its folder is chosen when it starts."""
    return AgentConfig(
        run=str(run.durable.directory.current()),
        run_id=run.run_id,
        host=host_name(),
        folder="",
        linger_secs=_linger_secs(options),
        peers=peers,
    )


def _start(config: AgentConfig, clock: Clock) -> str:
    """Starts this host's agent, if none is there; where it is reached by others."""
    folder, _ = ensure_agent(config, clock)
    client = AgentClient(folder)
    try:
        status = client.call("status", Empty(), AgentStatus)
    finally:
        client.close()
    if status.peer_address is None:
        raise AgentUnavailableError(
            f"join the agent of {config.run} on host {config.host}: it serves no other hosts, and "
            "this job has several; was it started for one host? Stop it (`holdfast stop`), or see "
            "its log"
        )
    return status.peer_address


def _attach(run: OpenRun, options: Options, processes: Processes, hosts: JobHosts) -> Attach:
    """The asking for a seat, of a process that had none."""
    ram, own = options.ram, host_name()
    addresses = {host.name: host.peer_address for host in hosts.hosts if host.name != own}
    return Attach(
        group=run.group,
        rank=processes.rank,
        count=processes.count,
        attempt=None,
        takeover=options.takeover,
        durable=options.durable_policies,
        ram=options.ram_policies,
        ram_limit_bytes=ram.limit_bytes if ram is not None else None,
        linger_secs=_linger_secs(options),
        leader=hosts.leader,
        host_count=hosts.count,
        addresses={host: address for host, address in addresses.items() if address is not None},
        domain=next(host.domain for host in hosts.hosts if host.name == own),
        copies=ram.copies if ram is not None else 1,
    )


def _job_peers(
    run: OpenRun, config: AgentConfig, hosts: JobHosts, attempt: Attempt, clock: Clock
) -> JobPeers:
    """The other hosts' RAM: those of this host's failure domain, then the others in turn.

    Each host begins with those whose names come after its own, so that not all ask the same first.
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
            attempt=lambda: attempt.number,
        )
        return PeerStore(access, clock)

    told = {host.name: host.peer_address for host in others if host.peer_address is not None}
    return JobPeers(parsed_addresses(told), store_at)


def _nowhere(address: PeerAddress) -> PeerStore:
    raise AssertionError(f"a job of one host reads from none at {address}")


def _addresses(session: AgentSession) -> dict[str, PeerAddress]:
    """Where other hosts are reached, as this host's agent knows; nothing where it does not say."""
    try:
        return parsed_addresses(session.call("peers", Empty(), PeerAddresses).addresses)
    except HoldfastError as error:
        log.warning("this host's agent does not say where the others are: %s", error)
        return {}


def _linger_secs(options: Options) -> float:
    """Without a RAM tier there is nothing to keep for the next attempt."""
    return options.ram.linger_secs if options.ram is not None else 0.0
