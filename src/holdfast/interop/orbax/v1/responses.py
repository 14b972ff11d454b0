"""Define what the asynchronous calls return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class AsyncResponse:
    """The result of a call that may still be running.

    `result` waits for it. Callbacks of `on_complete` are called by `result`, on its thread.
    """

    def __init__(self, wait: Callable[[float | None], Any]) -> None:
        self._wait = wait
        self._callbacks: list[Callable[[Any], None]] = []

    def result(self, timeout: float | None = None) -> Any:
        """Return the result.

        Raises:
            HoldfastError: The call failed.
        """
        value = self._wait(timeout)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(value)
        return value

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with the result, once it is there."""
        self._callbacks.append(callback)


def completed(found: Any) -> AsyncResponse:
    """Return the response of a call that has ended."""
    return AsyncResponse(lambda timeout: found)
