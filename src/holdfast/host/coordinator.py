"""Carry out the effects of the hosts' coordination, and submit their outcomes to it.

The coordination decides without doing I/O. The agent does the I/O, and decides nothing that several
hosts have to agree on. A single host runs the same coordination with one member.

Invariants:
- Inputs are submitted one after another, each with the steps that are published at that moment.
- Effects are carried out in their order. An effect that takes time is a task, whose outcome is
  submitted as an input.
- A target is written before the published steps are read for its answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.coordination import effects, inputs
from holdfast.coordination.messages import TargetKind
from holdfast.coordination.node import Node
from holdfast.coordination.rank_runs import ranks_in
from holdfast.coordination.settings import Settings
from holdfast.coordination.turn import AgentIdentity
from holdfast.host import control_block
from holdfast.host.agent_directory import GROUP
from holdfast.host.mirror_worker import MirrorWorker
from holdfast.host.state import AgentState
from holdfast.host.storage_worker import StorageWorker
from holdfast.host.trainer_group import GroupRecord, write_record
from holdfast.peers.address import PeerAddress
from holdfast.peers.directory import PeerDirectory

if TYPE_CHECKING:
    from holdfast.peers.sender import MessageSender
    from holdfast.peers.store import PeerStore

log = logging.getLogger(__name__)


class Coordinator:
    """The coordination's driver; owned by the agent's event loop.

    `on_effect` receives the effects that concern trainers and policies.
    """

    def __init__(
        self,
        state: AgentState,
        storage_worker: StorageWorker,
        peers: PeerDirectory,
        on_effect: Callable[[effects.Effect], None],
    ) -> None:
        self._state = state
        self._storage_worker = storage_worker
        self.mirror_worker = MirrorWorker(state, self.submit)
        self._peers = peers
        self._on_effect = on_effect
        self._messenger: MessageSender | None = None
        self._items: deque[inputs.Input] = deque()
        self._is_submitting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._record: GroupRecord | None = None
        self._recorded_state: object = None
        self._next_at_secs = 0.0
        self._last_targets: dict[TargetKind, int] = {}
        self.domain = state.config.host
        self.settings = Settings()
        self.node = self._new_node()

    def send_by(self, messenger: MessageSender) -> None:
        """Send messages to other hosts through `messenger` from now on."""
        self._messenger = messenger
        for host, address in self._peers.addresses().items():
            messenger.update_address(host, address)

    def restart(self, found: inputs.Found, *, domain: str, settings: Settings) -> None:
        """Begin with a new node from `found`: when the agent starts or the run's layout changes.

        Operations under way for the previous node are cancelled; their outcomes are not submitted
        to the new one.
        """
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self.mirror_worker.cancel()
        self._items.clear()
        self._last_targets.clear()
        self._recorded_state = None
        self.domain, self.settings = domain, settings
        self._peers.silence_secs = settings.silence_secs
        self.node = self._new_node()
        self.submit(found)

    def submit(self, item: inputs.Input) -> None:
        """Submit an input to the node, and carry out the effects that follow."""
        self._items.append(item)
        # An effect may submit an input: the outer call handles it after the present one's effects.
        if self._is_submitting:
            return
        self._is_submitting = True
        try:
            while self._items:
                state, node = self._state, self.node
                now_secs = state.clock.monotonic()
                for effect in node.handle(self._items.popleft(), now_secs, state.published()):
                    self._do(effect)
        finally:
            self._is_submitting = False
        self._next_at_secs = self.node.next_at_secs(self._state.clock.monotonic())
        self._update_record()
        self._state.wake()

    def want_durable(self) -> None:
        """Mark the newest checkpoint here as due in the durable tier, against any policy."""
        known = self.node.complete_ids()
        newest = max(known, key=lambda c: (c.attempt, c.step), default=None)
        for held in self.node.held():
            if held.id == newest:
                for rank in ranks_in(held.own):
                    self.submit(
                        inputs.PartSealed(
                            rank=rank,
                            id=held.id,
                            part_count=held.part_count,
                            in_ram=True,
                            is_due=True,
                        )
                    )

    def tick(self) -> None:
        """Submit a tick where the node waits for time to pass."""
        if self.next_in_secs() <= 0:
            self.submit(inputs.Tick())

    def next_in_secs(self) -> float:
        """Return in how many seconds the node needs a tick, if nothing happens before."""
        return self._next_at_secs - self._state.clock.monotonic()

    def last_target(self, kinds: Collection[TargetKind]) -> int:
        """Return the step of the newest target of these kinds, reached or not; -1 without one."""
        return max(
            (s for k, s in self._last_targets.items() if k in kinds), default=control_block.NO_STEP
        )

    @property
    def is_busy(self) -> bool:
        """Whether an operation on RAM or the durable tier is under way."""
        return bool(self._tasks)

    async def wait_idle(self) -> None:
        """Wait for the operations that are under way now."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def record(self) -> GroupRecord | None:
        """The record that the next agent of this host will find."""
        return self._record

    def update_addresses(self, addresses: Mapping[str, PeerAddress]) -> None:
        """Take reported addresses of other hosts' agents; the newest address of each counts."""
        known = self._peers.addresses()
        for host, address in addresses.items():
            if host not in known or address.since > known[host].since:
                self.reached(host, address)

    def reached(self, host: str, address: PeerAddress) -> None:
        """Take the address of a host's agent, as that agent reports it."""
        if host != self._state.config.host:
            self._peers.update_address(host, address)
            if self._messenger is not None:
                self._messenger.update_address(host, address)

    def peer_addresses(self) -> dict[str, PeerAddress]:
        """Return the address of each known host's agent."""
        return self._peers.addresses()

    def restore_address(self, host: str, before: PeerAddress | None) -> None:
        """Replace a host's address by `before`, the one known earlier; None: there was none."""
        if before is not None:
            self.reached(host, before)
            return
        self._peers.forget(host)
        if self._messenger is not None:
            self._messenger.forget(host)

    def peer_stores(self) -> list[PeerStore]:
        """Return the RAM stores of all known hosts."""
        return [self._peers.store_of(host) for host in sorted(self._peers.addresses())]

    def _new_node(self) -> Node:
        cells, now = self._state.control.cells, self._state.clock.now()
        return Node(
            AgentIdentity(
                run=self._state.config.run_id,
                host=self._state.config.host,
                domain=self.domain,
                incarnation=control_block.next_incarnation(cells, now),
                settings=self.settings,
            )
        )

    def _do(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Send():
                if self._messenger is not None:
                    self._messenger.send(effect.host, effect.message)
            case effects.SetTarget():
                self._state.control.cells[control_block.CELL_OF[effect.kind]] = effect.step
                self._last_targets[effect.kind] = effect.step
                # Read after the write: a rank that is not seen at the target yet reads the cell
                # later.
                highest = self._state.published().highest
                self._items.append(inputs.TargetWritten(effect.kind, effect.step, highest))
            case effects.ConfirmTarget():
                self._state.control.cells[control_block.PREEMPTION_CONFIRMED] = effect.step
            case effects.ClearTarget():
                self._state.control.cells[control_block.CELL_OF[effect.kind]] = control_block.NEVER
                if effect.kind is TargetKind.PREEMPTION:
                    self._state.control.cells[control_block.PREEMPTION_CONFIRMED] = (
                        control_block.NEVER
                    )
            case effects.Drop():
                self._storage_worker.free_checkpoint(effect.id)
            case effects.Persist():
                self._start(self._storage_worker.persist(effect))
            case effects.Commit():
                self._start(self._storage_worker.commit(effect))
            case effects.MirrorParts():
                self.mirror_worker.write_parts(effect)
            case effects.MirrorCommit():
                self.mirror_worker.commit(effect)
            case effects.Pull():
                self._start(self._storage_worker.pull(effect))
            case effects.ListDurable():
                self._start(self._storage_worker.list_durable(effect))
            case effects.BeginAttempt():
                self._start(self._storage_worker.begin(effect))
            case effects.RenewLease():
                self._start(self._storage_worker.renew_lease(effect))
            case effects.ReleaseLease():
                self._start(self._storage_worker.release_lease(effect))
            case effects.ReadLease():
                self._start(self._storage_worker.read_lease(effect))
            case effects.LeaseAwaited():
                log.warning(
                    "attempt %s of host %s may be live, and its agent cannot be asked: waiting at "
                    "most %.0f s for its lease to expire",
                    effect.attempt,
                    effect.host,
                    effect.secs,
                )
            case _:
                if isinstance(effect, effects.AttemptJoined):
                    # Steps may restart below the targets of the previous attempt.
                    self._last_targets.clear()
                self._on_effect(effect)

    def _start(self, operation: Coroutine[Any, Any, inputs.Input]) -> None:
        task = asyncio.create_task(self._await(operation, self.node))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await(self, operation: Coroutine[Any, Any, inputs.Input], asked_by: Node) -> None:
        outcome = await operation
        # A node that was replaced meanwhile has no use for the outcome.
        if asked_by is self.node:
            self.submit(outcome)

    def _update_record(self) -> None:
        """Write the state that the next agent cannot find out otherwise, if it has changed."""
        node, group = self.node, self._state.group
        successors, leadership = node.successors, node.leadership
        self._peers.leaders = successors
        members = tuple(group.members[r] for r in sorted(group.members)) if group else ()
        is_broken = group is not None and group.is_broken
        ended = node.ended_attempt
        seen = (leadership, successors, members, is_broken, ended, self._peers.version)
        if seen == self._recorded_state:
            return
        self._recorded_state = seen
        known = self._peers.addresses()
        record = None
        if leadership is not None:
            origin = leadership.origin
            record = GroupRecord(
                group=leadership.group,
                attempt=leadership.attempt,
                count=leadership.rank_count,
                run=self._state.run,
                members=members,
                is_broken=is_broken,
                leader=leadership.successors[0] if leadership.successors else "",
                successors=successors,
                origin=origin,
                addresses={host: str(known[host]) for host in sorted(known)},
                domain=self.domain,
                copies=self.settings.copies,
                heartbeat_secs=self.settings.heartbeat_secs,
                ended_attempt=ended,
            )
        if record != self._record:
            self._record = record
            write_record(self._state.folder / GROUP, record)
