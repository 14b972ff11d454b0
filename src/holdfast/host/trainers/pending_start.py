"""Hold a start that waits for its attempt: its requests, and the changes made for it meanwhile.

Invariant: a refused start leaves the agent as it was. The processes' requests (policies, bounds,
how long the agent lingers) are kept here and applied once the attempt has begun. The hosts'
coordination needs two things earlier, the addresses of the other hosts and the layout of the run:
they are changed at once, and restored if the start is refused.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from holdfast.coordination.settings import Settings
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.attached_trainers import AttachedTrainers, Policies, TrainerGroup
from holdfast.host.driver.peer_network import PeerNetwork
from holdfast.host.tiers.ram_tier import RamTier
from holdfast.host.wire import protocol
from holdfast.peers.address import PeerAddress, parsed_addresses
from holdfast.policy import (
    preservation_evaluation,
    save_evaluation,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The failure domain and the settings of this host's coordination."""

    domain: str
    settings: Settings


@dataclass(slots=True)
class PendingStart:
    """A group whose attempt has not begun, or which begins a branch, and futures that wait for it.

    Attributes:
        learned: the addresses from its requests, each with the one that was known before.
        replaced: the layout that its own replaced; None if it replaced none.
    """

    group: TrainerGroup
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    requests: dict[int, protocol.Attach] = field(default_factory=dict)
    learned: dict[str, tuple[PeerAddress, PeerAddress | None]] = field(default_factory=dict)
    replaced: Layout | None = None
    warnings: tuple[str, ...] = ()
    """Warnings for the users about how the attempt began, set once it has."""

    def wait(self) -> asyncio.Future[None]:
        """Return a future that is done once the attempt has begun, and fails if it never will."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        return waiter

    def end(self, error: HoldfastError | None) -> None:
        """Wake all waiters: the attempt has begun (None), or never will."""
        for waiter in self.waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
        self.waiters.clear()

    def add_process(self, network: PeerNetwork, request: protocol.Attach) -> None:
        """Keep one process's request; its addresses are used from now on."""
        self.requests[request.rank] = request
        before = network.peers.addresses()
        network.update_addresses(parsed_addresses(request.addresses))
        for host, address in network.peers.addresses().items():
            if address != before.get(host):
                first = self.learned.get(host)
                self.learned[host] = (address, first[1] if first else before.get(host))

    def restore_addresses(self, network: PeerNetwork) -> None:
        """Undo the changes of `add_process`, except where a newer address has arrived since."""
        present = network.peers.addresses()
        for host, (learned, before) in self.learned.items():
            if present.get(host) == learned:
                network.restore_address(host, before)


def check_policies(request: protocol.Attach) -> None:
    """Check that the policies of a request can be decoded, before anything is changed for it.

    Raises:
        InvalidArgumentError: One of them is not an encoded policy.
    """
    _policies(request.durable)
    if request.ram is not None:
        _policies(request.ram)
    if request.remote is not None:
        save_evaluation.decode(request.remote.save.encode())
        preservation_evaluation.decode(request.remote.preserve.encode())


def prepare_remote(run: AgentRun, trainers: AttachedTrainers, request: protocol.Attach) -> None:
    """Use the remote tier of a process that attaches: its start lists both durable tiers.

    A live attempt keeps its own; a start that fences it changes it with its attempt.

    Raises:
        InvalidArgumentError: Another process of the same job has another remote tier.
    """
    place = request.remote.place if request.remote is not None else None
    present = run.remote.place if run.remote is not None else None
    if trainers.group is None:
        run.use_remote(place)
    elif trainers.group.group == request.group and present is None:
        # A restarted agent knows its trainers, and gets the rest from them.
        run.use_remote(place)
    elif trainers.group.group == request.group and place != present:
        raise InvalidArgumentError(
            f"attach rank {request.rank}: expected the remote tier of the job's other processes, "
            f"{present}, found {place or 'none'}"
        )


def apply_request(
    run: AgentRun, ram: RamTier, trainers: AttachedTrainers, request: protocol.Attach
) -> None:
    """Apply the policies and bounds of a process of the present attempt."""
    job = trainers.job
    job.linger_secs = request.linger_secs
    job.has_ram = request.ram is not None
    ram.pool.limit_bytes = request.ram_limit_bytes
    run.use_remote(request.remote.place if request.remote is not None else None)
    # Rank 0's policies hold for the whole run.
    if request.rank == 0:
        if run.remote is not None and request.remote is not None:
            run.remote.save = save_evaluation.decode(request.remote.save.encode())
            run.remote.preserve = preservation_evaluation.decode(request.remote.preserve.encode())
            run.remote.is_guarded = request.remote.is_guarded
        job.knows_policies = True
        job.durable = _policies(request.durable)
        job.ram = _policies(request.ram) if request.ram else Policies()


def _policies(tier: protocol.TierPolicies) -> Policies:
    return Policies(
        save=save_evaluation.decode(tier.save.encode()) if tier.save else None,
        preserve=preservation_evaluation.decode(tier.preserve.encode()) if tier.preserve else None,
        user_preserves=tier.user_preserves,
    )
