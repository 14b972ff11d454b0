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
from dataclasses import replace
from typing import TypeVar

import msgspec

from holdfast.clock import Clock
from holdfast.engine.lifecycle.newest import NewestListing
from holdfast.errors import (
    AgentUnavailableError,
    HoldfastError,
    StepNotFoundError,
    StorageError,
    WaitInterruptedError,
)
from holdfast.format.names import CheckpointId
from holdfast.host.tiers.opening_listing import listing_in
from holdfast.host.tiers.ram_place import kept_text, whole_in
from holdfast.host.wire import protocol
from holdfast.host.wire.client import AgentClient
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.control_block import ATTEMPT, copy_seat
from holdfast.host.wire.launch import ensure_agent, opening_secs
from holdfast.local_agent.client import AgentGoneError, AgentSilentError
from holdfast.local_agent.launch import START_SECS
from holdfast.observe.events.schema import TrainerEvent
from holdfast.store.durable import RunHome
from holdfast.trainer.opening.agent_connections import CLOSED, AgentConnections
from holdfast.trainer.opening.agent_place import AgentPlace, place_of
from holdfast.trainer.opening.agent_watch import AgentWatch, WatchCallbacks

TRIES_MAX = 5
SILENT_SECS = 2.0
"""How long an agent that was silent when it was last called is given to answer.

It reads each request when it continues, also one whose answer nobody waits for.
"""
log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=msgspec.Struct)


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
        self._on_return: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._connections = AgentConnections()
        self._watch: AgentWatch | None = None
        self._is_closed = False
        self._generation = 0
        self._is_return_due = False
        self._branching: protocol.Branch | None = None
        self._lost_at = -1.0
        self._lost: AgentUnavailableError | None = None
        """Why no agent could be joined after the last one had ended; None once one was."""
        self._is_silent = False
        """Whether the agent's process lived and did not answer when it was last called."""
        self.left: protocol.Detached | None = None
        """What stays on this host after `close`; None if the agent did not answer."""
        self.error: BaseException | None = None
        """What has left the manager's `with` block, and so ends the training."""
        self.place = self._join(opening_secs(self._config))

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called; an interrupted call counts."""
        return self._is_closed

    @property
    def generation(self) -> int:
        """How many agents were joined before this one."""
        return self._generation

    @property
    def is_lost(self) -> bool:
        """Whether no agent could be joined after the last one had ended."""
        return self._lost is not None

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
        self._on_return = on_return
        self._watch = AgentWatch(self, WatchCallbacks(pending, on_notice), self._home, self._clock)
        self._watch.start()

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
            self.rejoin(generation, gone)
        raise AgentUnavailableError(
            f"call the agent of {self._config.run}: {TRIES_MAX} agents ended in a row "
            f"({last_error}); see the log in {self._config.run}/events"
        )

    def note_answer(self) -> None:
        """Record that the agent has answered the watcher."""
        self._is_silent = False

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
                client = self._connections.add(AgentClient(self.place.folder, SILENT_SECS))
            self.left = client.call("detach", detach, protocol.Detached)
        if self._watch is not None:
            self._watch.end()
        # A save that was abandoned because storage hangs may call again: it opens no connection.
        self._connections.end()
        self.place.control.close()

    def sockets(self) -> list[int]:
        """Return the descriptors of the connections to the agent."""
        watch = self._watch.descriptors() if self._watch is not None else []
        return [*self._connections.descriptors(), *watch]

    def _client(self) -> AgentClient:
        return self._connections.of_thread(self.place.folder, self._generation)

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
                return place_of(folder, attached)
            except (AgentGoneError, FileNotFoundError) as error:
                # The agent ended between its answer and the call: start the next one.
                last_error = error
            finally:
                client.close()
        raise AgentUnavailableError(f"join the agent in {folder}: {last_error}")

    def rejoin(self, generation: int, gone: AgentGoneError | None) -> None:
        """Join another agent, unless another thread has done so meanwhile.

        Args:
            generation: `generation` at the call that has failed.
            gone: Its error.

        Raises:
            AgentUnavailableError: None can be joined, or this one lives and does not answer.
            HoldfastError: It refuses the trainer.
        """
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

    def _left_text(self) -> str:
        """Return what an agent that was killed left in RAM of a run whose directory is gone."""
        if self.place.ram_folder is not None and self._home.is_gone():
            with contextlib.suppress(StorageError):
                left = whole_in(self.place.ram_folder, self._clock)
                return f". {kept_text(self.place.folder, left)}" if left else ""
        return ""
