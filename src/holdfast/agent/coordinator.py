"""Carries out what the hosts' agreement wants, and tells it what comes of that.

The agreement decides and does nothing; the agent does things and decides nothing of what several
hosts have to agree on. One host is an agreement with itself.

Invariants:
- Facts are told one after another, each with the steps that are published at that moment.
- Effects are done in their order. What takes time is a task, whose outcome is told as a fact.
- A target is written before the published steps are read for its answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.agent import control_block
from holdfast.agent.agent_directory import GROUP
from holdfast.agent.state import AgentState
from holdfast.agent.storage_worker import StorageWorker
from holdfast.agent.trainer_group import GroupRecord, write_record
from holdfast.coordination import effects, inputs
from holdfast.coordination.messages import TargetKind
from holdfast.coordination.node import Node
from holdfast.coordination.rank_runs import ranks_in
from holdfast.coordination.settings import Settings
from holdfast.coordination.turn import AgentIdentity
from holdfast.peers.address import PeerAddress
from holdfast.peers.directory import PeerDirectory

if TYPE_CHECKING:
    from holdfast.peers.sender import MessageSender
    from holdfast.peers.store import PeerStore

log = logging.getLogger(__name__)


class Coordinator:
    """Owned by the agent's event loop. `on_effect` gets what concerns trainers and policies."""

    def __init__(
        self,
        state: AgentState,
        storage_worker: StorageWorker,
        peers: PeerDirectory,
        on_effect: Callable[[effects.Effect], None],
    ) -> None:
        self._state = state
        self._storage_worker = storage_worker
        self._peers = peers
        self._on_effect = on_effect
        self._messenger: MessageSender | None = None
        self._items: deque[inputs.Input] = deque()
        self._is_telling = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._record: GroupRecord | None = None
        self._seen: object = None
        self._incarnation = 0
        self._next_at_secs = 0.0
        self._last_targets: dict[TargetKind, int] = {}
        self.domain = state.config.host
        self.settings = Settings()
        self.node = self._anew()

    def send_by(self, messenger: MessageSender) -> None:
        """Messages to other hosts go out by that, from now on."""
        self._messenger = messenger
        for host, address in self._peers.addresses().items():
            messenger.update_address(host, address)

    def restart(self, found: inputs.Found, *, domain: str, settings: Settings) -> None:
        """Begins with what stands here: when the agent starts, and where the run's layout changes.

        What is under way for the machine before is not told to the new one.
        """
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._items.clear()
        self._last_targets.clear()
        self._seen = None
        self.domain, self.settings = domain, settings
        self.node = self._anew()
        self.submit(found)

    def submit(self, item: inputs.Input) -> None:
        """Tells the machine a fact, and does what it wants."""
        self._items.append(item)
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._items:
                state, node = self._state, self.node
                now_secs = state.clock.monotonic()
                for effect in node.handle(self._items.popleft(), now_secs, state.published()):
                    self._do(effect)
        finally:
            self._is_telling = False
        self._next_at_secs = self.node.next_at_secs(self._state.clock.monotonic())
        self._know()
        self._state.wake()

    def want_durable(self) -> None:
        """The newest checkpoint that stands here is to be durable, whatever the policies say."""
        known = self.node.complete_ids() | self.node.follower.inventory.complete_ids()
        newest = max(known, key=lambda c: (c.attempt, c.step), default=None)
        for held in self.node.follower.inventory.states():
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
        """Tells that time has passed, where the machine waits for that."""
        if self.next_in_secs() <= 0:
            self.submit(inputs.Tick())

    def next_in_secs(self) -> float:
        """In how many seconds it wants to be told, if nothing happens before."""
        return self._next_at_secs - self._state.clock.monotonic()

    def last_target(self, kinds: Collection[TargetKind]) -> int:
        """The step of the newest target of these kinds, reached or not; -1 where there was none."""
        return max(
            (s for k, s in self._last_targets.items() if k in kinds), default=control_block.NO_STEP
        )

    @property
    def is_busy(self) -> bool:
        """Whether something is being done whose outcome it does not know yet."""
        return bool(self._tasks)

    async def wait_idle(self) -> None:
        """Waits for what is being done now."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def record(self) -> GroupRecord | None:
        """What the next agent of this host will find."""
        return self._record

    def update_addresses(self, addresses: Mapping[str, PeerAddress]) -> None:
        """Somebody says that those hosts' agents are reached there; the newest address counts."""
        known = self._peers.addresses()
        for host, address in addresses.items():
            if host not in known or address.since > known[host].since:
                self.reached(host, address)

    def reached(self, host: str, address: PeerAddress) -> None:
        """That host's agent is reached there, as it says itself."""
        if host != self._state.config.host:
            self._peers.update_address(host, address)
            if self._messenger is not None:
                self._messenger.update_address(host, address)

    def addresses(self) -> dict[str, PeerAddress]:
        """Return where each known host's agent is reached."""
        return self._peers.addresses()

    def forget(self, host: str, before: PeerAddress | None) -> None:
        """Replace the address of a host by the one that was known before; None: there was none."""
        if before is not None:
            self.reached(host, before)
            return
        self._peers.forget(host)
        if self._messenger is not None:
            self._messenger.forget(host)

    def peer_stores(self) -> list[PeerStore]:
        """The RAM of all hosts that are known."""
        return [self._peers.store_of(host) for host in sorted(self._peers.addresses())]

    def _anew(self) -> Node:
        now = self._state.clock.now()
        self._incarnation = max(self._incarnation + 1, int(now.timestamp() * 1000))
        return Node(
            AgentIdentity(
                run=self._state.config.run_id,
                host=self._state.config.host,
                domain=self.domain,
                incarnation=self._incarnation,
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
                self._storage_worker.drop(effect.id)
            case effects.Persist():
                self._start(self._storage_worker.persist(effect))
            case effects.Commit():
                self._start(self._storage_worker.commit(effect))
            case effects.Pull():
                self._start(self._storage_worker.pull(effect))
            case effects.ListDurable():
                self._start(self._storage_worker.list_durable())
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
                    "attempt %d of host %s may live, and its agent does not answer: waiting at "
                    "most %.0f s for its lease to run out",
                    effect.attempt,
                    effect.host,
                    effect.secs,
                )
            case _:
                if isinstance(effect, effects.AttemptJoined):
                    # Steps may begin anew, below the targets of the attempt before.
                    self._last_targets.clear()
                self._on_effect(effect)

    def _start(self, deed: Coroutine[Any, Any, inputs.Input]) -> None:
        task = asyncio.create_task(self._await(deed, self.node))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await(self, deed: Coroutine[Any, Any, inputs.Input], asked_by: Node) -> None:
        outcome = await deed
        if asked_by is self.node:
            self.submit(outcome)

    def _know(self) -> None:
        """Keeps for the next agent what the machine cannot find out again."""
        member, group = self.node.follower, self._state.group
        election, leadership = member.election, member.leadership
        self._peers.leaders = election.successors
        members = tuple(group.members[r] for r in sorted(group.members)) if group else ()
        is_broken = group is not None and group.is_broken
        ended = member.ended_attempt
        seen = (leadership, election.successors, members, is_broken, ended, self._peers.version)
        if seen == self._seen:
            return
        self._seen = seen
        known = self._peers.addresses()
        record = None
        if leadership is not None:
            origin = leadership.origin
            record = GroupRecord(
                group=leadership.group,
                attempt=leadership.attempt,
                count=leadership.rank_count,
                members=members,
                is_broken=is_broken,
                leader=leadership.successors[0] if leadership.successors else "",
                successors=election.successors,
                origin=(origin.step, origin.attempt) if origin else None,
                addresses={host: str(known[host]) for host in sorted(known)},
                domain=self.domain,
                copies=self.settings.copies,
                heartbeat_secs=self.settings.heartbeat_secs,
                ended_attempt=ended,
            )
        if record != self._record:
            self._record = record
            write_record(self._state.folder / GROUP, record)
