"""Preemption: signals that say the process will have to stop soon.

A handler writes one word that the agent reads, and then calls the handler that stood there before.
The default action, which would end the process, is not taken: ending well is what this is for. Nor
is the handler of `jax.distributed` called meanwhile: its processes would agree on a last step too,
which nobody asks for, and those that leave before they have agreed stand still in
`jax.distributed.shutdown()`. See docs/decisions/0018.

A second signal of the same number ends the process as it would without Holdfast: the earlier action
is put back, and the signal is raised again. What comes within `REPEAT_SECS` of the first one is
taken for a repetition of it: launchers signal a process and its group, which delivers two.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.clock import Clock
from holdfast.manager.native_signals import NativeHandler, native_handler

REPEAT_SECS = 1.0

log = logging.getLogger(__name__)


class PreemptionSignals:
    """Handlers for `signals` that call `notify`; `close` puts the earlier ones back."""

    def __init__(
        self, signals: Sequence[signal.Signals], notify: Callable[[], None], clock: Clock
    ) -> None:
        self._notify = notify
        self._clock = clock
        self._earlier: dict[signal.Signals, Any] = {}
        self._first_at_secs: dict[signal.Signals, float] = {}
        self._is_closed = False
        if signals and threading.current_thread() is not threading.main_thread():
            log.warning(
                "preemption signals (%s) are not watched: only the main thread can, and the "
                "manager was made on another",
                ", ".join(number.name for number in signals),
            )
            return
        for number in signals:
            native = native_handler(number)
            earlier = signal.signal(number, self._handle)
            self._earlier[number] = native or earlier

    @property
    def handled(self) -> tuple[signal.Signals, ...]:
        """The signals that have a handler of this."""
        return tuple(self._earlier)

    def close(self) -> None:
        """Puts the earlier handlers back, where nobody replaced ours meanwhile."""
        self._is_closed = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._handle and earlier is not None:
                _put_back(number, earlier)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier.get(signal.Signals(number))
        if not self._is_closed:
            if self._is_second(signal.Signals(number)):
                self._pass_on(signal.Signals(number), frame)
                return
            self._notify()
        elif earlier == signal.SIG_DFL and signal.getsignal(number) == self._handle:
            # A handler that was set over ours has put it back: it stands for what it replaced.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if isinstance(earlier, NativeHandler):
            if self._is_closed or not _is_of_jax(earlier):
                earlier.invoke()
        elif callable(earlier):
            earlier(number, frame)

    def _is_second(self, number: signal.Signals) -> bool:
        now_secs = self._clock.monotonic()
        return now_secs - self._first_at_secs.setdefault(number, now_secs) >= REPEAT_SECS

    def _pass_on(self, number: signal.Signals, frame: FrameType | None) -> None:
        """Let a second signal do what it would do without Holdfast."""
        earlier = self._earlier.get(number)
        if earlier is not None and (
            signal.getsignal(number) == self._handle or not callable(earlier)
        ):
            _put_back(number, earlier)
            os.kill(os.getpid(), number)
        elif callable(earlier):
            # A handler that was set over ours has called ours: raised again, it would do so again.
            earlier(number, frame)


def _put_back(number: signal.Signals, earlier: Any) -> None:
    """Set the action again that was there before."""
    if isinstance(earlier, NativeHandler):
        signal.signal(number, signal.SIG_DFL)
        earlier.put_back()
    else:
        signal.signal(number, earlier)


def _is_of_jax(handler: NativeHandler) -> bool:
    return "jaxlib" in Path(handler.library).parts
