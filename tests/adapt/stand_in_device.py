"""A simulated device: host memory takes the place of device memory, and threads that of streams.

It behaves like the CUDA runtime where that matters. Copies run later, in order, from the source's
contents at that time, and a stream may wait for another one; only registered memory may be written;
memory must be unregistered before it is unmapped; after a failed copy its stream has failed. `held`
stops the streams, so that a test decides when copies run.

While it is `serving`, JAX's CPU arrays count as arrays on a device; with `serving_torch`, those of
PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.adapt.jax.devices import Platform, XlaError, XlaMemory, serving
from holdfast.errors import DeviceError

STOP_SECS = 30.0


class StandInDevice:
    """A kind of device, as `holdfast.adapt` uses it: its runtime and its memory.

    Args:
        limit_bytes: the memory of each device as XLA reports it; None: XLA reports nothing.
        in_use_bytes: the memory in use as XLA reports it, and its peak.
    """

    def __init__(self, *, limit_bytes: int | None = None, in_use_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.in_use_bytes = in_use_bytes
        self.peak_bytes = in_use_bytes
        self.registered: dict[int, int] = {}
        self.registered_count = 0
        self.copied_bytes: dict[int, int] = {}
        self.copy_count = 0
        self.refuses_to_register = False
        self.fails_at_copy: int | None = None
        """The copy, counted from 0 over all streams, that fails when it runs."""
        self.refuses_copy: int | None = None
        """The copy, counted likewise, that is refused when it is queued."""
        self.is_out_of_memory = False
        """Whether a copy on the device finds no room, in spite of the reported memory."""
        self.runs_out_later = False
        """Whether that error is raised only by `wait`."""
        self._queued_count = 0
        self._streams: list[StandInStream] = []
        self._turn = threading.Condition()
        self._runs_below: int | None = None

    # As `holdfast.adapt.devices.runtime.DeviceRuntime`.

    def page_lock(self, address: int, size_bytes: int, device: int) -> None:
        if self.refuses_to_register or not size_bytes:
            raise DeviceError("cudaHostRegister: expected success, found error 1 (stand-in)")
        if address in self.registered:
            raise DeviceError("cudaHostRegister: expected success, found error 712 (stand-in)")
        self.registered[address] = size_bytes
        self.registered_count += 1

    def page_unlock(self, address: int) -> None:
        if address not in self.registered:
            raise DeviceError("cudaHostUnregister: expected success, found error 713 (stand-in)")
        size_bytes = self.registered.pop(address)
        assert _is_mapped(address, size_bytes), "memory was unmapped before it was unregistered"

    def open_stream(self, device: int) -> StandInStream:
        stream = StandInStream(self, device)
        self._streams.append(stream)
        return stream

    # As `holdfast.adapt.jax.devices.DeviceMemory`.

    def memory_stats(self, device: Any) -> Mapping[str, int] | None:
        if self.limit_bytes is None:
            return None
        return {
            "bytes_limit": self.limit_bytes,
            "bytes_in_use": self.in_use_bytes,
            "peak_bytes_in_use": max(self.peak_bytes, self.in_use_bytes),
        }

    def device_copies(self, arrays: list[Any]) -> list[Any]:
        if self.is_out_of_memory:
            raise XlaError("RESOURCE_EXHAUSTED: Out of memory (stand-in)")
        return XlaMemory().device_copies(arrays)

    def wait(self, arrays: list[Any]) -> None:
        if self.runs_out_later:
            raise XlaError("RESOURCE_EXHAUSTED: Out of memory while executing (stand-in)")
        XlaMemory().wait(arrays)

    # For tests.

    @contextlib.contextmanager
    def serving(self) -> Iterator[StandInDevice]:
        """Serve JAX's CPU arrays; on exit, run all queued copies and end the threads."""
        platform = Platform(open_runtime=lambda: self, memory=self)
        try:
            with serving("cpu", platform):
                yield self
        finally:
            self._end_threads()

    @contextlib.contextmanager
    def serving_torch(self) -> Iterator[StandInDevice]:
        """Serve PyTorch's CPU tensors; otherwise like `serving`."""
        from holdfast.adapt.torch import devices

        try:
            with devices.serving("cpu", lambda: self):
                yield self
        finally:
            self._end_threads()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stop all copies within the context."""
        self.let_run(0)
        try:
            yield
        finally:
            self.let_run(None)

    def let_run(self, count: int | None) -> None:
        """Allow `count` more copies to run, or all with None; return at once."""
        with self._turn:
            self._runs_below = None if count is None else self.copy_count + count
            self._turn.notify_all()

    def _end_threads(self) -> None:
        self.let_run(None)
        for stream in self._streams:
            stream.end_thread()

    def is_queued(self) -> bool:
        """Return whether any copy is queued or running."""
        return any(not stream.is_quiet() for stream in self._streams)

    def check_queued(self, target: int, size_bytes: int) -> None:
        """Check a copy when it is queued.

        Raises:
            DeviceError: the copy is refused.
        """
        number, self._queued_count = self._queued_count, self._queued_count + 1
        if number == self.refuses_copy:
            raise DeviceError("cudaMemcpyAsync: expected success, found error 1 (stand-in)")
        self._check_registered(target, size_bytes)

    def run(self, target: int, source: int, size_bytes: int, device: int) -> bool:
        """Run one copy; return whether it succeeded."""
        with self._turn:
            self._turn.wait_for(self._is_next_free, STOP_SECS)
            number, self.copy_count = self.copy_count, self.copy_count + 1
        if number == self.fails_at_copy:
            return False
        self._check_registered(target, size_bytes)
        ctypes.memmove(target, source, size_bytes)
        self.copied_bytes[device] = self.copied_bytes.get(device, 0) + size_bytes
        return True

    def _is_next_free(self) -> bool:
        return self._runs_below is None or self.copy_count < self._runs_below

    def _check_registered(self, target: int, size_bytes: int) -> None:
        for start, size in self.registered.items():
            if start <= target and target + size_bytes <= start + size:
                return
        raise DeviceError("cudaMemcpyAsync: expected registered memory, found none (stand-in)")


@dataclass(frozen=True, slots=True)
class _StandInMark:
    """A position in a stream's queue."""

    stream: StandInStream
    count: int


class StandInStream:
    """A queue of copies that a thread runs in order."""

    def __init__(self, owner: StandInDevice, device: int) -> None:
        self._owner = owner
        self._device = device
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, int, int] | _StandInMark] = deque()
        self._queued = 0
        self._done = 0
        self._failure: DeviceError | None = None
        self._is_stopped = False
        name = f"stand-in-stream-{device}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        self._owner.check_queued(target, size_bytes)
        with self._changed:
            self._queued += 1
            self._waiting.append((target, source, size_bytes))
            self._changed.notify_all()

    def record_mark(self) -> _StandInMark:
        return _StandInMark(self, self._queued)

    def wait_for(self, mark: _StandInMark) -> None:
        with self._changed:
            self._queued += 1
            self._waiting.append(mark)
            self._changed.notify_all()

    def has_passed(self, mark: _StandInMark) -> bool:
        with self._changed:
            if self._failure is not None:
                raise self._failure
            return self._done >= mark.count

    def recycle_mark(self, mark: _StandInMark) -> None:
        pass

    def is_idle(self) -> bool:
        with self._changed:
            if self._failure is not None:
                raise self._failure
            return self._done == self._queued

    def is_quiet(self) -> bool:
        """Return whether nothing is queued or running; never raises."""
        with self._changed:
            return self._failure is not None or self._done == self._queued

    def comes_to(self, count: int) -> bool:
        """Wait until `count` operations are done; return whether they are."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= count or self._failure, STOP_SECS)
            return self._done >= count

    def end_thread(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._thread.join(STOP_SECS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_stopped)
                if not self._waiting or self._failure is not None:
                    return
                found = self._waiting.popleft()
            if isinstance(found, _StandInMark):
                is_well = found.stream.comes_to(found.count)
            else:
                is_well = self._owner.run(*found, self._device)
            with self._changed:
                if is_well:
                    self._done += 1
                else:
                    self._failure = DeviceError(
                        "cudaEventQuery: expected success, found error 719 (stand-in)"
                    )
                    self._waiting.clear()
                self._changed.notify_all()


def _is_mapped(address: int, size_bytes: int) -> bool:
    """Return whether these addresses are mapped in this process."""
    reached = address
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, stop = line.split()[0].partition("-")
        if int(start, 16) <= reached < int(stop, 16):
            reached = int(stop, 16)
    return reached >= address + size_bytes
