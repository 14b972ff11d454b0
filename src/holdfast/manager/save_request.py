"""One save on its way from the training thread to the saver's thread.

Invariants:
- What a job holds is released once: by the training thread until the job is handed over, by the
  saver's thread from then on.
- An exception on the training thread, at whatever place, ends the save in bounded time: as failed,
  or as complete where the saver's thread has all that it needs.
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
    """One save: what to write, where it is due, and the state: fixed, or on its way into slots.

    Attributes:
        copies: the parts of other ranks that may be copied from the same state.
        filled: the slot that the training thread copies the state into, where one was ready.
        copied: those of `copies` that the training thread makes.
        held: closes what the job holds, until it is handed over.
        is_handed_over: whether the job is the saver's thread's. Written by the training thread.
        interruption: why the training thread left the save before its end. Written before the
            filling ends, so the saver's thread sees it once it has waited for that.
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
    interruption: str | None = None

    def end(self) -> None:
        """Stop the copying: whoever waits for it goes on."""
        if self.filled is not None:
            self.filled.end()
        for copied in self.copied:
            copied.end()

    def drop(self) -> None:
        """Release all that a job holds that was not handed over."""
        self.end()
        self.held.close()
        self.snapshot.release()


def reason_of(error: BaseException | None) -> str:
    """Return why a save that `error` has ended is not made."""
    detail = f": {error}" if error is not None and str(error) else ""
    return f"{type(error).__name__} was raised during the call of save{detail}"
