"""Connect the trainer to its host's agent: calls, notices, and replacement of an agent that ended.

Invariant: an accepted checkpoint stays in `Progress` until the agent reports that it is durable or
has failed. Each checkpoint that has not ended is reported again to a new agent.

An agent that stops answering is treated as ended (`local_agent.client` defines when). If its
process is still alive, for example suspended by a signal, no other agent can replace it: calls
raise at once, until it continues, and the watcher retries every `RETRY_SECS` while the manager is
open.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.clock import Clock
from holdfast.engine.lifecycle.newest import NewestListing
from holdfast.errors import (
    AgentUnavailableError,
    FencedError,
    HoldfastError,
    StepNotFoundError,
    StorageError,
    WaitInterruptedError,
)
from holdfast.format.names import AttemptId, CheckpointId
from holdfast.host.tiers.opening_listing import listing_in
from holdfast.host.tiers.ram_place import kept_text, whole_in
from holdfast.host.wire import protocol
from holdfast.host.wire.agent_directory import WORDS
from holdfast.host.wire.client import AgentClient
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.control_block import (
    ATTEMPT,
    ControlBlock,
    WaitCells,
    blocked_before_cell,
    blocked_cell,
    blocked_step_cell,
    call_cell,
    copy_seat,
    cost_cell,
    first_step_cell,
    first_time_cell,
    notice_cell,
    step_cell,
    step_time_cell,
    wait_cells,
)
from holdfast.host.wire.launch import ensure_agent, opening_secs
from holdfast.local_agent.client import AgentGoneError, AgentSilentError
from holdfast.local_agent.launch import START_SECS
from holdfast.observe.events.schema import TrainerEvent
from holdfast.store.durable import RunHome

TRIES_MAX = 5
WATCH_CALL_SECS = 60.0
RETRY_SECS = 1.0
"""The pause of the watcher between two attempts to reach an agent."""
SILENT_SECS = 2.0
"""How long an agent that was silent when it was last called is given to answer.

It reads each request when it continues, also one whose answer nobody waits for.
"""
JOIN_SECS = 0.02
"""How long `close` waits for the watcher before it interrupts the watcher's request once more."""

CLOSED = "the manager is closed"

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """The seat and the folder that the agent assigned to this trainer."""

    folder: Path
    control: ControlBlock
    attempt: AttemptId
    origin: CheckpointId | None
    seat: int
    ram_folder: Path | None
    cursor: int
    """The position of the first notice that concerns this trainer's group."""

    # Computed once, because the training thread reads them at every step.
    number: int = field(init=False)
    """The number of the attempt, which the control block's cell has."""
    step_cell: int = field(init=False)
    """The control block's cell for the step that this trainer has published."""
    step_time_cell: int = field(init=False)
    """The cell for the time at which it was published."""
    notice_cell: int = field(init=False)
    """The cell that is 1 once this trainer has received a preemption signal."""
    cost_cell: int = field(init=False)
    """The cell for the cost of a checkpoint, in nanoseconds."""
    waits: WaitCells = field(init=False)
    """The cells for the waits of the training."""
    blocked_cell: int = field(init=False)
    """The cell for the time for which saves have blocked the training."""
    blocked_before_cell: int = field(init=False)
    """The cell for that time before the step in the next one."""
    blocked_step_cell: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", self.attempt.number)
        object.__setattr__(self, "step_cell", step_cell(self.seat))
        object.__setattr__(self, "step_time_cell", step_time_cell(self.seat))
        object.__setattr__(self, "notice_cell", notice_cell(self.seat))
        object.__setattr__(self, "cost_cell", cost_cell(self.seat))
        object.__setattr__(self, "waits", wait_cells(self.seat))
        object.__setattr__(self, "blocked_cell", blocked_cell(self.seat))
        object.__setattr__(self, "blocked_before_cell", blocked_before_cell(self.seat))
        object.__setattr__(self, "blocked_step_cell", blocked_step_cell(self.seat))

    def publish_first_step(self, step: int, time: datetime) -> None:
        """Publish the first step after opening or resuming."""
        cells = self.control.cells
        cells[first_time_cell(self.seat)] = int(time.timestamp() * 1e6)
        cells[first_step_cell(self.seat)] = step

    def publish_call(self, since_ns: int) -> int:
        """Publish since when a call of the manager waits, 0: none does; return what was there."""
        cells, cell = self.control.cells, call_cell(self.seat)
        before, cells[cell] = cells[cell], since_ns
        return before

    def announce_preemption(self) -> None:
        """Publish that this trainer has a notice of a preemption."""
        # The memory is released where the manager was abandoned in the middle of its end. No agent
        # reads it then, and an error would end the training loop.
        with contextlib.suppress(ValueError):
            self.control.cells[self.notice_cell] = 1

    def begin_blocked(self) -> None:
        """Publish that what is added to the blocked time from now on is after the present step."""
        cells, step = self.control.cells, self.control.cells[self.step_cell]
        if cells[self.blocked_step_cell] != step:
            cells[self.blocked_before_cell] = cells[self.blocked_cell]
            cells[self.blocked_step_cell] = step

    def add_blocked(self, secs: float) -> None:
        """Add a time for which a save has blocked the training thread."""
        self.control.cells[self.blocked_cell] += int(secs * 1e9)

    def begin_wait(self, reason: int, now_secs: float) -> None:
        """Publish that the training waits since `now_secs`, for a reason of `WAIT_REASONS`."""
        cells, waits = self.control.cells, self.waits
        self._keep_waits()
        cells[waits.reason] = reason
        cells[waits.since] = int(now_secs * 1e9)

    def end_wait(self, reason: int, secs: float) -> None:
        """Publish that the training waits no more, and add the duration of the wait."""
        cells, waits = self.control.cells, self.waits
        cells[waits.since] = 0
        cells[waits.ended.start + reason] += int(secs * 1e9)

    def add_wait(self, reason: int, secs: float) -> None:
        """Publish a wait that has ended after the present step."""
        self._keep_waits()
        self.control.cells[self.waits.ended.start + reason] += int(secs * 1e9)

    def _keep_waits(self) -> None:
        """Keep the durations of the waits until the present step, before one after it is added."""
        cells, waits = self.control.cells, self.waits
        step = cells[self.step_cell]
        if cells[waits.step] != step:
            cells[waits.before] = cells[waits.ended]
            cells[waits.step] = step


class AgentSession:
    """One trainer's session with its agent.

    Any thread of the trainer may call it; each thread has its own connection. `place` is replaced
    as a whole, under the lock.

    Args:
        config: The agent to start if none runs.
        attach: The request to join it.
        clock: The clock for waits.
        home: Where the run lies; a directory may be moved meanwhile.

    Raises:
        AgentUnavailableError: No agent can be started or joined.
        HoldfastError: The agent refuses the trainer.
    """

    def __init__(
        self,
        config: AgentConfig,
        attach: protocol.Attach,
        clock: Clock,
        home: RunHome,
    ) -> None:
        self._config = config
        self._home = home
        self._attach = attach
        self._clock = clock
        self._pending: Callable[[], tuple[CheckpointId, ...]] = tuple
        self._on_notice: Callable[[protocol.Notice], None] = lambda notice: None
        self._on_return: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._clients = threading.local()
        self._all_clients: list[AgentClient] = []
        self._is_closed = False
        self._has_ended = False
        """Whether all connections are closed for good."""
        self._generation = 0
        self._is_return_due = False
        self._branching: protocol.Branch | None = None
        self._lost_at = -1.0
        self._lost: AgentUnavailableError | None = None
        """Why no agent could be joined after the last one had ended; None once one was."""
        self._is_silent = False
        """Whether the agent's process lived and did not answer when it was last called."""
        self._warned_text = ""
        """The last warning that no agent can be reached. Owned by the watcher's thread."""
        self._watch_client: AgentClient | None = None
        self.left: protocol.Detached | None = None
        """What stays on this host after `close`; None if the agent did not answer."""
        self.error: BaseException | None = None
        """What has left the manager's `with` block, and so ends the training."""
        self.place = self._join(opening_secs(self._config))
        self._watcher = threading.Thread(target=self._watch, name="holdfast-watch", daemon=True)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called; an interrupted call counts."""
        return self._is_closed

    @property
    def is_current(self) -> bool:
        """Whether `place` is in the run's current attempt, and no branch is unfinished.

        Of the thread that calls `branch`.
        """
        place = self.place
        return self._branching is None and place.control.cells[ATTEMPT] == place.number

    @property
    def group(self) -> str:
        """The random token that the processes of this start share."""
        return self._attach.group

    @property
    def rank(self) -> int:
        """This trainer's rank in the job."""
        return self._attach.rank

    @property
    def is_alone(self) -> bool:
        """Whether it is the only trainer of its job."""
        return self._attach.count == 1

    def start_watching(
        self,
        pending: Callable[[], tuple[CheckpointId, ...]],
        on_notice: Callable[[protocol.Notice], None],
        on_return: Callable[[], None],
    ) -> None:
        """Start to watch the agent's notices.

        Args:
            pending: Returns the saves that were reported as sealed and have not ended. For one that
                the agent does not know, a notice of kind `unknown` is passed to `on_notice`.
            on_notice: Called on the watcher's thread with each notice.
            on_return: Called after a new agent was joined, to report the saves in progress.
        """
        self._pending, self._on_notice, self._on_return = pending, on_notice, on_return
        self._watcher.start()

    def call(self, name: str, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Call the agent; if it has ended, start and join another and call that one.

        Returns:
            The agent's answer, decoded as `kind`.

        Raises:
            AgentUnavailableError: No agent can be started, or `TRIES_MAX` agents ended in a row.
            HoldfastError: The agent answered with this error.
        """
        last_error: Exception | None = self._lost
        for _ in range(TRIES_MAX):
            generation = self._generation
            gone: AgentGoneError | None = None
            # An agent that was not joined may answer at the same place: it knows neither this
            # trainer's policies nor, maybe, its protocol.
            if self._lost is None:
                try:
                    self._check_silence()
                    return self._client().call(name, message, kind)
                except AgentGoneError as error:
                    gone = last_error = error
            self._rejoin(generation, gone)
        raise AgentUnavailableError(
            f"call the agent of {self._config.run}: {TRIES_MAX} agents ended in a row "
            f"({last_error}); see the log in {self._config.run}/events"
        )

    def _check_silence(self) -> None:
        """Check that an agent that was silent answers again, in less time than a call waits.

        Raises:
            AgentGoneError: It does not.
        """
        if self._is_silent:
            client = AgentClient(self.place.folder, SILENT_SECS)
            try:
                client.call("status", protocol.Empty(), protocol.AgentStatus)
            finally:
                client.close()
            self._is_silent = False

    def renew(self) -> AgentPlace:
        """Request this trainer's current attempt, which a branch of its own group has replaced.

        Returns:
            The new place; `place` is updated.

        Raises:
            FencedError: Another group has taken over the run.
        """
        with self._lock:
            return self._take(self.call("attach", self._rejoining(), protocol.Attached))

    def branch(self, origin: CheckpointId | None) -> AgentPlace:
        """Begin a new attempt from `origin`, together with the other ranks.

        Args:
            origin: The checkpoint to branch from; None for an empty timeline.

        Returns:
            The new place; `place` is updated.

        Raises:
            StepNotFoundError: `origin` no longer exists. The timeline is unchanged.
            FencedError: Another group has taken over the run.
        """
        with self._lock:
            request = protocol.Branch(
                group=self._attach.group,
                rank=self._attach.rank,
                attempt=self.place.attempt,
                origin=origin,
            )
            self._branching = request
            return self._branch(request)

    def finish_branch(self) -> None:
        """Finish a branch whose caller was interrupted, because the agent may have begun it.

        Raises:
            FencedError: Another group has taken over the run.
        """
        with self._lock:
            if self._branching is not None:
                # If the origin no longer exists, the timeline is unchanged.
                with contextlib.suppress(StepNotFoundError):
                    self._branch(self._branching)

    def _branch(self, request: protocol.Branch) -> AgentPlace:
        try:
            place = self._take(self.call("branch", request, protocol.Attached))
        except WaitInterruptedError:
            # The agent may have begun it, as after any other interruption.
            raise
        except HoldfastError:
            self._branching = None
            raise
        self._branching = None
        return place

    def newest_listing(self) -> NewestListing | None:
        """Return the agent's listing of the newest checkpoints in the durable tier.

        Returns:
            None if it has none that still holds, or does not answer.
        """
        request = protocol.WantListing(attempt=self.place.attempt)
        try:
            listing = self.call("listing", request, protocol.DurableListing)
        except HoldfastError as error:
            log.warning("the agent's listing of the durable tier is not known: %s", error)
            return None
        return listing_in(listing) if listing.numbers else None

    def ask_briefly(
        self,
        name: str,
        message: msgspec.Struct,
        kind: type[Answer],
        timeout_secs: float = SILENT_SECS,
    ) -> Answer | None:
        """Call the agent, for at most `timeout_secs`; return None if it gives no answer.

        No other agent is started.
        """
        client = AgentClient(self.place.folder, timeout_secs)
        try:
            return client.call(name, message, kind)
        except (AgentGoneError, HoldfastError) as error:
            log.debug("%s: %s", name, error)
            return None
        finally:
            client.close()

    def report_event(self, event: TrainerEvent) -> None:
        """Add an event of this trainer to the run's events."""
        self.call("report", protocol.EventReport(event=event), protocol.Empty)

    def close(self) -> None:
        """Detach from the agent, end the watcher's thread and close all connections.

        Calls of other threads raise `AgentUnavailableError` from then on.
        """
        self._is_closed = True
        detach = protocol.Detach(
            group=self._attach.group,
            rank=self._attach.rank,
            after_error=isinstance(self.error, Exception),
        )
        # An agent that has ended needs no notification; a later one sees that the process ended.
        with contextlib.suppress(AgentGoneError, HoldfastError):
            client = self._client()
            if self._is_silent:
                client = AgentClient(self.place.folder, SILENT_SECS)
                self._all_clients.append(client)
            self.left = client.call("detach", detach, protocol.Detached)
        # The watcher may be about to send another request, so it is interrupted until it has ended.
        # If it is starting another agent, it ends after at most `launch.START_SECS`.
        while self._watcher.is_alive():
            if self._watch_client is not None:
                self._watch_client.abort()
            self._watcher.join(JOIN_SECS)
        # A save that was abandoned because storage hangs may call again: it opens no connection.
        self._has_ended = True
        for client in list(self._all_clients):
            client.end()
        self.place.control.close()

    def sockets(self) -> list[int]:
        """Return the descriptors of the connections to the agent."""
        clients = [*self._all_clients, *([self._watch_client] if self._watch_client else [])]
        descriptors = (client.fileno() for client in clients)
        return [fd for fd in descriptors if fd is not None]

    def _client(self) -> AgentClient:
        if self._has_ended:
            raise AgentUnavailableError(CLOSED)
        current: tuple[int, AgentClient] | None = getattr(self._clients, "known", None)
        if current is None or current[0] != self._generation:
            if current is not None and current[1] in self._all_clients:
                current[1].close()
                self._all_clients.remove(current[1])
            current = (self._generation, AgentClient(self.place.folder))
            self._clients.known = current
            self._all_clients.append(current[1])
        return current[1]

    def _rejoining(self) -> protocol.Attach:
        place = self.place
        return msgspec.structs.replace(self._attach, attempt=place.attempt, origin=place.origin)

    def _join(self, patience_secs: float = START_SECS) -> AgentPlace:
        for _ in range(TRIES_MAX):
            # Raises if the directory was removed: no agent is started for a replacement at its
            # path.
            self._home.current_folder()
            run = self._home.location_text
            self._config = self._config.moved_to(run)
            self._attach = msgspec.structs.replace(
                self._attach, run=run, directory=self._home.identity_text
            )
            folder, reason = ensure_agent(self._config, self._clock, patience_secs)
            if reason is not None:
                log.warning("the agent, and RAM checkpoints with it, are in %s: %s", folder, reason)
            client = AgentClient(folder)
            try:
                attached = client.call("attach", self._attach, protocol.Attached)
                for warning in attached.warnings:
                    log.warning("%s: %s", self._config.run, warning)
                return _place(folder, attached)
            except (AgentGoneError, FileNotFoundError) as error:
                # The agent ended between its answer and the call: start the next one.
                last_error = error
            finally:
                client.close()
        raise AgentUnavailableError(f"join the agent in {folder}: {last_error}")

    def _rejoin(self, generation: int, gone: AgentGoneError | None) -> None:
        asked_at = self._clock.monotonic()
        with self._lock:
            if self._is_closed:
                raise AgentUnavailableError(CLOSED)
            if self._generation == generation:
                self._is_silent = isinstance(gone, AgentSilentError)
                if self._is_silent:
                    # Its process has the place of an agent, so no other one can be started.
                    raise AgentUnavailableError(f"call the agent of {self._config.run}: {gone}")
                self._join_another(asked_at)
        self._return()

    def _join_another(self, asked_at: float) -> None:
        if self._lost is not None and self._lost_at >= asked_at:
            # Another thread tried while this one waited: its result serves all waiting threads.
            raise AgentUnavailableError(str(self._lost))
        if self._lost is None:
            log.warning("the agent of %s has ended; starting another", self._config.run)
        old = self.place
        self._attach = self._rejoining()
        try:
            place = self._join()
        except AgentUnavailableError as error:
            self._lost, self._lost_at = error, self._clock.monotonic()
            raise
        except StorageError as error:
            raise StorageError(f"{error}{self._left_text()}") from error
        # The new agent's control block may lack what this trainer published.
        copy_seat(old.control.cells, old.seat, place.control.cells, place.seat)
        self.place, self._is_return_due = place, True
        self._lost = None
        self._generation += 1

    def _return(self) -> None:
        """Report the saves in progress to a new agent.

        If an exception interrupts the thread that joined the agent, the watcher reports instead:
        it finds its own connection broken and calls this after the joining thread.
        """
        if self._is_return_due:
            self._on_return()
            self._is_return_due = False

    def _take(self, attached: protocol.Attached) -> AgentPlace:
        self.place = replace(
            self.place, attempt=attached.attempt, origin=attached.origin, seat=attached.seat
        )
        return self.place

    def _watch(self) -> None:
        try:
            self._follow_notices()
        finally:
            if self._watch_client is not None:
                self._watch_client.close()

    def _follow_notices(self) -> None:
        cursor, generation = 0, -1
        while not self._is_closed:
            if self._lost is not None:
                if not self._recover(self._generation, None):
                    return
                continue
            if generation != self._generation:
                cursor, generation = self.place.cursor, self._generation
                if self._watch_client is not None:
                    self._watch_client.close()
                self._watch_client = AgentClient(self.place.folder, WATCH_CALL_SECS)
            request = protocol.Watch(
                group=self._attach.group,
                rank=self._attach.rank,
                cursor=cursor,
                pending=self._pending(),
            )
            try:
                assert self._watch_client is not None
                answer = self._watch_client.call("watch", request, protocol.Notices)
            except (AgentGoneError, AgentUnavailableError) as error:
                gone = error if isinstance(error, AgentGoneError) else AgentGoneError(str(error))
                if not self._is_closed and not self._recover(generation, gone):
                    return
                continue
            self._is_silent, self._warned_text = False, ""
            cursor = answer.cursor
            for notice in answer.notices:
                if notice.kind == "lost":
                    # No other agent is started for a run that is gone.
                    self._home.note_gone(notice.reason)
                self._on_notice(notice)
                if notice.kind == "fenced" and notice.data == self._attach.group:
                    # The agent leaves soon, and no other one may be started for this group.
                    return
            for unknown in answer.unknown:
                self._on_notice(protocol.Notice(kind="unknown", id=unknown))

    def _recover(self, generation: int, gone: AgentGoneError | None) -> bool:
        try:
            self._rejoin(generation, gone)
        except FencedError as error:
            notice = protocol.Notice(kind="fenced", reason=str(error), data=self._attach.group)
            self._on_notice(notice)
            return False
        except HoldfastError as error:
            if self._is_closed:
                return False
            level = logging.DEBUG if str(error) == self._warned_text else logging.WARNING
            self._warned_text = str(error)
            log.log(level, "%s", error)
            if self._home.is_gone():
                self._on_notice(protocol.Notice(kind="lost", reason=str(error)))
                return False
            self._on_notice(protocol.Notice(kind="unavailable", reason=str(error)))
            self._clock.sleep(RETRY_SECS)
        return True

    def _left_text(self) -> str:
        """Return what an agent that was killed left in RAM of a run whose directory is gone."""
        if self.place.ram_folder is not None and self._home.is_gone():
            with contextlib.suppress(StorageError):
                left = whole_in(self.place.ram_folder, self._clock)
                return f". {kept_text(self.place.folder, left)}" if left else ""
        return ""


def _place(folder: Path, attached: protocol.Attached) -> AgentPlace:
    return AgentPlace(
        folder=folder,
        control=ControlBlock(folder / WORDS),
        attempt=attached.attempt,
        origin=attached.origin,
        seat=attached.seat,
        ram_folder=Path(attached.ram_folder) if attached.ram_folder else None,
        cursor=attached.cursor,
    )
