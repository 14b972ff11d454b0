"""Define what the asynchronous calls return, and call the callbacks of saves that have ended.

Callbacks are called on a thread of this module, without a wait of the program. It looks at the run
as any other reader does, so it needs nothing of the training thread. Waits of the program call what
is due before they return.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast
from holdfast.errors import HoldfastError
from holdfast.interop.orbax.records import RECORD

PAUSE_MIN_SECS = 0.05
PAUSE_MAX_SECS = 2.0
"""How often the thread looks at the run, while callbacks are due: less and less often."""
PAUSE_GROWTH = 1.5

log = logging.getLogger(__name__)


class AsyncResponse:
    """The result of a call that may still be running: `result` waits for it.

    Args:
        wait: Waits for the result, at most as long as it is told to, and returns it.
        watch: Calls its argument once the call has succeeded; None: it has ended already.
    """

    def __init__(
        self,
        wait: Callable[[float | None], Any],
        watch: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._wait, self._watch = wait, watch

    def result(self, timeout: float | None = None) -> Any:
        """Return the result.

        Raises:
            HoldfastError: The call failed.
        """
        return self._wait(timeout)

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with the result once it is there, on another thread; not if it fails."""
        if self._watch is None:
            callback(self._wait(None))
        else:
            self._watch(lambda: callback(True))


def completed(found: Any) -> AsyncResponse:
    """Return the response of a call that has ended."""
    return AsyncResponse(lambda timeout: found)


def failed(error: Exception) -> AsyncResponse:
    """Return the response of a call that has failed, whose `result` raises `error`."""

    def wait(timeout: float | None) -> Any:
        raise error

    return AsyncResponse(wait, lambda callback: None)


@dataclass(frozen=True, slots=True)
class _Due:
    """What is called once the checkpoint of `step` with this record is durable."""

    step: int
    record: str
    callback: Callable[[], None]


class Completions:
    """Calls callbacks once checkpoints of a run are durable.

    Args:
        directory: The run.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._changed = threading.Condition()
        self._due: list[_Due] = []
        """Guarded by `_changed`, as the next two."""
        self._thread: threading.Thread | None = None
        self._is_ended = False
        self._calling = threading.RLock()
        """Held while callbacks are called."""

    def add(self, step: int, record: str, callback: Callable[[], None]) -> None:
        """Call `callback` once the checkpoint of `step` with this record is durable."""
        with self._changed:
            self._due.append(_Due(step, record, callback))
            self._changed.notify_all()
            if self._thread is None and not self._is_ended:
                self._thread = threading.Thread(
                    target=self._run, name="holdfast-orbax-callbacks", daemon=True
                )
                self._thread.start()
        if self._is_ended:
            self.call_due()

    def call_due(self) -> None:
        """Call what is due by now; what is being called has been when this returns."""
        with self._changed:
            is_idle = not self._due
        if is_idle:
            with self._calling:
                return
        with holdfast.open_run(self._directory) as run:
            self._call_due(run)

    def end(self) -> None:
        """Call what is due, since all saves have ended, and end the thread."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        pause_secs = PAUSE_MIN_SECS
        with holdfast.open_run(self._directory) as run:
            is_ended = False
            while not is_ended:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._due) or self._is_ended)
                    self._changed.wait_for(lambda: self._is_ended, pause_secs)
                    is_ended = self._is_ended
                has_called = self._call_due(run)
                longer_secs = min(pause_secs * PAUSE_GROWTH, PAUSE_MAX_SECS)
                pause_secs = PAUSE_MIN_SECS if has_called else longer_secs

    def _call_due(self, run: holdfast.Run) -> bool:
        """Call what is due; return whether something was."""
        with self._calling:
            with self._changed:
                waiting = list(self._due)
            due = [entry for entry in waiting if _is_durable(run, entry)]
            with self._changed:
                self._due = [entry for entry in self._due if entry not in due]
            for entry in due:
                self._call(entry)
            return bool(due)

    @staticmethod
    def _call(entry: _Due) -> None:
        try:
            entry.callback()
        except Exception:
            log.exception("the callback of the save of step %d failed", entry.step)


def _is_durable(run: holdfast.Run, entry: _Due) -> bool:
    try:
        return run.metadata(entry.step).values.get(RECORD) == entry.record
    except HoldfastError:
        # It is not there, or cannot be read now. Failures are reported to the training thread.
        return False
