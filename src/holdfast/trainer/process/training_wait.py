"""Report the blocks of a training loop in which it waits, such as for its next batch.

Compilations are reported as waits too, by the framework.
"""

from __future__ import annotations

from holdfast.clock import Clock
from holdfast.observe.events.schema import COMPILATION, WAIT_REASONS
from holdfast.trainer import arguments
from holdfast.trainer.opening.agent_session import AgentSession


class TrainingWait:
    """A context manager for all waits of one training, entered at each of them.

    Of nested blocks the outermost counts. Entering and leaving writes to shared memory only; a
    training loop does both at every step, so this is no generator and allocates nothing.

    Args:
        session: The session whose agent reads the waits.
        clock: The clock for their durations.
    """

    def __init__(self, session: AgentSession, clock: Clock) -> None:
        self._session = session
        self._clock = clock
        self._depth = 0
        self._reason = 0
        self._began_secs = 0.0

    def of(self, reason: str) -> TrainingWait:
        """Return the block to enter, for a reason of `TRAINING_WAITS`; an inner block has no own.

        Raises:
            InvalidArgumentError: The reason is none of them.
        """
        position = arguments.check_wait_reason(reason)
        if self._depth == 0:
            self._reason = position
        return self

    def add_compilation(self, secs: float) -> None:
        """Report a compilation that has just ended; within another wait it is a part of that."""
        if self._depth == 0 and not self._session.is_closed:
            self._session.place.add_wait(WAIT_REASONS.index(COMPILATION), secs)

    def __enter__(self) -> None:
        if self._depth == 0:
            self._began_secs = self._clock.monotonic()
            self._session.place.begin_wait(self._reason, self._began_secs)
        self._depth += 1

    def __exit__(self, *_error: object) -> None:
        self._depth -= 1
        if self._depth == 0 and not self._session.is_closed:
            waited_secs = self._clock.monotonic() - self._began_secs
            self._session.place.end_wait(self._reason, waited_secs)
