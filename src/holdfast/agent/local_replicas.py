"""The copies of other hosts' parts that trainers here make of their own bytes.

An order to pull such a part waits for its copy, for a while: usually that is there before the
order. Each copy is taken once, or its slot is given back when nobody can want it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from holdfast.format.names import CheckpointId

WAIT_SECS = 20.0
"""A rank copies what it holds in less; after that the part is pulled from its host."""

Copy = tuple[CheckpointId, int]
"""A checkpoint, and the rank whose part is copied."""


@dataclass(slots=True)
class _Making:
    maker: int
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    slot: str | None = None


class LocalReplicas:
    """Owned by the agent's event loop."""

    def __init__(self) -> None:
        self._making: dict[Copy, _Making] = {}

    def begin(
        self,
        maker: int,
        checkpoint: CheckpointId,
        parts: Collection[int],
        is_held: Callable[[CheckpointId], bool],
    ) -> list[Copy]:
        """Rank `maker` copies these parts now, and no more of an earlier checkpoint.

        Returns:
            The copies that nobody wants any more: of checkpoints that are not held.
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
        """It stands in that slot, or does not come; False where nobody waits for it any more."""
        making = self._making.get((checkpoint, part))
        if making is None:
            return False
        making.slot = slot
        making.has_ended.set()
        if slot is None:
            del self._making[checkpoint, part]
        return slot is not None

    def forget_maker(self, maker: int) -> None:
        """That rank makes no more of those that it has begun."""
        for copy, making in list(self._making.items()):
            if making.maker == maker and not making.has_ended.is_set():
                self.end(*copy, None)

    def clear(self) -> None:
        """Other trainers come."""
        for copy in list(self._making):
            self.end(*copy, None)

    async def wait(self, checkpoint: CheckpointId, part: int) -> str | None:
        """The slot of a copy that is, or is being, made here; from now on it is the caller's.

        Returns None at once where nobody makes one, and after a while where it does not come.
        """
        making = self._making.get((checkpoint, part))
        if making is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECS):
                await making.has_ended.wait()
        if self._making.get((checkpoint, part)) is making:
            del self._making[checkpoint, part]
        return making.slot
