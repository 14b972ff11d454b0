"""Define the request that carries one save from the training thread to the saver's thread.

Invariants:
- The resources of a request are released once: by the training thread until the request is handed
  over, by the saver's thread from then on.
- An exception on the training thread, at any point, ends the save in bounded time: as failed, or as
  complete if the saver's thread has everything it needs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from holdfast.adapt.contract import Snapshot
from holdfast.engine.saving.part import PartPlan
from holdfast.manager.part_writer import FilledPart
from holdfast.manager.planning import PartCopy
from holdfast.manager.replica_writer import ReplicaDraft


@dataclass(slots=True, kw_only=True)
class SaveRequest:
    """One save: the plan, the tiers, and the state, which is fixed or being copied into slots.

    Attributes:
        plan: What to write.
        snapshot: The state.
        is_durable_due: Whether the save is for the durable tier.
        is_by_step: Whether the save is for exactly this step.
        copies: The parts of other ranks that can be replicated from the same state.
        filled: The slot into which the training thread copies the state, if one was prepared.
        copied: Those of `copies` that the training thread makes.
        held: Closes the request's resources, until it is handed over.
        is_handed_over: Whether the saver's thread owns the request. Written by the training thread.
        asked_secs: The monotonic time at which `save` was called.
        returned_secs: When the training thread continued; None: it has not yet. Written by it.
        written_bytes: The size of the image to write; None until it is known.
        interruption: Why the training thread left the save before its end. Written before the
            copying ends, so the saver's thread sees it after it has waited for that.
    """

    plan: PartPlan
    snapshot: Snapshot
    is_durable_due: bool
    is_by_step: bool
    copies: tuple[PartCopy, ...] = ()
    filled: FilledPart | None = None
    copied: tuple[ReplicaDraft, ...] = ()
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    is_handed_over: bool = False
    asked_secs: float
    returned_secs: float | None = None
    written_bytes: int | None = None
    interruption: str | None = None

    def end(self) -> None:
        """End the copying; threads that wait for it continue."""
        if self.filled is not None:
            self.filled.end()
        for copied in self.copied:
            copied.end()

    def drop(self) -> None:
        """Release all resources of a request that was not handed over."""
        self.end()
        self.held.close()
        self.snapshot.release()


def reason_of(error: BaseException | None) -> str:
    """Return the reason of a save that failed because of `error`."""
    detail = f": {error}" if error is not None and str(error) else ""
    return f"{type(error).__name__} was raised during the call of save{detail}"
