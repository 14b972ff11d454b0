"""Tell whether a state was computed before the collectives of this process were aborted.

An abort ends the kernel of a collective with whatever its memory has by then, and the device goes
on with the work that was queued behind it: an optimizer's step with gradients that were summed in
part. The program has queued that work long before, a `save` of its outcome perhaps too. So a state
is used only if the device had computed it before the abort.

Whoever aborts calls `note_abort` first. See docs/decisions/0069.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from holdfast.errors import DeviceError, ProcessLostError


class Computed:
    """The computation of one state, to whose end the devices may not have come yet.

    Made on the thread of the training, when it passes the state on.

    Args:
        devices: Where the state is. Those that queue no work count as done.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = [_recorded(device) for device in devices if device.type == "cuda"]
        self._is_torn = False
        if self._events:
            with _lock:
                self._is_torn = _state.is_aborted
                _state.pending.add(self)

    def wait(self) -> None:
        """Wait until the devices have computed the state; any thread.

        Raises:
            DeviceError: The computation failed.
            ProcessLostError: Collectives were aborted before it had ended.
        """
        for event in self._events:
            try:
                event.synchronize()
            except RuntimeError as error:
                raise DeviceError(f"compute a state on its device: {error}") from error
        if self._is_torn:
            raise ProcessLostError(
                "compute a state on its device: expected that its collectives end, found that they "
                "were aborted, since ranks were lost"
            )

    @property
    def is_torn(self) -> bool:
        """Whether collectives were aborted before the state was computed."""
        return self._is_torn

    def note_abort(self) -> None:
        """Note that the collectives are about to be aborted."""
        try:
            is_done = all(event.query() for event in self._events)
        except RuntimeError:
            # The device has failed, as `wait` tells.
            is_done = False
        self._is_torn = self._is_torn or not is_done


def _recorded(device: torch.device) -> Any:
    """Return an event after all work that the training has queued on `device`."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class _State:
    """What this process knows of its collectives."""

    def __init__(self) -> None:
        self.is_aborted = False
        self.pending: weakref.WeakSet[Computed] = weakref.WeakSet()


_lock = threading.Lock()
_state = _State()


def note_abort() -> None:
    """Note that the collectives of this process are about to be aborted; any thread."""
    with _lock:
        _state.is_aborted = True
        for computed in list(_state.pending):
            computed.note_abort()


def note_new_group() -> None:
    """Note that states are computed by a new process group from now on."""
    with _lock:
        _state.is_aborted = False
