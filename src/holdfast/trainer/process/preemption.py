"""Handle the signals that announce a preemption, after which the process will soon be stopped.

A handler writes one cell that the agent reads, and then calls the handler installed before it. It
does not take the default action, which would end the process before the last checkpoint. Nor does
it call a framework's own notifier while the manager is open: the processes would then also agree on
a last step, which no caller uses. See `holdfast.adapt.native_signals` and docs/decisions/0018.

A signal that arrives while a call of the manager waits also ends that wait (`holdfast.waits`): the
launcher wants the process to leave. A process of a job that was preempted already has its signal
yet to come, and that one ends nothing. See docs/decisions/0041.

A second signal of the same number has the effect that it has without Holdfast: the earlier action
is restored and the signal is raised again. A signal within `REPEAT_SECS` of the first one counts as
its repetition: launchers signal both a process and its group, which delivers two.

Which signals count under which launcher is in docs/decisions/0054.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from holdfast import waits
from holdfast.adapt.native_signals import NativeHandler, native_handler
from holdfast.clock import Clock

REPEAT_SECS = 1.0
"""How long after the first signal another one counts as its repetition."""

log = logging.getLogger(__name__)


class PreemptionSignals:
    """Handle signals by calling `notify`. `close` restores the earlier handlers.

    The constructor replaces handlers of other code only, for the time until `install` is called:
    the default action would end the process, and before the first step that loses nothing.

    Args:
        signals: The signals. None: SIGTERM, and those of `launcher_signals` that have their default
            action when `install` is called. Other code uses these for other purposes, too.
        launcher_signals: The signals by which the launcher may announce a preemption.
        notify: Called in the signal handler.
        clock: The clock.
    """

    def __init__(
        self,
        signals: Sequence[int] | None,
        launcher_signals: Sequence[signal.Signals],
        notify: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._notify = notify
        self._clock = clock
        self._earlier: dict[signal.Signals, Any] = {}
        self._first_at_secs: dict[signal.Signals, float] = {}
        self._is_closed = False
        self._signals: tuple[signal.Signals, ...] = ()
        self._signals_if_default: tuple[signal.Signals, ...] = ()
        self.has_arrived = False
        """Whether a signal has arrived."""
        self.is_announced = False
        """Whether the job is preempted already: this process's first signal only repeats it."""
        self.announced_secs: float | None = None
        """When it was announced here, by the monotonic clock; None: it was not."""
        if signals is None:
            signals, self._signals_if_default = (signal.SIGTERM,), tuple(launcher_signals)
        if signals and threading.current_thread() is not threading.main_thread():
            log.warning(
                "preemption signals (%s) are not handled: only the main thread can install "
                "handlers, and the manager was created on another thread",
                ", ".join(signal.Signals(number).name for number in signals),
            )
            return
        self._signals = tuple(map(signal.Signals, signals))
        self._install(number for number in self._signals if _has_handler(number))

    def install(self) -> None:
        """Install the handlers of all signals, and notify of one that has arrived before."""
        if not self._signals:
            return
        self._install(number for number in self._signals if number not in self._earlier)
        self._install(number for number in self._signals_if_default if _is_default(number))
        if self.has_arrived:
            self._notify()

    def announce(self) -> None:
        """Announce a preemption as a signal does. A signal that follows repeats it."""
        self.is_announced = True
        if self.announced_secs is None:
            self.announced_secs = self._clock.monotonic()
        self._notify()

    def _install(self, numbers: Iterable[signal.Signals]) -> None:
        for number in list(numbers):
            native = native_handler(number)
            earlier = signal.signal(number, self._handle)
            self._earlier[number] = native or earlier

    @property
    def handled(self) -> tuple[signal.Signals, ...]:
        """The signals for which a handler was installed."""
        return tuple(self._earlier)

    def close(self) -> None:
        """Restore the earlier handlers, except where other code has replaced ours meanwhile."""
        self._is_closed = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._handle and earlier is not None:
                _put_back(number, earlier)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier.get(signal.Signals(number))
        if not self._is_closed:
            is_first = number not in self._first_at_secs
            if self._is_second(signal.Signals(number)):
                waits.arrived(signal.Signals(number), at_once=True)
                self._pass_on(signal.Signals(number), frame)
                return
            if is_first and (self.has_arrived or not self.is_announced):
                waits.arrived(signal.Signals(number))
            self.has_arrived = True
            self.announce()
        elif earlier == signal.SIG_DFL and signal.getsignal(number) == self._handle:
            # A handler installed over ours has restored ours after `close`. Ours now takes the
            # place of the default action, so it performs that action.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if isinstance(earlier, NativeHandler):
            if self._is_closed or not earlier.is_preemption_notifier:
                earlier.invoke()
        elif callable(earlier):
            earlier(number, frame)

    def _is_second(self, number: signal.Signals) -> bool:
        now_secs = self._clock.monotonic()
        return now_secs - self._first_at_secs.setdefault(number, now_secs) >= REPEAT_SECS

    def _pass_on(self, number: signal.Signals, frame: FrameType | None) -> None:
        """Give a second signal the effect that it has without Holdfast."""
        earlier = self._earlier.get(number)
        if earlier is not None and (
            signal.getsignal(number) == self._handle or not callable(earlier)
        ):
            _put_back(number, earlier)
            os.kill(os.getpid(), number)
        elif callable(earlier):
            # A handler installed over ours has called ours. Raising the signal again would call it
            # again, without end.
            earlier(number, frame)


def _has_handler(number: signal.Signals) -> bool:
    """Return whether a function, of Python or of C, handles the signal."""
    return callable(signal.getsignal(number)) or native_handler(number) is not None


def _is_default(number: signal.Signals) -> bool:
    """Return whether the signal has its default action."""
    return signal.getsignal(number) is signal.SIG_DFL and native_handler(number) is None


def _put_back(number: signal.Signals, earlier: Any) -> None:
    """Install the earlier action again."""
    if isinstance(earlier, NativeHandler):
        signal.signal(number, signal.SIG_DFL)
        earlier.put_back()
    else:
        signal.signal(number, earlier)
