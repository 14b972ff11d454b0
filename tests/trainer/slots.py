"""The slot that a manager keeps ready for its next save."""

from __future__ import annotations

from holdfast import CheckpointManager
from holdfast.engine.saving.slots import RamSlots
from tests.hosts import wait_until


def slots_of(manager: CheckpointManager) -> RamSlots:
    """Return the slots of a manager, the one place in which tests reach for them."""
    return manager._parts.position.saver._slots


def wait_for_a_slot(manager: CheckpointManager) -> None:
    """Wait until a slot is ready, of whatever size."""
    wait_until(lambda: slots_of(manager).has_ready)


def wait_for_a_whole_slot(manager: CheckpointManager) -> None:
    """Wait until a slot is ready for a whole state."""
    size_bytes = manager._parts.due_saves.planner.image_size_bytes
    wait_until(lambda: slots_of(manager).is_ready(size_bytes))
