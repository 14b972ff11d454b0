"""Define each call of the engine that changes a store, its subject, and its required outcome.

A case is prepared afresh for each fault: an older checkpoint that is good in both tiers, the call,
and a check of its purpose. Whatever fails, the older checkpoint stays readable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from holdfast.engine.lifecycle.attempts import (
    AttemptStart,
    begin_attempt,
    newest_number,
    read_attempts,
)
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.commit import commit, read_part, remove
from holdfast.engine.lifecycle.recovery import recover
from holdfast.engine.lifecycle.run import create_run
from holdfast.engine.reading.restore import fill_targets
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.saving.part_writer import write_part
from holdfast.engine.transfer.copy import copy_part
from holdfast.format.grid import RestoreTarget
from holdfast.format.names import (
    CHECKPOINTS,
    CheckpointId,
    attempt_keys,
    image_key,
    reused_image_key,
)
from holdfast.format.records import CheckpointSpec, Container
from holdfast.store.contract import Store
from holdfast.store.disk import DiskStore
from holdfast.store.files.file_system import LOCAL, FileSystem
from holdfast.store.ram import RamStore
from holdfast.store.slots import SLOTS, SlotPool
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import RUN_ID, TIME, Made, begin, random_array, same_bits, sources_of
from tests.engine.reusing import Chain
from tests.store.failing_files import FailingFileSystem, FailurePlan
from tests.trust.in_process import StepClock

GONE, OLD, NEW = checkpoint_id(5), checkpoint_id(10), checkpoint_id(20)
LINKED = reused_image_key(NEW, 0, 2, OLD)
# Several writes each, of which the last is not aligned.
SIZE = 9000
ONE = "checkpoints/one"


class Tree(Made):
    """A checkpoint whose arrays are the members of a dict."""

    @property
    def spec(self) -> CheckpointSpec:
        containers = (Container(path=(), kind="dict"),)
        return msgspec.structs.replace(super().spec, containers=containers)


def made(checkpoint: CheckpointId) -> Made:
    """A checkpoint of two parts, each with an array of its own bits."""
    one = Tree(id=checkpoint, part_count=2)
    one.add(("a",), random_array((SIZE,), "uint8", checkpoint.step))
    one.add(("b",), random_array((SIZE,), "uint8", checkpoint.step + 1), owners=((1, 1),))
    return one


@dataclass
class Place:
    """Both tiers below `root`. `files` may fail; the stores of `sound()` never do."""

    root: Path
    files: FailingFileSystem = field(default_factory=FailingFileSystem)
    # Its tokens come in one order, so that a call has the same operations each time.
    clock: StepClock = field(default_factory=StepClock)

    @cached_property
    def durable(self) -> DiskStore:
        return self._durable(self.files)

    @cached_property
    def ram(self) -> RamStore:
        return self._ram(self.files)

    @cached_property
    def pool(self) -> SlotPool:
        return SlotPool(self.root / "ram", None, self.clock, self.files)

    def sound(self) -> tuple[RamStore, DiskStore]:
        return self._ram(LOCAL), self._durable(LOCAL)

    def _durable(self, files: FileSystem) -> DiskStore:
        (self.root / "run").mkdir(parents=True, exist_ok=True)
        return DiskStore(self.root / "run", self.clock, files)

    def _ram(self, files: FileSystem) -> RamStore:
        pool = self.pool if files is self.files else SlotPool(self.root / "ram", None, self.clock)
        (self.root / "ram").mkdir(parents=True, exist_ok=True)
        return RamStore(self.root / "ram", pool.reserve, self.clock, files)

    def write(self, checkpoint: CheckpointId, *stores: Store) -> None:
        for store in stores:
            made(checkpoint).write(store)

    def close(self) -> None:
        self.ram.close()

    def check_reads(self, checkpoint: CheckpointId, *stores: Store) -> None:
        """Checks that it reads back, bit for bit."""
        check_read(made(checkpoint), *stores)

    def left_behind(self) -> list[str]:
        """What no object is made of: files under way, and folders with nothing in them."""
        paths = sorted((self.root / "run").rglob("*")) + sorted((self.root / "ram").rglob("*"))
        return [
            str(path.relative_to(self.root))
            for path in paths
            if path.name.startswith(".") or (path.is_dir() and not any(path.iterdir()))
        ]

    def slot_count(self) -> int:
        slots = self.root / "ram" / SLOTS
        return len(list(slots.iterdir())) if slots.is_dir() else 0


def check_read(one: Made, *stores: Store) -> None:
    """Checks that the stores together hold a checkpoint, bit for bit."""
    sources = sources_of(one.id, *stores)
    targets = [
        RestoreTarget(array_index=i, region=((0,), (SIZE,)), buffer=np.zeros(SIZE, np.uint8))
        for i in range(len(one.specs))
    ]
    fill_targets(sources, targets)
    for spec, target in zip(one.specs, targets, strict=True):
        assert same_bits(target.buffer, one.arrays[spec.path]), f"{one.id}: {spec.path}"


@dataclass(frozen=True)
class Case:
    """One call; `check` asserts what must be true once it has worked."""

    name: str
    prepare: Callable[[Place], None]
    call: Callable[[Place], Any]
    check: Callable[[Place], None]


def _nothing(place: Place) -> None:
    pass


def _prepare_recycling(place: Place) -> None:
    """RAM with a free slot of each image's size, and of a size that nothing has any more."""
    ram = place.sound()[0]
    place.write(GONE, ram)
    ram.put("checkpoints/other.safetensors", bytes(5000))
    ram.delete("checkpoints/other.safetensors")
    remove(ram, GONE, list_checkpoints(ram)[GONE])
    ram.close()


def _write(tier: str, prepare: Callable[[Place], None] = _nothing, what: str = "") -> Case:
    def call(place: Place) -> None:
        plan = made(NEW).plan(0)
        write_part(getattr(place, tier), plan, made(NEW).chunk_bytes)

    def check(place: Place) -> None:
        ram, durable = place.sound()
        store = ram if tier == "ram" else durable
        assert list_checkpoints(store)[NEW].parts == {0: 2}
        made(NEW).write(store, [1])
        place.check_reads(NEW, store)

    return Case(f"write_part {tier}{what}", prepare, call, check)


def _copy(place: Place) -> None:
    one = made(NEW)
    for rank, part in enumerate(place.parts):
        assert part.rank == rank
        copy_part(place.ram, place.durable, part, PartLayouts(one.spec.arrays))


def _prepare_copy(place: Place) -> None:
    place.parts = made(NEW).write(place.sound()[0])


def _check_copied(place: Place) -> None:
    durable = place.sound()[1]
    commit(durable, NEW, 2)
    place.check_reads(NEW, durable)


def _prepare_keeping(place: Place) -> None:
    """A part that keeps all of its last image, and one that keeps nothing."""
    ram = place.sound()[0]
    records = [read_part(ram, OLD, rank, 2) for rank in range(2)]
    place.chain = Chain([made(OLD)], [records])
    place.chain.go_on(ram, [("a",)], NEW.step)
    place.parts = place.chain.records[-1]


def _copy_keeping(place: Place) -> None:
    for part in place.parts:
        copy_part(place.ram, place.durable, part, PartLayouts(place.chain.made[-1].spec.arrays))


def _check_copied_keeping(place: Place) -> None:
    durable = place.sound()[1]
    commit(durable, NEW, 2)
    check_read(place.chain.made[-1], durable)


def _check_linked(place: Place) -> None:
    ram = place.sound()[0]
    assert ram.get(LINKED) == ram.get(image_key(OLD, 0, 2))


def _check_committed(place: Place) -> None:
    durable = place.sound()[1]
    assert list_checkpoints(durable)[NEW].is_committed
    place.check_reads(NEW, durable)


def _check_kept_one_winner(place: Place) -> None:
    assert place.sound()[1].get(ONE) == bytes(SIZE)


def _remove(tier: str) -> Case:
    def prepare(place: Place) -> None:
        ram, durable = place.sound()
        if tier == "ram":
            made(NEW).write(ram)
        else:
            made(NEW).save(durable)

    def call(place: Place) -> None:
        store = getattr(place, tier)
        listing = list_checkpoints(store).get(NEW)
        if listing is not None:
            remove(store, NEW, listing)

    def check(place: Place) -> None:
        ram, durable = place.sound()
        assert NEW not in list_checkpoints(ram if tier == "ram" else durable)

    return Case(f"remove {tier}", prepare, call, check)


def _prepare_recover(place: Place) -> None:
    """One to finish, one to clear, and a record whose copy is gone."""
    durable = place.sound()[1]
    place.write(NEW, durable)
    made(checkpoint_id(30)).write(durable, [0])
    durable.delete(attempt_keys(1)[1])


def _check_recovered(place: Place) -> None:
    _check_committed(place)
    durable = place.sound()[1]
    assert set(list_checkpoints(durable)) == {OLD, NEW}
    # A record that could not be read just then is mended by the next one.
    recover(durable, [])
    assert durable.get(attempt_keys(1)[0]) == durable.get(attempt_keys(1)[1])


def _begin(place: Place) -> None:
    start = AttemptStart(run_id=RUN_ID, origin=OLD, host="h", pid=1, time=TIME)
    attempt = attempt_id(newest_number(place.durable) + 1)
    place.begun = begin_attempt(place.durable, attempt, start)


def _check_begun(place: Place) -> None:
    attempts = read_attempts(place.sound()[1])
    assert place.begun is not None
    # A number whose record was put before the failure stays taken.
    assert place.begun.attempt.number in (2, 3)
    assert attempts[place.begun.attempt.number] == place.begun


CASES = [
    _write("durable"),
    _write("ram"),
    _write("ram", _prepare_recycling, ", recycled"),
    Case(
        "link",
        _nothing,
        lambda place: place.ram.link(image_key(OLD, 0, 2), LINKED),
        _check_linked,
    ),
    Case("copy_part", _prepare_copy, _copy, _check_copied),
    Case("copy_part, keeping", _prepare_keeping, _copy_keeping, _check_copied_keeping),
    Case(
        "commit",
        lambda place: place.write(NEW, place.sound()[1]),
        lambda place: commit(place.durable, NEW, 2),
        _check_committed,
    ),
    Case(
        "put_if_absent",
        _nothing,
        lambda place: place.durable.put_if_absent(ONE, bytes(SIZE)),
        _check_kept_one_winner,
    ),
    _remove("durable"),
    _remove("ram"),
    Case("recover", _prepare_recover, lambda place: recover(place.durable, []), _check_recovered),
    Case("begin_attempt", _nothing, _begin, _check_begun),
]


def place_for(case: Case, root: Path) -> Place:
    """A place of its own in `root`, with an older checkpoint in both tiers."""
    place = Place(root)
    ram, durable = place.sound()
    create_run(durable, "run", RUN_ID, TIME)
    begin(durable, None)
    made(OLD).write(ram)
    ram.close()
    made(OLD).save(durable)
    case.prepare(place)
    return place


def clear(place: Place) -> None:
    """What an agent does when it starts: clears what was left half done."""
    ram, durable = place.sound()
    recover(durable, [])
    for store in (ram, durable):
        store.discard_unfinished(CHECKPOINTS)


class Noted:
    """Whatever is raised within gets a note of what failed, so that a failure can be replayed."""

    def __init__(self, what: object, number: int, plan: FailurePlan) -> None:
        self._what = what
        self._number = number
        self._plan = plan

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            hits = self._plan.hits
            error.add_note(f"{self._what}, operation {self._number}: {self._plan.fault}, {hits}")
