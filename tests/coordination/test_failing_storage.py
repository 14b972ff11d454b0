"""How long checkpoints wait for storage that fails, and which of them get another try."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from holdfast.coordination.effects import Commit, ListDurable, Persist
from holdfast.coordination.follower.host_inventory import HostInventory
from holdfast.coordination.inputs import (
    CommitFailed,
    PartSealed,
    PartsWritten,
    Published,
    WriteFailed,
)
from holdfast.coordination.leader.checkpoint_table import CheckpointTable
from holdfast.coordination.leader.durability import Durability
from holdfast.coordination.leader.replica_placement import Ring
from holdfast.coordination.messages import CheckpointStatus, Command, Held, WriteOrder
from holdfast.coordination.settings import TRIES_MAX, Settings
from holdfast.coordination.turn import Turn
from holdfast.format.names import NO_ATTEMPT, CheckpointId
from tests.attempts import attempt_id, checkpoint_id

SETTINGS = Settings()
FAILED_SECS = TRIES_MAX * SETTINGS.storage_retry_secs
COUNT = 12
IDS = [checkpoint_id(step) for step in range(COUNT)]


class Disk:
    """Carries out effects of a machine in a time of its own."""

    def __init__(self, run_due: Callable[[Turn], object], next_at: Callable[[float], float]):
        self.run_due = run_due
        self.next_at = next_at
        self.now_secs = 0.0

    def turn(self) -> Turn:
        return Turn("a", self.now_secs, Published())

    def act(self) -> list[object]:
        """The effects of what is due now."""
        turn = self.turn()
        self.run_due(turn)
        return list(turn.effects)

    def next(self) -> Persist | Commit | None:
        """The next effect, after the time for which the machine waits; None if it wants none."""
        turn = self.turn()
        self.run_due(turn)
        if not turn.effects:
            at_secs = self.next_at(self.now_secs)
            if at_secs == float("inf"):
                return None
            self.now_secs, turn = at_secs, Turn("a", at_secs, Published())
            self.run_due(turn)
        effects = [e for e in turn.effects if isinstance(e, Persist | Commit)]
        return effects[0] if effects else None


def written(count: int = COUNT) -> tuple[HostInventory, Disk]:
    """A host that is ordered to write `count` checkpoints."""
    inventory = HostInventory(SETTINGS)
    disk = Disk(lambda turn: inventory.run_due(turn, is_frozen=False), inventory.next_at_secs)
    for one in IDS[:count]:
        sealed = PartSealed(rank=0, id=one, part_count=1, in_ram=True, is_due=True)
        inventory.note_sealed(disk.turn(), sealed)
    orders = tuple(WriteOrder(one, ((0, 1),), 0) for one in IDS[:count])
    inventory.apply_command(disk.turn(), Command(writes=orders))
    return inventory, disk


def failures(inventory: HostInventory) -> list[CheckpointId]:
    return [held.id for held in inventory.states() if held.failure]


def test_many_writes_behind_a_full_disk_fail_in_bounded_time() -> None:
    inventory, disk = written()
    tries: list[CheckpointId] = []
    while (effect := disk.next()) is not None:
        tries.append(effect.id)
        inventory.write_failed(disk.turn(), WriteFailed(effect.id, "no space left", NO_ATTEMPT))
    assert failures(inventory) == IDS
    assert tries == [IDS[0]] * TRIES_MAX + IDS[1:-1] + [IDS[-1]] * TRIES_MAX
    assert disk.now_secs <= 2 * FAILED_SECS


def test_a_write_that_works_gives_the_next_ones_all_their_tries_again() -> None:
    inventory, disk = written()
    for _ in range(TRIES_MAX):
        effect = disk.next()
        inventory.write_failed(disk.turn(), WriteFailed(effect.id, "no space left", NO_ATTEMPT))
    effect = disk.next()
    assert effect.id == IDS[1]
    inventory.parts_written(PartsWritten(effect.id, effect.ranks))
    for _ in range(TRIES_MAX - 1):
        effect = disk.next()
        assert effect.id == IDS[2]
        inventory.write_failed(disk.turn(), WriteFailed(effect.id, "no space left", NO_ATTEMPT))
    assert failures(inventory) == [IDS[0]]


@pytest.mark.parametrize("count", [1, 2])
def test_the_newest_checkpoint_gets_all_its_tries(count: int) -> None:
    inventory, disk = written(count)
    tries = 0
    while (effect := disk.next()) is not None:
        tries += effect.id == IDS[count - 1]
        inventory.write_failed(disk.turn(), WriteFailed(effect.id, "no space left", NO_ATTEMPT))
    assert tries == TRIES_MAX


def test_many_commits_that_fail_end_in_bounded_time() -> None:
    table = CheckpointTable(attempt_id(1), {})
    table.required, table.domains = 1, {"a": "a"}
    durability = Durability(SETTINGS, table, lambda: Ring({}, {}))
    disk = Disk(lambda turn: durability.run_due(turn, is_whole=True), durability.next_at_secs)
    held = [Held(one, 1, is_due=True, own=((0, 1),), replicas=(), written=((0, 1),)) for one in IDS]
    table.apply_report("a", {}, {one.id: one for one in held})
    table.settle()
    durability.listed(disk.turn())
    tries: list[CheckpointId] = []
    while (effect := disk.next()) is not None:
        assert isinstance(effect, Commit)
        tries.append(effect.id)
        durability.commit_failed(disk.turn(), CommitFailed(effect.id, "no space left", NO_ATTEMPT))
    assert all(table.entries[one].status is CheckpointStatus.FAILED for one in IDS)
    assert tries == [IDS[0]] * TRIES_MAX + IDS[1:-1] + [IDS[-1]] * TRIES_MAX
    assert disk.now_secs <= 2 * FAILED_SECS


def test_storage_is_listed_again_soon_while_a_part_of_a_silent_host_is_missing() -> None:
    # The end of a preemption waits for it: the part may be written just after the first look.
    table = CheckpointTable(attempt_id(1), {})
    table.required, table.domains = 1, {"a": "a"}
    durability = Durability(SETTINGS, table, lambda: Ring({}, {}))
    disk = Disk(lambda turn: durability.run_due(turn, is_whole=False), durability.next_at_secs)
    durability.listed(disk.turn())
    held = Held(IDS[0], 2, is_due=True, own=((0, 1),), replicas=(), written=((0, 1),))
    table.apply_report("a", {}, {held.id: held})
    looks = []
    while len(looks) < 5:
        if any(isinstance(effect, ListDurable) for effect in disk.act()):
            looks.append(disk.now_secs)
            durability.listed(disk.turn())
        disk.now_secs += SETTINGS.heartbeat_secs / 4
    pauses = [later - earlier for earlier, later in itertools.pairwise([0.0, *looks])]
    assert max(pauses[:2]) < SETTINGS.lost_secs / 2
    assert SETTINGS.lost_secs <= max(pauses) < SETTINGS.lost_secs + SETTINGS.heartbeat_secs
