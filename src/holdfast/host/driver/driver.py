"""Drive this host's node, which decides without I/O what the hosts of a run have to agree on.

The agent does the I/O, and decides nothing that several hosts have to agree on. A run on one host
is driven in the same way. The driver's duties:

1. Take the inputs one after another. An input that an effect submits waits until all effects before
   it are carried out.
2. Read the time and the trainers' published steps just before the node handles an input.
3. Carry out the effects in their order. A target is written to the trainers' cells before the
   published steps are read for its answer. Whether a rank really missed it is an outcome (duty 4):
   the leader's response is another target, and other inputs come between the two.
4. Run an effect that takes time as a task, which ends with one input: its outcome. Drop the outcome
   if the node has been replaced.
5. Write the record for the host's next agent, if it has changed.
6. Wake the agent's loop, and submit a `Tick` when the node needs one.
7. Show the node to the agent's other parts as a view: frozen, and made once after an input.

A node is replaced when the run's layout changes. The next one has a higher incarnation, and `Found`
is its first input. See docs/decisions/0043.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from holdfast.coordination.effects import Effect
from holdfast.coordination.inputs import Found, Input, Tick
from holdfast.coordination.node import Node, NodeRecord, Ready
from holdfast.coordination.node_view import NodeView
from holdfast.coordination.settings import Settings
from holdfast.coordination.survivability import Lead
from holdfast.coordination.turn import AgentIdentity
from holdfast.format.names import AttemptId
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.attached_trainers import AttachedTrainers
from holdfast.host.driver.peer_network import PeerNetwork
from holdfast.host.wire.agent_directory import GROUP
from holdfast.host.wire.control_block import next_incarnation
from holdfast.host.wire.group_record import GroupRecord, write_record

Operation = Coroutine[Any, Any, Input]
"""An effect that takes time; its result is the outcome."""


class Driver:
    """The driver of one agent's node; owned by the agent's event loop.

    Args:
        run: The run.
        trainers: The trainers, whose published steps the node reads.
        network: The connections to the other hosts.
        carry_out: Carries out an effect; returns the operation of one that takes time.
        cancel: Ends what else is under way for a node that is replaced.
    """

    def __init__(
        self,
        run: AgentRun,
        trainers: AttachedTrainers,
        network: PeerNetwork,
        carry_out: Callable[[Effect], Operation | None],
        cancel: Callable[[], None],
    ) -> None:
        self._run = run
        self._trainers = trainers
        self._network = network
        self._carry_out = carry_out
        self._cancel = cancel
        self._items: deque[Input] = deque()
        self._is_submitting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._record: GroupRecord | None = None
        self._recorded_state: object = None
        self._ready = Ready([], 0.0, NodeRecord())
        self._view: NodeView | None = None
        self._lock = threading.Lock()
        """Excludes a view that another thread asks for while the node handles an input."""
        self.woken = asyncio.Event()
        """Set after each input: the agent's loop looks again at what is due."""
        self.domain = run.config.host
        self.settings = Settings()
        self._node = self._new_node()

    def submit(self, item: Input) -> None:
        """Submit an input to the node, and carry out the effects that follow."""
        self._items.append(item)
        if self._is_submitting:
            return
        self._is_submitting = True
        try:
            while self._items:
                now_secs, published = self._run.clock.monotonic(), self._trainers.published()
                with self._lock:
                    self._view = None
                    self._ready = self._node.handle(self._items.popleft(), now_secs, published)
                for effect in self._ready.effects:
                    operation = self._carry_out(effect)
                    if operation is not None:
                        self._start(operation)
        finally:
            self._is_submitting = False
        self._update_record()
        self.woken.set()

    @property
    def view(self) -> NodeView:
        """What the node knows after the last input; may be read from any thread."""
        with self._lock:
            if self._view is None:
                self._view = self._node.view(self._run.clock.monotonic())
            return self._view

    @property
    def attempt(self) -> AttemptId:
        """The newest attempt known here; may be read from any thread."""
        return self._ready.record.attempt

    def survey(self) -> Lead | None:
        """Return what this host knows of all others as the leader; None: it does not lead."""
        return self._node.survey(self._run.clock.monotonic())

    def tick(self) -> None:
        """Submit a tick where the node waits for time to pass."""
        if self.next_in_secs() <= 0:
            self.submit(Tick())

    def next_in_secs(self) -> float:
        """Return in how many seconds the node needs a tick, if nothing happens before."""
        return self._ready.next_at_secs - self._run.clock.monotonic()

    def restart(self, found: Found, *, domain: str, settings: Settings) -> None:
        """Begin with a new node from `found`: when the agent starts or the run's layout changes.

        Operations under way for the previous node are cancelled; their outcomes are not submitted
        to the new one.
        """
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._cancel()
        self._items.clear()
        self._trainers.forget_targets()
        self._recorded_state = None
        self.domain, self.settings = domain, settings
        self._network.peers.silence_secs = settings.silence_secs
        self._node = self._new_node()
        self.submit(found)

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

    def _new_node(self) -> Node:
        config = self._run.config
        return Node(
            AgentIdentity(
                run=config.run_id,
                host=config.host,
                domain=self.domain,
                incarnation=next_incarnation(self._trainers.control.cells, self._run.clock.now()),
                settings=self.settings,
            )
        )

    def _start(self, operation: Operation) -> None:
        task = asyncio.create_task(self._await(operation, self._node))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await(self, operation: Operation, node: Node) -> None:
        outcome = await operation
        if node is self._node:
            self.submit(outcome)

    def _update_record(self) -> None:
        """Write the state that the next agent cannot find out otherwise, if it has changed."""
        group, peers = self._trainers.group, self._network.peers
        node_record = self._ready.record
        leadership, peers.leaders = node_record.leadership, node_record.successors
        members = tuple(group.members[r] for r in sorted(group.members)) if group else ()
        is_broken = group is not None and group.is_broken
        recorded_state = (node_record, members, is_broken, peers.version)
        if recorded_state == self._recorded_state:
            return
        self._recorded_state = recorded_state
        addresses = peers.addresses()
        record = None
        if leadership is not None:
            record = GroupRecord(
                group=leadership.group,
                attempt=leadership.attempt,
                count=leadership.rank_count,
                run=self._run.path,
                members=members,
                is_broken=is_broken,
                leader=leadership.successors[0] if leadership.successors else "",
                successors=node_record.successors,
                origin=leadership.origin,
                addresses={host: str(addresses[host]) for host in sorted(addresses)},
                domain=self.domain,
                copies=self.settings.copies,
                heartbeat_secs=self.settings.heartbeat_secs,
                ended_attempt=node_record.ended_attempt,
            )
        if record != self._record:
            self._record = record
            write_record(self._run.folder / GROUP, record)
