"""Run calls that may take minutes on threads that do not delay the end of the process.

A service that does not answer holds a request for as long. The threads of an executor are awaited
when the process ends, and these are not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def begin_call(call: Callable[[], T]) -> Future[T]:
    """Begin a call on a thread of its own; it cannot be cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        # Once the caller is gone, nothing takes the result.
        with contextlib.suppress(RuntimeError):
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    Thread(target=work, name="holdfast-call", daemon=True).start()
    return future


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call that may take long on a thread that does not delay the end of the process."""
    return await asyncio.wrap_future(begin_call(call))
