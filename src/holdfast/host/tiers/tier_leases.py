"""Write the leases of one durable tier on threads that nothing waits for.

A service that does not answer holds a request for minutes. The leases in the other tier must be
renewed meanwhile: a start on another host would take the attempt for dead.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from holdfast.engine.lifecycle.leases import LeaseWriter
from holdfast.host.tiers.daemon_threads import in_thread

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
