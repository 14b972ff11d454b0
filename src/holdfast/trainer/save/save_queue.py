"""Hand saves over to the saver's thread; at most one waits while another one is written.

Invariants:
- `SaveQueue.put` may wait for RAM. `has_room` reports beforehand if it would wait for storage or
  for an agent that does not answer.
- A request is handed over in one assignment, under the lock, so that an exception on the training
  thread leaves no doubt whose it is.

The training thread calls `put`, `has_room`, `skip` and `close`, the saver's thread the others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast import waits
from holdfast.adapt.contract import Snapshot
from holdfast.clock import Clock
from holdfast.conditions import Condition
from holdfast.engine.planning.replica_blocks import ReplicaWindow
from holdfast.engine.saving.part import PartPlan
from holdfast.engine.saving.part_writer import PartWriter
from holdfast.errors import WaitInterruptedError
from holdfast.format.names import CheckpointId
from holdfast.trainer.planning import PartCopy
from holdfast.trainer.save.replica_writer import LocalReplica

SKIPPED_MAX = 64
PATIENCE_SECS = 2.0
"""How long the training thread waits for an agent's answer before it skips the save."""
WARN_SECS = 5.0
"""How long the training thread waits for an earlier save before it warns."""

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class SaveRequest:
    """One save: the plan, the tiers, and the state, which is fixed or being copied into slots.

    Attributes:
        plan: What to write.
        snapshot: The state.
        is_durable_due: Whether the save is for the durable tier.
        is_by_step: Whether the save is for exactly this step.
        copies: The parts of other ranks that can be replicated from the same state.
        compared: The blocks of other ranks' parts that this rank compares with its own copies;
            None: it compares nothing.
        digests: The digests of these copies; None until they are made.
        digesting: Held while they are made, by either thread, of a state that is not released.
        asked_secs: The monotonic time at which `save` was called.
        part: The part in the prepared slot, which the training thread fills; None without one.
        replicas: Those of `copies` that the training thread makes.
        held: Closes the request's resources, until it is handed over.
        is_handed_over: Whether the saver's thread owns the request. Written by the training thread.
        returned_secs: When the training thread continued; None: it has not yet. Written by it.
        interruption: Why the training thread left the save before its end. Written before the
            copying ends, so the saver's thread sees it after it has waited for that.
        copying: The replicas of which the agent was notified. Owned by the saver's thread.
        is_reusing: Whether the part reuses images, so that no replicas are made.
        written_bytes: The size of the image that was written, if it is not that of the whole part.
    """

    plan: PartPlan
    snapshot: Snapshot
    is_durable_due: bool
    is_by_step: bool
    copies: tuple[PartCopy, ...] = ()
    compared: ReplicaWindow | None = None
    digests: list[str] | None = None
    digesting: threading.Lock = field(default_factory=threading.Lock)
    asked_secs: float
    part: PartWriter | None = None
    replicas: tuple[LocalReplica, ...] = ()
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    is_handed_over: bool = False
    returned_secs: float | None = None
    interruption: str | None = None
    copying: tuple[PartCopy, ...] = ()
    is_reusing: bool = False
    written_bytes: int | None = None

    def end(self) -> None:
        """End the copying; threads that wait for it continue."""
        if self.part is not None:
            self.part.end()
        for replica in self.replicas:
            replica.fill.end()

    def release_all(self) -> None:
        """Release all resources of a request that was not handed over."""
        self.end()
        self.held.close()
        self.snapshot.release()


class SaverWork(NamedTuple):
    """What the saver's thread does next.

    Attributes:
        request: A save; None: there is none.
        skipped: The due checkpoints that this rank skips, older than the save.
        is_getting_ready: Whether to prepare slots for the next save.
        is_closed: Whether no save follows.
    """

    request: SaveRequest | None
    skipped: tuple[CheckpointId, ...]
    is_getting_ready: bool
    is_closed: bool


class SaveQueue:
    """The queue of one save between the training thread and the saver's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = Condition()
        self._waiting: SaveRequest | None = None
        self._skipped: deque[CheckpointId] = deque(maxlen=SKIPPED_MAX)
        self._at_storage: str | None = None
        self._asked_at: float | None = None
        self._has_ended = False
        self.is_closed = False
        self.is_getting_ready = False
        self._is_preparing = False

    def put(self, request: SaveRequest) -> None:
        """Hand a save over; wait while another one is waiting, with a warning."""
        with self._changed:
            if not waits.wait_for(self._changed, self._has_place, WARN_SECS):
                cause = "an answer of the host's agent" if self._asked_at else "an earlier save"
                log.warning(
                    "save step %d: the training has waited for %.0f s, and goes on waiting, for "
                    "%s; `holdfast status` shows whether the agents of all hosts answer",
                    request.plan.id.step,
                    WARN_SECS,
                    self._at_storage or cause,
                )
                waits.wait_for(self._changed, self._has_place, None)
            request.is_handed_over, self._waiting = True, request
            self._changed.notify_all()

    def _has_place(self) -> bool:
        return self._waiting is None or self.is_closed

    def has_room(self) -> bool:
        """Return whether one more save can be put without waiting for storage.

        The call waits while an earlier save is copied into RAM, which is short and bounded, and
        until a signal arrives: the save that is then skipped is followed by that of the preemption.
        """
        with self._changed:
            while self._waiting is not None and not self._is_held_up() and not waits.has_signal():
                self._changed.wait(waits.slice_secs(PATIENCE_SECS))
            return self._waiting is None

    def _is_held_up(self) -> bool:
        if self._asked_at is None or self._at_storage is not None:
            return self._at_storage is not None
        return self._clock.monotonic() - self._asked_at >= PATIENCE_SECS

    def skip(self, checkpoint: CheckpointId) -> None:
        """Let the saver's thread report that this rank skips a due checkpoint."""
        with self._changed:
            self._skipped.append(checkpoint)
            self._changed.notify_all()

    def get_ready(self) -> None:
        """Let the saver's thread prepare slots for the next save."""
        with self._changed:
            self.is_getting_ready = True
            self._changed.notify_all()

    def note_ready(self) -> None:
        """Record that the saver's thread has prepared the slots that it can get."""
        with self._changed:
            self._is_preparing = False
            self._changed.notify_all()

    def await_ready(self, timeout_secs: float) -> None:
        """Wait until the slots asked for are prepared; a timeout or a signal ends the wait."""

        def is_over() -> bool:
            return not (self.is_getting_ready or self._is_preparing) or waits.has_signal()

        with self._changed:
            waits.wait_for(self._changed, is_over, timeout_secs)

    def wake(self) -> None:
        """Wake the saver's thread; an exception may have been raised before it was notified."""
        with self._changed:
            self._changed.notify_all()

    def close(self, timeout_secs: float) -> bool:
        """End the queue, and return whether the saver's thread has ended after what it has.

        If it has not after `timeout_secs`, because storage hangs, a warning is logged. A signal
        shortens the wait.
        """
        began_secs = self._clock.monotonic()
        with (
            contextlib.suppress(WaitInterruptedError),
            waits.ended_by_signals("close", lambda: "a save has not ended"),
            self._changed,
        ):
            self.is_closed = True
            self._changed.notify_all()
            # Not `Thread.join`: a Ctrl-C during it marks a running thread as ended.
            waits.wait_for(self._changed, lambda: self._has_ended, timeout_secs)
        if not self._has_ended:
            log.warning(
                "a save did not end within %.0f s because storage hangs; it is abandoned, and the "
                "process may exit",
                self._clock.monotonic() - began_secs,
            )
        return self._has_ended

    def take(self) -> SaverWork:
        """Wait for work, and return it.

        Steps that were skipped after the waiting save are returned after it: a rank reports its
        steps in their order, because a report counts as the end of all earlier ones.
        """
        with self._changed:
            self._changed.wait_for(self._has_work)
            request, skipped = self._waiting, list[CheckpointId]()
            while self._skipped and (request is None or self._skipped[0].age < request.plan.id.age):
                skipped.append(self._skipped.popleft())
            work = SaverWork(request, tuple(skipped), self.is_getting_ready, self.is_closed)
            self._is_preparing = self.is_getting_ready
            self._waiting, self.is_getting_ready = None, False
            self._changed.notify_all()
            return work

    def _has_work(self) -> bool:
        is_wanted = self.is_closed or self.is_getting_ready
        return self._waiting is not None or bool(self._skipped) or is_wanted

    def end(self) -> None:
        """Record that the saver's thread ends."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def hold_up(self, reason: str | None) -> None:
        """Record that the saver's thread waits for storage, or for RAM that storage frees.

        Args:
            reason: What it waits for; None: it does so no longer.
        """
        with self._changed:
            self._at_storage = reason
            self._changed.notify_all()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Record that the saver's thread waits for the agent's answer in the block."""
        with self._changed:
            self._asked_at = self._clock.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._asked_at = None
