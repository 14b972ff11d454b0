"""Notices to trainers: a list that each of them follows with a cursor of its own."""

from __future__ import annotations

import asyncio
from collections import deque

from holdfast.agent.protocol import Notice, Notices

KEPT_COUNT = 10_000
WAIT_SECS = 20.0


class NoticeBoard:
    """Owned by the agent's event loop."""

    def __init__(self) -> None:
        self._notices: deque[Notice] = deque(maxlen=KEPT_COUNT)
        self._count = 0
        self._changed = asyncio.Event()

    @property
    def count(self) -> int:
        """How many were posted so far: the cursor of a reader that wants only later ones."""
        return self._count

    def post(self, notice: Notice) -> None:
        """Adds a notice and wakes who waits for one."""
        self._notices.append(notice)
        self._count += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def after(self, cursor: int) -> Notices:
        """What was posted after `cursor`; waits a while where there is nothing yet."""
        if cursor >= self._count:
            try:
                async with asyncio.timeout(WAIT_SECS):
                    await self._changed.wait()
            except TimeoutError:
                return Notices(cursor=self._count, notices=())
        new_count = min(self._count - min(cursor, self._count), len(self._notices))
        new = list(self._notices)[len(self._notices) - new_count :]
        return Notices(cursor=self._count, notices=tuple(new))
