"""The device calls that a transfer needs. Each returns at once.

Two kinds exist: CUDA's runtime (`holdfast.adapt.devices.cuda`) and the simulated device of
the tests.
Addresses are in the process's address space, for the host's memory and a device's alike. A device
is identified by its index among the process's devices of that kind.
"""

from __future__ import annotations

from typing import Any, Protocol

Mark = Any
"""A position in a stream's queue; opaque except to its stream."""


class DeviceStream(Protocol):
    """A queue of copies on one device, run in order, concurrently with the training's work."""

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Queue a copy from the device's memory to the host's.

        Raises:
            DeviceError: the copy was not queued.
        """
        ...

    def record_mark(self) -> Mark:
        """Return a mark after all queued copies.

        Raises:
            DeviceError: the mark could not be queued.
        """
        ...

    def wait_for(self, mark: Mark) -> None:
        """Make copies queued from now on run after `mark`, of another stream of the same device.

        Raises:
            DeviceError: the wait was not queued.
        """
        ...

    def has_passed(self, mark: Mark) -> bool:
        """Return whether all work before `mark` is done.

        Raises:
            DeviceError: work before `mark` failed.
        """
        ...

    def recycle_mark(self, mark: Mark) -> None:
        """Recycle a mark that was passed or never will be; the caller does not use it again."""
        ...

    def is_idle(self) -> bool:
        """Return whether nothing is queued or running.

        Raises:
            DeviceError: the stream failed and runs no more work.
        """
        ...


class DeviceRuntime(Protocol):
    """A kind of device."""

    def page_lock(self, address: int, size_bytes: int, device: int) -> None:
        """Page-lock host memory, so that every device can write into it directly.

        Raises:
            DeviceError: the memory is not locked.
        """
        ...

    def page_unlock(self, address: int) -> None:
        """Undo `register`.

        Raises:
            DeviceError: the memory stays locked until the process ends.
        """
        ...

    def open_stream(self, device: int) -> DeviceStream:
        """Return a new stream that is independent of all others.

        Raises:
            DeviceError: the stream could not be created.
        """
        ...
