"""End a command at Ctrl-C although it runs other libraries, which may swallow the interruption.

Python raises KeyboardInterrupt wherever the main thread is. Inside a callback, such as JAX's of the
garbage collector, it is printed and dropped; C++ code makes another error of it.

Invariants:
- After the first Ctrl-C the command ends as interrupted, whatever the libraries raise or return.
- Nothing is printed after it: threads of libraries that still run find their files removed.
- The process ends at the second Ctrl-C, or `limit_secs` after the first, wherever it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType

LIMIT_SECS = 10.0
AGAIN_SECS = 0.05
"""The time from a dropped interruption to the next one."""
INTERRUPTED = 130
"""The exit code of an interrupted command."""


@contextlib.contextmanager
def ends_at_interrupt(limit_secs: float = LIMIT_SECS) -> Iterator[None]:
    """Run the body so that Ctrl-C ends it by KeyboardInterrupt and by nothing else.

    The process must end after that: it prints no errors of libraries any more. Where Ctrl-C has
    another handler, or outside the main thread, the body runs as it is.

    Args:
        limit_secs: How long the body may go on after Ctrl-C, before the process is ended.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed in the body.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interruption = _Interruption(limit_secs)
    signal.signal(signal.SIGINT, interruption.take_signal)
    try:
        yield
    finally:
        interruption.is_over = True
        if interruption.is_signalled:
            # In place of whatever a library has made of it.
            raise KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Interruption:
    """Ctrl-C in the body of `ends_at_interrupt`. The main thread alone changes it."""

    def __init__(self, limit_secs: float) -> None:
        self._limit_secs = limit_secs
        self.is_signalled = False
        self.is_over = False
        """Whether the body has ended."""
        self._is_repeated = False
        """Whether the next signal is sent by this process, in place of a dropped interruption."""

    def take_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT.

        Raises:
            KeyboardInterrupt: In the body.
        """
        if self.is_signalled and not self._is_repeated:
            self._end_now()
        self._is_repeated = False
        if not self.is_signalled:
            self.is_signalled = True
            self._silence()
            _after(self._limit_secs, self._end_now)
        if not self.is_over:
            raise KeyboardInterrupt

    def _silence(self) -> None:
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        threading.excepthook = lambda _: None
        sys.unraisablehook = self._take_unraisable

    def _take_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Interrupt again once a callback has dropped the interruption."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt) and not self.is_over:
            self._is_repeated = True
            main = threading.main_thread().ident
            assert main is not None
            _after(AGAIN_SECS, lambda: signal.pthread_kill(main, signal.SIGINT))

    def _end_now(self) -> None:
        if not self.is_over:
            os.write(2, b"interrupted\n")
        os._exit(INTERRUPTED)


def _after(secs: float, call: Callable[[], None]) -> None:
    """Call from another thread, which does not keep the process running."""
    timer = threading.Timer(secs, call)
    timer.daemon = True
    timer.start()
