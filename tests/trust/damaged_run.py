"""A run of several attempts on disk and in RAM, and faults that a seed does to its files.

All checkpoints hold other bits, so a mix of two is seen. The oracles here are NumPy, the pristine
bytes of every file, and xxhash; where a block lies is taken from the image's own header.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.adapt.contract import RestoreRequest
from holdfast.adapt.nested import NestedRestoration
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import AttemptStart, begin_attempt
from holdfast.engine.lifecycle.commit import commit, read_part
from holdfast.engine.lifecycle.run import create_run
from holdfast.engine.saving.part import PartPlan
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.saving.part_writer import write_part
from holdfast.engine.transfer.copy import copy_part
from holdfast.format.layout import Chunk, image_layout
from holdfast.format.names import CheckpointId
from holdfast.format.records import ArraySpec, CheckpointSpec, Container, PartRecord, SavedValue
from holdfast.format.values import encode_value
from holdfast.store.contract import Store
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import random_array, same_bits
from tests.engine.reusing import images_reusing, link_images
from tests.engine.stores import ram

RUN_ID = "0123456789abcdef0123456789abcdef"
TIME = datetime(2026, 8, 1, 12, 0, tzinfo=UTC)
BLOCK = 8 * 1024 * 1024

# Attempt 2 continued from 20.1 and attempt 3 from 30.2: 30.1 and 40.2 are on abandoned branches.
ORIGINS = [None, checkpoint_id(20), checkpoint_id(30, 2)]
SAVED = {1: (10, 20, 30), 2: (30, 40), 3: (40, 50)}
TIMELINE = [checkpoint_id(*c) for c in ((10, 1), (20, 1), (30, 2), (40, 3), (50, 3))]
NEWEST = checkpoint_id(50, 3)
AHEAD = checkpoint_id(60, 3)
"""Stands in RAM alone."""


STAYS = ("params", "w")
"""The array that does not change within an attempt."""


@contextlib.contextmanager
def told_on_failure(where: str) -> Iterator[None]:
    """Prints what replays a failure, where there is one."""
    is_well = False
    try:
        yield
        is_well = True
    finally:
        if not is_well:
            print(where, file=sys.stderr)


class NestedFramework:
    """A framework for states without one: nested dicts of NumPy arrays."""

    def restoration(self, spec: CheckpointSpec, request: RestoreRequest) -> NestedRestoration:
        assert request.like is None
        return NestedRestoration(spec, request)


def right_arrays(checkpoint: CheckpointId, big: bool) -> dict[tuple, np.ndarray]:
    """The arrays of a checkpoint: of several dtypes, one without bytes, one of several blocks."""
    kinds = [
        (("params", "w"), (16, 12), "float32"),
        (("params", "b"), (7,), "bfloat16"),
        (("empty",), (0, 3), "float64"),
        (("scalar",), (), "int64"),
        (("mask",), (5, 5), "bool"),
        (("odd",), (9,), "int4"),
        (("z",), (3,), "complex128"),
    ]
    if big:
        kinds.append((("big",), (BLOCK + 100,), "uint8"))
    first = checkpoint.step * 1000 + checkpoint.attempt.number * 100
    found = {
        path: random_array(shape, kind, first + n) for n, (path, shape, kind) in enumerate(kinds)
    }
    # This one stays as it is for as long as an attempt goes on.
    return found | {STAYS: random_array((16, 12), "float32", checkpoint.attempt.number)}


def right_state(checkpoint: CheckpointId, rank: int, big: bool) -> dict[str, Any]:
    """What a restore of the checkpoint has to give, as a tree."""
    arrays = right_arrays(checkpoint, big)
    tree: dict[str, Any] = {"params": {"w": arrays["params", "w"], "b": arrays["params", "b"]}}
    for (name, *rest), array in arrays.items():
        if not rest:
            tree[name] = array[()] if name == "scalar" else array
    tree["epoch"] = checkpoint.step * 7 + checkpoint.attempt.number
    tree["data"] = {"file": ("a", rank), "left": 2**70 + checkpoint.step}
    return tree


def same_tree(one: Any, other: Any) -> bool:
    """Whether two trees are the same in structure, types and bits."""
    if isinstance(one, np.ndarray | np.generic):
        return type(one) is type(other) and same_bits(np.asarray(one), np.asarray(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_tree(one[k], other[k]) for k in one)
    return bool(one == other)


def plan_of(checkpoint: CheckpointId, rank: int, count: int, big: bool) -> PartPlan:
    """One rank's part; with two ranks, some arrays are cut between them."""
    specs = []
    for path, array in right_arrays(checkpoint, big).items():
        chunk_shape, owners = array.shape, [(count - 1, 1)]
        if path == ("params", "w"):
            chunk_shape, owners = (8, 12), [(0, 1), (count - 1, 1)]
        if path == ("mask",):
            chunk_shape, owners = (2, 3), [(0, 2), (count - 1, 3), (0, 1)]
        if path == ("z",):
            owners = [(0, 1)]
        specs.append(
            ArraySpec(
                path=path,
                shape=array.shape,
                dtype=array.dtype.name,
                chunk_shape=tuple(chunk_shape),
                owners=tuple(owners),
                scalar=path == ("scalar",),
            )
        )
    state = right_state(checkpoint, rank, big)
    spec = CheckpointSpec(
        time=TIME + timedelta(seconds=checkpoint.step),
        metrics={"loss": 1.0 / checkpoint.step, "worst": "inf"},
        arrays=tuple(specs),
        containers=(Container(path=(), kind="dict"), Container(path=("params",), kind="dict")),
        values=(SavedValue(path=("epoch",), value=state["epoch"]),),
        process_values=(("data",),),
    )
    data = SavedValue(path=("data",), value=encode_value(state["data"], "data"))
    return PartPlan(
        run_id=RUN_ID,
        id=checkpoint,
        rank=rank,
        part_count=count,
        layout=image_layout(spec.arrays, rank),
        spec=spec,
        process_values=(data,),
    )


def write_parts(
    store: Store,
    checkpoint: CheckpointId,
    count: int,
    big: bool,
    before: CheckpointId | None = None,
) -> None:
    """All parts of a checkpoint, not committed; what stays is kept of the one before, if given."""
    arrays = right_arrays(checkpoint, big)
    for rank in range(count):
        plan = plan_of(checkpoint, rank, count, big)

        def chunk_bytes(chunk: Chunk, plan: PartPlan = plan) -> memoryview:
            array = arrays[plan.spec.arrays[chunk.array_index].path]
            cut = tuple(slice(a, b) for a, b in zip(chunk.start, chunk.stop, strict=True))
            return np.ascontiguousarray(array[cut]).reshape(-1).view(np.uint8).data

        images = None
        if before is not None:
            last = read_part(store, before, rank, count)
            chunks = plan.layout.chunks
            stays = {c.ordinal for c in chunks if plan.spec.arrays[c.array_index].path == STAYS}
            images = images_reusing(plan, last, stays)
            link_images(store, plan, last, images)
        write_part(store, plan, chunk_bytes, images)


@dataclass
class DamagedRun:
    """The run. `with_ram` has what is durable, and `ahead` the newest step besides.

    `keeps`: the newest durable checkpoint keeps the images of the one before for what stays.
    """

    root: Path
    count: int
    big: bool = False
    keeps: bool = False
    pristine: dict[Path, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run = self.root / "run"
        self.run.mkdir(parents=True)
        self.durable = DiskStore(self.run, SystemClock())
        self.with_ram, self.ahead = ram(self.root / "with-ram"), ram(self.root / "ahead")
        create_run(self.durable, str(self.run), RUN_ID, TIME)
        for attempt, origin in enumerate(ORIGINS, 1):
            start = AttemptStart(run_id=RUN_ID, origin=origin, host="h", pid=1, time=TIME)
            begin_attempt(self.durable, attempt_id(attempt), start)
            for step in SAVED[attempt]:
                checkpoint = checkpoint_id(step, attempt)
                before = TIMELINE[-2] if self.keeps and checkpoint == NEWEST else None
                write_parts(self.durable, checkpoint, self.count, self.big, before)
                commit(self.durable, checkpoint, self.count)
        for store in (self.with_ram, self.ahead):
            for checkpoint in TIMELINE[-2:]:
                for rank in range(self.count):
                    plan = plan_of(checkpoint, rank, self.count, self.big)
                    copy_part(
                        self.durable,
                        store,
                        _record(self.durable, plan),
                        PartLayouts(plan.spec.arrays),
                    )
        write_parts(self.ahead, AHEAD, self.count, self.big)
        for path in sorted(self.root.rglob("*")):
            if path.is_file() and "slots" not in path.parts:
                self.pristine[path] = path.read_bytes()

    def views(self) -> dict[str, list[DiskStore | RamStore]]:
        """Which tiers a reader sees."""
        return {
            "disk": [self.durable],
            "with-ram": [self.with_ram, self.durable],
            "ahead": [self.ahead, self.durable],
        }

    def close(self) -> None:
        self.with_ram.close()
        self.ahead.close()


def _record(store: Store, plan: PartPlan) -> PartRecord:
    return read_part(store, plan.id, plan.rank, plan.part_count)


# Files and their damage.

KINDS = ["run", "attempt", "copy", "manifest", "part", "image", "RAM part", "RAM image"]
DAMAGES = ["bit", "block", "cut", "longer", "gone", "swapped", "of another", "zeros"]


def kind_of(path: Path) -> str:
    """Which kind of file it is."""
    if path.name == "holdfast.json":
        return "run"
    if path.parent.name == "attempts":
        return "copy" if path.name.endswith(".copy.json") else "attempt"
    if path.parent.name == "manifests":
        return "manifest"
    kind = path.name.partition("-")[0].removesuffix(".json")
    return kind if "run" in path.parts else f"RAM {kind}"


def blocks_of(image: bytes) -> list[tuple[int, int]]:
    """The byte ranges of an image's blocks, from its header."""
    start = 8 + int.from_bytes(image[:8], "little")
    header = json.loads(image[8:start])
    del header["__metadata__"]
    found = []
    for entry in header.values():
        first, stop = (start + offset for offset in entry["data_offsets"])
        found += [(at, min(at + BLOCK, stop)) for at in range(first, stop, BLOCK)]
    return found


@dataclass
class Fault:
    """One fault: for each file that changed, its present bytes; None: the file is gone."""

    kind: str
    damage: str
    changed: dict[Path, bytes | None]


class Faults:
    """The faults in one run, each identified by the seed and its number."""

    def __init__(self, run: DamagedRun, seed: int) -> None:
        self._run = run
        self._random = random.Random(seed)
        self._by_kind: dict[str, list[Path]] = {}
        for path in run.pristine:
            self._by_kind.setdefault(kind_of(path), []).append(path)
        assert set(self._by_kind) == set(KINDS)

    def draw(self, view: str) -> Fault:
        """A fault that changes bytes, of files that a reader with this view could see."""
        while True:
            kinds = [kind for kind in KINDS if view != "disk" or not kind.startswith("RAM")]
            kind, damage = self._random.choice(kinds), self._random.choice(DAMAGES)
            paths = [p for p in self._by_kind[kind] if view in p.parts or "RAM" not in kind]
            newest = [p for p in paths if p.parent.name in (str(NEWEST), str(AHEAD))]
            path = self._random.choice(newest if newest and self._random.random() < 0.6 else paths)
            # A checkpoint without a manifest is none, by definition.
            if (kind, damage) == ("manifest", "gone"):
                continue
            changed = self._damage(path, paths, damage)
            if any(data != self._run.pristine[p] for p, data in changed.items()):
                return Fault(kind, damage, changed)

    def _damage(self, path: Path, like: list[Path], damage: str) -> dict[Path, bytes | None]:
        data, rng = self._run.pristine[path], self._random
        match damage:
            case "bit":
                spoilt = bytearray(data)
                spoilt[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                return {path: bytes(spoilt)}
            case "block":
                size = min(rng.choice([64, 512, 4096]), len(data))
                start = rng.randrange(len(data) - size + 1) // 64 * 64
                return {path: data[:start] + rng.randbytes(size) + data[start + size :]}
            case "cut":
                return {path: data[: rng.choice([0, rng.randrange(len(data)), len(data) - 1])]}
            case "longer":
                return {path: data + rng.choice([b"\0", b"\n", rng.randbytes(500), data])}
            case "gone":
                return {path: None}
            case "zeros":
                return {path: bytes(len(data))}
        other = rng.choice(like)
        if damage == "swapped":
            return {path: self._run.pristine[other], other: data}
        return {path: self._run.pristine[other]}

    def do(self, fault: Fault) -> None:
        for path, data in fault.changed.items():
            self._put(path, data)

    def undo(self, fault: Fault) -> None:
        for path in fault.changed:
            self._put(path, self._run.pristine[path])

    def _put(self, path: Path, data: bytes | None) -> None:
        aside = self._run.root / "aside"
        if data is None:
            path.rename(aside)
            return
        if aside.exists():
            aside.rename(path)
        # In place, so that a slot sees it too.
        with path.open("r+b") as file:
            file.write(data)
            file.truncate()


def changed_blocks(pristine: bytes, present: bytes) -> Iterator[tuple[int, int]]:
    """The blocks of an image whose bytes are not what they were."""
    for start, stop in blocks_of(pristine):
        if pristine[start:stop] != present[start:stop]:
            yield start, stop
