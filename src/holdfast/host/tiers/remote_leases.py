"""Renew an attempt's lease in the remote tier, on a thread that nothing waits for.

A service that does not answer holds a request for minutes. The lease in the durable tier must be
renewed meanwhile: a start on another host would take the attempt for dead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.engine.lifecycle.leases import LeaseWriter

LeaseCall = Callable[[LeaseWriter], None]


class RemoteLeases:
    """The calls on the remote tier's lease, one at a time; a later one replaces one that waits."""

    def __init__(self, writer: LeaseWriter) -> None:
        self._writer = writer
        self._changed = threading.Condition()
        self._wanted: LeaseCall | None = None
        self._is_calling = False
        self._thread: threading.Thread | None = None

    def call_soon(self, call: LeaseCall) -> None:
        """Make a call soon; it does not raise."""
        with self._changed:
            self._wanted = call
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="holdfast-remote-lease", daemon=True
                )
                self._thread.start()

    def wait_idle(self, timeout_secs: float) -> None:
        """Wait until all calls have ended, or the timeout has passed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._wanted is None and not self._is_calling, timeout_secs
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None)
                call, self._wanted = self._wanted, None
                self._is_calling = True
            try:
                if call is not None:
                    call(self._writer)
            finally:
                with self._changed:
                    self._is_calling = False
                    self._changed.notify_all()
