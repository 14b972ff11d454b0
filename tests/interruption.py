"""Exceptions at every place of a call where a signal's handler may raise one, and at more."""

from __future__ import annotations

import concurrent.futures.thread
import gc
import logging
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_LEAVING = {"__exit__", "release", "_release_save", "_acquire_restore"}
"""No handler runs between the call before one of these of a lock and its effect."""
_OF_PYTHON = {
    threading.Thread.start.__code__,
    threading.Event.wait.__code__,
    threading.Event.set.__code__,
}
_RELEASES = {logging._releaseLock.__code__, logging.Handler.release.__code__}  # type: ignore[attr-defined]
"""Functions of logging that do nothing but release its locks, which would otherwise stay held."""
_SWALLOWING = {logging.StreamHandler.emit.__code__, logging.LogRecord.__init__.__code__}
"""The second asks `multiprocessing`, where that was imported, for the process's name."""
POOLS = concurrent.futures.thread.__file__
"""Python's own events and semaphores do not survive an exception; its pools use them."""


class Interruption:
    """Raises `error` at the `position`th call, counted from 1, of a Python or C function."""

    def __init__(self, position: int, error: BaseException) -> None:
        self._left = position
        self._error = error
        self.has_raised = False
        self.was_lost = False
        """Whether Python has swallowed it: it came in a finalizer or a callback."""
        self.place = ""
        self._may_be_lost = False
        """Whether it came in logging's own code that swallows an `Exception`."""

    def run(self, call: Callable[[], Any]) -> None:
        """Make the call; the error has to reach this caller as it was raised."""
        hook, sys.unraisablehook = sys.unraisablehook, self._swallowed
        gc.disable()
        try:
            self._call(call)
        finally:
            gc.enable()
            sys.unraisablehook = hook

    def _call(self, call: Callable[[], Any]) -> None:
        caught = None
        try:
            sys.setprofile(self._profile)
            try:
                call()
            finally:
                sys.setprofile(None)
        except type(self._error) as error:
            caught = error
        expected = self._error if self.has_raised and not self.was_lost else None
        if not (self._may_be_lost and caught is None):
            assert caught is expected, f"swallowed or replaced: raised at {self.place}"

    def _profile(self, frame: FrameType, event: str, found: Any) -> None:
        if event == "c_call":
            if found is sys.setprofile or _leaves_a_lock(found):
                return
        elif event != "call":
            return
        if _is_of_python(frame) or frame.f_code in _RELEASES:
            return
        self._left -= 1
        if self._left == 0:
            sys.setprofile(None)
            self.has_raised = True
            name = frame.f_code.co_qualname if event == "call" else repr(found)
            self.place = f"{name} in {frame.f_code.co_filename}:{frame.f_lineno}"
            self._may_be_lost = isinstance(self._error, Exception) and _is_in_a_handler(frame)
            raise self._error

    def _swallowed(self, found: Any) -> None:
        self.was_lost |= found.exc_value is self._error


def _is_of_python(frame: FrameType | None) -> bool:
    is_threading = False
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        if frame.f_code in _OF_PYTHON:
            return True
        is_threading, frame = True, frame.f_back
    return is_threading and frame is not None and frame.f_code.co_filename == POOLS


def _is_in_a_handler(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _SWALLOWING:
        frame = frame.f_back
    return frame is not None


def _leaves_a_lock(function: Any) -> bool:
    return function.__name__ in _LEAVING and isinstance(function.__self__, _LOCKS)
