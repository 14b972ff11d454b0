"""Report how long JAX compiles, from the events of `jax.monitoring`.

JAX reports tracing, lowering and compiling of a program when each has ended, and that of the
functions within a program before that of the program. A step that compiles nothing has no event.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import cache

import jax.monitoring

from holdfast.clock import SystemClock

EVENTS = frozenset(
    f"/jax/core/compile/{name}_duration"
    for name in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)
SPANS_MAX = 10_000
"""How many events are compared with a later one, which may contain them."""


class CompilationTimes:
    """Passes on how long the calling thread compiles, each moment once."""

    def __init__(self, report: Callable[[float], None]) -> None:
        self._report = report
        self._thread = threading.get_ident()
        self._clock = SystemClock()
        self._spans: deque[tuple[float, float]] = deque(maxlen=SPANS_MAX)
        """(begin, duration) of the events that no later one contains."""

    def note_event(self, event: str, secs: float) -> None:
        """Report an event that has just ended, without the time of the events within it."""
        if event not in EVENTS or threading.get_ident() != self._thread:
            return
        begun_secs, inner_secs = self._clock.monotonic() - secs, 0.0
        while self._spans and self._spans[-1][0] >= begun_secs:
            inner_secs += self._spans.pop()[1]
        self._spans.append((begun_secs, secs))
        self._report(max(0.0, secs - inner_secs))


_watching: list[CompilationTimes] = []


def watch_compilations(report: Callable[[float], None]) -> Callable[[], None]:
    """Call `report` with the seconds of each compilation; see `adapt.contract.Framework`."""
    _listen()
    times = CompilationTimes(report)
    _watching.append(times)

    def stop() -> None:
        if times in _watching:
            _watching.remove(times)

    return stop


@cache
def _listen() -> None:
    """Register the process's listener; JAX 0.6 cannot remove one."""
    jax.monitoring.register_event_duration_secs_listener(_note_event)


def _note_event(event: str, duration_secs: float, **_details: object) -> None:
    for times in tuple(_watching):
        times.note_event(event, duration_secs)
