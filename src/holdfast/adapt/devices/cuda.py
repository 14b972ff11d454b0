"""NVIDIA GPUs: registered memory, streams and copies through the CUDA runtime.

Assumes the package `cuda-bindings`, which releases the GIL during each call, and a driver;
`open_cuda` raises if either is missing. Each call restores the calling thread's current device,
which belongs to the framework.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from holdfast.errors import DeviceError


def open_cuda() -> CudaRuntime:
    """Return the CUDA runtime.

    Raises:
        DeviceError: the bindings are not installed, or find no usable device.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise DeviceError(
            "find CUDA: expected the package cuda-bindings, found none that can be imported "
            f"({error}); install holdfast-checkpoint[cuda]"
        ) from error
    cuda = CudaRuntime(runtime)
    if cuda.device_count() == 0:
        raise DeviceError("find CUDA: expected a device, found none; see nvidia-smi")
    return cuda


class CudaRuntime:
    """The calls of the CUDA runtime; see `holdfast.adapt.devices.runtime.DeviceRuntime`."""

    def __init__(self, bindings: ModuleType | Any) -> None:
        self._cuda = bindings

    def device_count(self) -> int:
        """Return the number of devices that this process can use.

        Raises:
            DeviceError: the driver is missing, or too old for the bindings.
        """
        return int(self.call("cudaGetDeviceCount"))

    def page_lock(self, address: int, size_bytes: int, device: int) -> None:
        # Portable: registered for the contexts of all devices, not only this one.
        with self._on(device):
            flags = self._cuda.cudaHostRegisterPortable
            self.call("cudaHostRegister", address, size_bytes, flags)

    def page_unlock(self, address: int) -> None:
        self.call("cudaHostUnregister", address)

    def open_stream(self, device: int) -> CudaStream:
        with self._on(device):
            # Non-blocking: it does not wait for the legacy default stream.
            handle = self.call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking)
        return CudaStream(self, handle, device)

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        before = self.call("cudaGetDevice")
        self.call("cudaSetDevice", device)
        try:
            yield
        finally:
            self.call("cudaSetDevice", before)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the runtime, and return its result.

        Raises:
            DeviceError: it failed; the message has its name and the runtime's error.
        """
        code, *results = getattr(self._cuda, name)(*arguments)
        if code != self._cuda.cudaError_t.cudaSuccess:
            # Clear the runtime's last error, which an unrelated later caller would read otherwise.
            self._cuda.cudaGetLastError()
            raise DeviceError(self._message(name, code))
        return results[0] if results else None

    def _message(self, name: str, code: Any) -> str:
        _, text = self._cuda.cudaGetErrorString(code)
        message = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
        return f"{name}: expected success, found error {int(code)} ({message})"

    # The calls of `CudaStream`.

    def enqueue(self, handle: Any, target: int, source: int, size_bytes: int) -> None:
        """Queue a copy from a device to the host."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.call("cudaMemcpyAsync", target, source, size_bytes, kind, handle)

    def make_event(self, device: int) -> Any:
        """Return a new event, without timing, which is the cheaper kind."""
        with self._on(device):
            return self.call("cudaEventCreateWithFlags", self._cuda.cudaEventDisableTiming)

    def record_event(self, event: Any, handle: Any) -> None:
        """Record an event after all queued work."""
        self.call("cudaEventRecord", event, handle)

    def make_wait(self, handle: Any, event: Any) -> None:
        """Make work that is queued later wait for an event."""
        self.call("cudaStreamWaitEvent", handle, event, 0)

    def is_done(self, name: str, subject: Any) -> bool:
        """Return whether an event or stream is done, by `cudaEventQuery` or `cudaStreamQuery`."""
        (code,) = getattr(self._cuda, name)(subject)
        if code == self._cuda.cudaError_t.cudaSuccess:
            return True
        if code == self._cuda.cudaError_t.cudaErrorNotReady:
            return False
        raise DeviceError(self._message(name, code))


class CudaStream:
    """A stream of Holdfast's own; see `holdfast.adapt.devices.runtime.DeviceStream`."""

    def __init__(self, runtime: CudaRuntime, handle: Any, device: int) -> None:
        self._runtime = runtime
        self._handle = handle
        self._device = device
        self._events: list[Any] = []

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        self._runtime.enqueue(self._handle, target, source, size_bytes)

    def record_mark(self) -> Any:
        event = self._events.pop() if self._events else self._runtime.make_event(self._device)
        self._runtime.record_event(event, self._handle)
        return event

    def wait_for(self, mark: Any) -> None:
        self._runtime.make_wait(self._handle, mark)

    def has_passed(self, mark: Any) -> bool:
        return self._runtime.is_done("cudaEventQuery", mark)

    def recycle_mark(self, mark: Any) -> None:
        self._events.append(mark)

    def is_idle(self) -> bool:
        return self._runtime.is_done("cudaStreamQuery", self._handle)
