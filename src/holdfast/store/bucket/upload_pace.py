"""The pace of this host's uploads: how many parts are in flight, and the pauses between them.

Services refuse requests for a while if a run makes too many (503 SlowDown, 429). The pace follows
what they bear, as TCP does: trouble halves the parts in flight and doubles the pause before the
next one; each part without trouble makes room for a little more. One part is always let through,
so an upload that is slowed down goes on.

The client repeats a refused part by itself and reports nothing, except that the part takes long. So
the trouble of a part is its time, compared with the fastest of the last ones in proportion to their
sizes; a refusal of any other request is reported by `slow_down`. Time in which threads of this
process waited for a processor does not count: a machine that has too much work is no trouble of the
service.

Memory: a part in flight is a view of the source's memory, or a copy where the source does not last.
So copies have at most `PARTS_AT_ONCE` times the size of a part, however many images are uploaded.

See docs/decisions/0034.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import Clock
from holdfast.store.contract import Source, exact_blocks

TASKS = Path("/proc/self/task")
NANOSECONDS = 1_000_000_000


def run_delays() -> dict[str, int]:
    """Return the nanoseconds that each thread of this process was ready and has waited, by its id.

    The kernel counts them. They grow on a machine with more work than processors, and where a limit
    of the cgroup stops the process. Where the kernel does not count, the result is empty.
    """
    delays: dict[str, int] = {}
    try:
        threads = os.listdir(TASKS)
    except OSError:
        return delays
    for thread in threads:
        try:
            delays[thread] = int((TASKS / thread / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            # It has ended meanwhile, or the kernel does not count.
            continue
    return delays


def longest_delay_secs(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Return for how long the thread that waited most has done so between two counts."""
    delays = (count - before.get(thread, 0) for thread, count in after.items())
    return max(0, max(delays, default=0)) / NANOSECONDS


PARTS_AT_ONCE = 8
USUAL_GROWTH = 1.05
"""By how much the usual time of a byte grows with each part that takes longer."""
SLOW_FACTOR = 4.0
SLOW_SECS = 1.0
"""A part has had trouble if it took this much more than `SLOW_FACTOR` times the usual time."""
FIRST_PAUSE_SECS = 0.25
PAUSE_MAX_SECS = 20.0
ROOM_SECS = 300.0
"""How long a part waits for room. The client ends a part earlier, unless something refers to it."""
WAIT_SECS = 1.0
"""How often a waiting upload looks for room; the end of a part wakes it earlier."""
DELAYS_SECS = 0.25
"""How old the delays at the beginning of a part may be. It takes a millisecond to read them."""

log = logging.getLogger(__name__)


class _Beginning(NamedTuple):
    secs: float
    size_bytes: int
    delays: Mapping[str, int]


class UploadPace:
    """The pace of all uploads of one store. Thread-safe. `delays` returns those of `run_delays`."""

    def __init__(self, clock: Clock, delays: Callable[[], Mapping[str, int]] = run_delays) -> None:
        self._clock = clock
        self._read_delays = delays
        self._delays: Mapping[str, int] = {}
        self._delays_read_secs = -DELAYS_SECS
        # Reentrant: the end of a part is reported by whatever thread drops the last reference.
        self._changed = threading.Condition(threading.RLock())
        self._width = float(PARTS_AT_ONCE)
        self._in_flight = 0
        self._pause_secs = 0.0
        self._slowed_secs = -PAUSE_MAX_SECS
        self._usual_secs_per_byte: float | None = None

    @property
    def parts_at_once(self) -> int:
        """How many parts may be in flight now."""
        return int(self._width)

    @property
    def in_flight(self) -> int:
        """How many parts are in flight."""
        return self._in_flight

    def paced_parts(
        self, source: Source, part_size_bytes: int
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes of `source` in parts, each when it may be sent.

        A part is in flight until nothing refers to it any more.

        Raises:
            InvalidArgumentError: the source yields another number of bytes than it has.
        """
        for start in range(0, source.size_bytes, part_size_bytes):
            stop = min(start + part_size_bytes, source.size_bytes)
            self._wait()
            part = _part(source, start, stop)
            weakref.finalize(part, self._ended, self._began(stop - start)).atexit = False
            yield part
            del part

    def slow_down(self) -> None:
        """Halve the parts in flight, and double the pause before the next one.

        Trouble within the pause that trouble has caused is the same: a refused request is repeated
        meanwhile, and the pause grows to no more than the time for which requests are refused.
        """
        with self._changed:
            if self._clock.monotonic() - self._slowed_secs < self._pause_secs:
                return
            self._width = max(1.0, self._width / 2)
            self._pause_secs = min(PAUSE_MAX_SECS, self._pause_secs * 2 or FIRST_PAUSE_SECS)
            self._slowed_secs = self._clock.monotonic()
            if self._in_flight:
                log.info(
                    "uploads slow down: %d parts at once, with pauses of %.2f s",
                    self.parts_at_once,
                    self._pause_secs,
                )

    def _wait(self) -> None:
        began_secs = self._clock.monotonic()
        with self._changed:
            while (
                self._in_flight >= self.parts_at_once
                and self._clock.monotonic() - began_secs < ROOM_SECS
            ):
                self._changed.wait(WAIT_SECS)
            pause_secs = self._pause_secs
        if pause_secs:
            # Between half of the pause and all of it, so that many hosts do not send in step.
            self._clock.sleep(pause_secs * (0.5 + int(self._clock.new_token()[:4], 16) / (1 << 17)))

    def _began(self, size_bytes: int) -> _Beginning:
        with self._changed:
            self._in_flight += 1
            now_secs = self._clock.monotonic()
            if now_secs - self._delays_read_secs >= DELAYS_SECS:
                self._delays, self._delays_read_secs = self._read_delays(), now_secs
            return _Beginning(now_secs, size_bytes, self._delays)

    def _ended(self, began: _Beginning) -> None:
        with self._changed:
            self._in_flight -= 1
            secs = self._clock.monotonic() - began.secs
            # The last part of an image is smaller, and says little about the time of a whole one.
            per_byte = secs / began.size_bytes
            usual = per_byte if self._usual_secs_per_byte is None else self._usual_secs_per_byte
            self._usual_secs_per_byte = min(per_byte, usual * USUAL_GROWTH)
            limit_secs = usual * began.size_bytes * SLOW_FACTOR + SLOW_SECS
            if secs > limit_secs:
                secs -= longest_delay_secs(began.delays, self._read_delays())
            if secs <= limit_secs:
                self._width = min(PARTS_AT_ONCE, self._width + 1 / self._width)
                self._pause_secs = (
                    self._pause_secs / 2 if self._pause_secs > FIRST_PAUSE_SECS else 0
                )
            elif began.secs > self._slowed_secs:
                # Parts that were in flight together have had the same trouble.
                self.slow_down()
            self._changed.notify_all()


def _part(source: Source, start_bytes: int, stop_bytes: int) -> memoryview:
    """Return bytes [start, stop) of a source in one block, that nothing else refers to."""
    blocks = exact_blocks(source, start_bytes, stop_bytes)
    if source.is_lasting:
        pieces = [*blocks]
        if len(pieces) == 1:
            # A view of the view: the source may refer to its own.
            return pieces[0][:]
        return memoryview(b"".join(pieces))
    copied = bytearray()
    for block in blocks:
        copied += block
    return memoryview(copied)
