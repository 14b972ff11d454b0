"""Follow the notices of a trainer's agent, and join another one when it has ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from holdfast.clock import Clock
from holdfast.errors import AgentUnavailableError, FencedError, HoldfastError
from holdfast.format.names import CheckpointId
from holdfast.host.wire import protocol
from holdfast.host.wire.client import AgentClient
from holdfast.local_agent.client import AgentGoneError
from holdfast.store.durable import RunHome
from holdfast.trainer.opening.agent_place import AgentPlace

WATCH_CALL_SECS = 60.0
RETRY_SECS = 1.0
"""The pause between two attempts to reach an agent."""
JOIN_SECS = 0.02
"""How long `end` waits for the thread before it interrupts its request once more."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WatchCallbacks:
    """What is called on the watcher's thread.

    Attributes:
        pending: Returns the saves that were reported as sealed and have not ended. For one that the
            agent does not know, a notice of kind `unknown` is passed on.
        on_notice: Takes each notice.
    """

    pending: Callable[[], tuple[CheckpointId, ...]]
    on_notice: Callable[[protocol.Notice], None]


class WatchedSession(Protocol):
    """What the thread needs of the session; `AgentSession` describes it."""

    @property
    def place(self) -> AgentPlace: ...

    @property
    def group(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def is_lost(self) -> bool: ...

    @property
    def is_closed(self) -> bool: ...

    def rejoin(self, generation: int, gone: AgentGoneError | None) -> None: ...

    def note_answer(self) -> None: ...


class AgentWatch:
    """The thread that follows the notices of one session's agent.

    Args:
        session: The session.
        callbacks: What is called.
        home: Where the run lies.
        clock: The clock for pauses.
    """

    def __init__(
        self, session: WatchedSession, callbacks: WatchCallbacks, home: RunHome, clock: Clock
    ) -> None:
        self._session = session
        self._callbacks = callbacks
        self._home = home
        self._clock = clock
        self._client: AgentClient | None = None
        self._warned_text = ""
        """The last warning that no agent can be reached."""
        self._thread = threading.Thread(target=self._run, name="holdfast-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """End the thread, once the session is closed."""
        # It may be about to send another request, so it is interrupted until it has ended. If it is
        # starting another agent, it ends after at most `launch.START_SECS`.
        while self._thread.is_alive():
            if self._client is not None:
                self._client.abort()
            self._thread.join(JOIN_SECS)

    def is_alive(self) -> bool:
        """Return whether the thread runs: it also ends when the attempt is fenced."""
        return self._thread.is_alive()

    def descriptors(self) -> list[int]:
        """Return the descriptor of its connection, if it has one."""
        fd = None if self._client is None else self._client.fileno()
        return [] if fd is None else [fd]

    def _run(self) -> None:
        try:
            self._follow()
        finally:
            if self._client is not None:
                self._client.close()

    def _follow(self) -> None:
        session = self._session
        cursor, generation = 0, -1
        while not session.is_closed:
            if session.is_lost:
                if not self._recover(session.generation, None):
                    return
                continue
            if generation != session.generation or self._client is None:
                cursor, generation = session.place.cursor, session.generation
                if self._client is not None:
                    self._client.close()
                self._client = AgentClient(session.place.folder, WATCH_CALL_SECS)
            request = protocol.Watch(
                group=session.group,
                rank=session.rank,
                cursor=cursor,
                pending=self._callbacks.pending(),
            )
            try:
                answer = self._client.call("watch", request, protocol.Notices)
            except (AgentGoneError, AgentUnavailableError) as error:
                gone = error if isinstance(error, AgentGoneError) else AgentGoneError(str(error))
                if not session.is_closed and not self._recover(generation, gone):
                    return
                continue
            session.note_answer()
            self._warned_text = ""
            cursor = answer.cursor
            if not self._pass_on(answer):
                return

    def _pass_on(self, answer: protocol.Notices) -> bool:
        """Pass the notices on; return False if no more are to be followed."""
        for notice in answer.notices:
            if notice.kind == "lost":
                # No other agent is started for a run that is gone.
                self._home.note_gone(notice.reason)
            self._callbacks.on_notice(notice)
            if notice.kind == "fenced" and notice.data == self._session.group:
                # The agent leaves soon, and no other one may be started for this group.
                return False
        for unknown in answer.unknown:
            self._callbacks.on_notice(protocol.Notice(kind="unknown", id=unknown))
        return True

    def _recover(self, generation: int, gone: AgentGoneError | None) -> bool:
        """Join another agent, or report why not; return False if none is to be joined any more."""
        session, on_notice = self._session, self._callbacks.on_notice
        try:
            session.rejoin(generation, gone)
        except FencedError as error:
            on_notice(protocol.Notice(kind="fenced", reason=str(error), data=session.group))
            return False
        except HoldfastError as error:
            if session.is_closed:
                return False
            level = logging.DEBUG if str(error) == self._warned_text else logging.WARNING
            self._warned_text = str(error)
            log.log(level, "%s", error)
            if self._home.is_gone():
                on_notice(protocol.Notice(kind="lost", reason=str(error)))
                return False
            on_notice(protocol.Notice(kind="unavailable", reason=str(error)))
            self._clock.sleep(RETRY_SECS)
        return True
