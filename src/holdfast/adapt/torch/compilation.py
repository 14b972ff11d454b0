"""Report how long PyTorch compiles, from the callbacks of its compiler, Dynamo.

Dynamo calls them at the beginning and at the end of each compilation: of a function on the thread
that calls it, and of a backward pass, which autograd may run on another thread while the training
waits for it. Nested and simultaneous compilations are one.

The callbacks are no public interface: a version without them reports nothing. Dynamo is imported
by the first optimizer or `torch.compile`, and `torch.compiler.reset()` forgets the callbacks. So
`listen` is called again with each state.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from holdfast.clock import SystemClock

BACKWARD = "LAZY_BACKWARD"


class CompilationTimes:
    """Passes on how long the thread that made this, or a backward pass, compiles."""

    def __init__(self, report: Callable[[float], None]) -> None:
        self._report: Callable[[float], None] | None = report
        self._thread = threading.get_ident()
        self._clock = SystemClock()
        self._began_secs: float | None = None

    def listen(self) -> None:
        """Register the callbacks, unless they are registered or Dynamo is not imported yet."""
        handler = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
        if self._report is None or handler is None:
            return
        if self._begin not in handler.start_callbacks:
            self._began_secs = None
            handler.register_start_callback(self._begin)
            handler.register_end_callback(self._end)

    def stop(self) -> None:
        """Report nothing more; may be called again, and in a forked child."""
        self._report = None
        handler = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
        if handler is not None and self._begin in handler.start_callbacks:
            handler.remove_start_callback(self._begin)
            handler.remove_end_callback(self._end)

    def _begin(self, *arguments: Any) -> None:
        # An error here would end the training: versions differ in what they pass.
        trigger = [getattr(getattr(a, "callback_trigger", None), "name", "") for a in arguments]
        if BACKWARD in trigger or threading.get_ident() == self._thread:
            self._began_secs = self._clock.monotonic()

    def _end(self, *_arguments: object) -> None:
        began_secs, self._began_secs = self._began_secs, None
        if began_secs is not None and self._report is not None:
            self._report(self._clock.monotonic() - began_secs)
