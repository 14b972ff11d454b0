"""Track replicas of other hosts' parts that trainers on this host make from their own bytes.

An order to pull such a part waits up to `WAIT_SECS` for the local replica, which usually exists
before the order arrives. Each replica is taken once; its slot is released when it is no longer
needed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from holdfast.format.names import CheckpointId

WAIT_SECS = 20.0
"""A rank copies its data in less time; after that the part is pulled from its host."""

Copy = tuple[CheckpointId, int]
"""A checkpoint, and the rank whose part is copied."""


@dataclass(slots=True)
class _Making:
    maker: int
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    slot: str | None = None


class LocalReplicas:
    """The replicas that are being made or wait to be taken; owned by the agent's event loop."""

    def __init__(self) -> None:
        self._making: dict[Copy, _Making] = {}

    def begin(
        self,
        maker: int,
        checkpoint: CheckpointId,
        parts: Collection[int],
        is_held: Callable[[CheckpointId], bool],
    ) -> list[Copy]:
        """Register the parts that rank `maker` copies now; its unfinished replicas are dropped.

        Returns:
            The finished replicas that are no longer needed: those of checkpoints that are not held.
        """
        self.forget_maker(maker)
        unwanted = [
            c for c, m in self._making.items() if m.has_ended.is_set() and not is_held(c[0])
        ]
        for copy in unwanted:
            del self._making[copy]
        for part in parts:
            self._making[checkpoint, part] = _Making(maker)
        return unwanted

    def end(self, checkpoint: CheckpointId, part: int, slot: str | None) -> bool:
        """Record that a replica is complete in `slot`, or will not be made (None).

        Returns:
            Whether the replica waits to be taken; False if it is no longer needed.
        """
        making = self._making.get((checkpoint, part))
        if making is None:
            return False
        making.slot = slot
        making.has_ended.set()
        if slot is None:
            del self._making[checkpoint, part]
        return slot is not None

    def forget_maker(self, maker: int) -> None:
        """Drop the unfinished replicas of a rank."""
        for copy, making in list(self._making.items()):
            if making.maker == maker and not making.has_ended.is_set():
                self.end(*copy, None)

    def clear(self) -> None:
        """Drop all replicas; called when other trainers take the present ones' place."""
        for copy in list(self._making):
            self.end(*copy, None)

    async def wait(self, checkpoint: CheckpointId, part: int) -> str | None:
        """Wait for a replica that is, or is being, made here, and take it.

        Returns:
            The slot, which the caller owns from now on. None at once if no rank makes the replica,
            and after `WAIT_SECS` if it is not complete by then.
        """
        making = self._making.get((checkpoint, part))
        if making is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECS):
                await making.has_ended.wait()
        # It may have been dropped, or replaced by a later one, during the wait.
        if self._making.get((checkpoint, part)) is making:
            del self._making[checkpoint, part]
        return making.slot
