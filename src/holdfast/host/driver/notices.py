"""Keep the notices to trainers: a list that each trainer follows with its own cursor."""

from __future__ import annotations

import asyncio
from collections import deque

from holdfast.host.wire.protocol import Notice, Notices

KEPT_COUNT = 10_000
WAIT_SECS = 20.0


class NoticeBoard:
    """The newest `KEPT_COUNT` notices; owned by the agent's event loop."""

    def __init__(self) -> None:
        self._notices: deque[Notice] = deque(maxlen=KEPT_COUNT)
        self._count = 0
        self._changed = asyncio.Event()

    @property
    def count(self) -> int:
        """The number of notices posted so far; as a cursor, it skips all of them."""
        return self._count

    def post(self, notice: Notice) -> None:
        """Add a notice, and wake all waiting readers."""
        self._notices.append(notice)
        self._count += 1
        # A new event per notice: waiters keep the old one, and a shared one would have to be
        # cleared while they wake.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def after(self, cursor: int) -> Notices:
        """Return the notices after `cursor`; wait up to `WAIT_SECS` if there are none."""
        if cursor >= self._count:
            try:
                async with asyncio.timeout(WAIT_SECS):
                    await self._changed.wait()
            except TimeoutError:
                return Notices(cursor=self._count, notices=())
        new_count = min(self._count - min(cursor, self._count), len(self._notices))
        new = list(self._notices)[len(self._notices) - new_count :]
        return Notices(cursor=self._count, notices=tuple(new))
