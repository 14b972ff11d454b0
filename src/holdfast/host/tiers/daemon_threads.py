"""Run calls that may take minutes on threads that do not delay the end of the process.

A service that does not answer holds a request for as long. The threads of an executor are awaited
when the process ends, and these are not. Nor does anything wait for those that write leases: the
leases in the other tier must be renewed meanwhile, or a start on another host would take the
attempt for dead.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TypeVar

from holdfast import waits
from holdfast.engine.lifecycle.leases import LeaseWriter

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call that may take long on a thread that does not delay the end of the process."""
    return await asyncio.wrap_future(waits.begin_call(call))


LeaseCall = Callable[[LeaseWriter], None]


class TierLeases:
    """The calls on one tier's leases, one at a time; a later call replaces one that waits.

    Owned by the event loop.
    """

    def __init__(self, writer: LeaseWriter) -> None:
        self.writer = writer
        self._next: LeaseCall | None = None
        self._calling: asyncio.Task[None] | None = None

    def call_soon(self, call: LeaseCall) -> asyncio.Task[None]:
        """Make a call soon; the task ends once no call is left."""
        self._next = call
        if self._calling is None or self._calling.done():
            self._calling = asyncio.create_task(self._call())
        return self._calling

    async def _call(self) -> None:
        while self._next is not None:
            call, self._next = self._next, None
            await in_thread(functools.partial(call, self.writer))
