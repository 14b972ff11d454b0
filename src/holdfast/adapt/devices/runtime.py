"""What a transfer needs of a kind of device: a few calls, each of which returns at once.

Two kinds exist: CUDA's runtime (`holdfast.adapt.devices.cuda`) and the stand-in device of
`holdfast.testing`.
Addresses are the process's own, of the host's memory and of a device's alike. A device is told by
its number, as the process counts the devices of that kind.
"""

from __future__ import annotations

from typing import Any, Protocol

Mark = Any
"""A place in a stream's queue; what it is, its stream knows."""


class DeviceStream(Protocol):
    """A queue of copies on one device: they run one after another, beside the training's work."""

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Queues a copy from the device's memory to the host's.

        Raises:
            DeviceError: it was not queued.
        """
        ...

    def mark(self) -> Mark:
        """A mark behind all that is queued.

        Raises:
            DeviceError: there is none.
        """
        ...

    def wait_for(self, mark: Mark) -> None:
        """What is queued from now on runs after `mark`, which is another stream's of the device.

        Raises:
            DeviceError: it was not queued.
        """
        ...

    def has_passed(self, mark: Mark) -> bool:
        """Return whether all before `mark` was done.

        Raises:
            DeviceError: something before it failed.
        """
        ...

    def reuse(self, mark: Mark) -> None:
        """A mark that was passed, or never will be, is asked for no more."""
        ...

    def is_idle(self) -> bool:
        """Return whether nothing is queued or running.

        Raises:
            DeviceError: something failed; nothing runs any more.
        """
        ...


class DeviceRuntime(Protocol):
    """A kind of device."""

    def register(self, address: int, size_bytes: int, device: int) -> None:
        """Locks host memory in place, so that every device writes into it by itself.

        Raises:
            DeviceError: it is not locked.
        """
        ...

    def unregister(self, address: int) -> None:
        """Undoes `register`.

        Raises:
            DeviceError: it is locked until the process ends.
        """
        ...

    def open_stream(self, device: int) -> DeviceStream:
        """A stream that waits for no other.

        Raises:
            DeviceError: there is none.
        """
        ...
