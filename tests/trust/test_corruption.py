"""Corruption: damage of every kind in every kind of file, and never a wrong or a silent restore."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xxhash

import holdfast
from holdfast import preservation_policy
from holdfast.adapt.contract import EVERYTHING
from holdfast.cli.findings import check_attempts, check_copy, copies_of
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.run import read_run
from holdfast.engine.reading.run import ReadableRun
from holdfast.engine.reading.view import view_of
from holdfast.format.names import CheckpointId, manifest_key
from holdfast.store.disk import DiskStore
from holdfast.store.files.file_system import LocalFileSystem
from holdfast.store.location import RunLocation
from holdfast.store.ram import RamStore
from holdfast.trainer.opening.run_access import read_damaged
from holdfast.trainer.restore.restoring import LoneReader, Restorer
from tests.attempts import checkpoint_id, folder_of
from tests.engine.making import flip_bit, memory_folder
from tests.hosts import host
from tests.trust.damaged_run import (
    AHEAD,
    DAMAGES,
    KINDS,
    NEWEST,
    RUN_ID,
    TIMELINE,
    DamagedRun,
    Fault,
    Faults,
    NestedFramework,
    changed_blocks,
    kind_of,
    right_state,
    same_tree,
    told_on_failure,
)
from tests.trust.figures import tell

SEED = 20260801
WANTED = 5_000
KEEP_ALL = preservation_policy.LatestN(1000)


@dataclass
class Answer:
    """The result of a restore, and all its reports."""

    id: CheckpointId
    state: object
    told: str
    skipped: list[CheckpointId]


@contextlib.contextmanager
def warnings_of_holdfast() -> Iterator[list[str]]:
    """What Holdfast logs as warnings meanwhile."""
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger, listener = logging.getLogger("holdfast"), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield told
    finally:
        logger.removeHandler(listener)


NEWEST_COPY = f"{NEWEST.attempt.number:09d}.copy.json"


def restore(run: DamagedRun, view: str, rank: int) -> Answer:
    """The newest checkpoint, by the way that a manager goes."""
    stores = run.views()[view]
    rounds = LoneReader(rank=rank, count=run.count, is_outside=False)
    with warnings_of_holdfast() as told:
        read_run(run.durable, str(run.run))
        found = Restorer(NestedFramework(), rounds, SystemClock()).newest(
            lambda: view_of(stores, run.durable), EVERYTHING
        )
    assert found is not None
    skipped = [checkpoint_id(step, attempt) for step, attempt, _ in found.report.skipped]
    reasons = [reason for _, _, reason in found.report.skipped]
    return Answer(
        found.id, found.state, "\n".join([*told, *reasons, *found.report.passed_over]), skipped
    )


def is_whole(run: DamagedRun, fault: Fault, checkpoint: CheckpointId, root: Path) -> bool:
    """Whether this tier's files of a checkpoint are all as they were."""
    return not any(str(checkpoint) in p.parts and root in p.parents for p in fault.changed)


def expected_candidates(view: str) -> list[CheckpointId]:
    """What a reader with this view would restore, the newest first."""
    return ([AHEAD] if view == "ahead" else []) + TIMELINE[::-1]


def check_fallback(run: DamagedRun, fault: Fault, view: str, answer: Answer) -> None:
    """Check that an older step is restored only if no tier has the newer, and is reported."""
    for checkpoint in expected_candidates(view):
        if checkpoint == answer.id:
            break
        if checkpoint == AHEAD and None in fault.changed.values():
            # Complete in RAM is what has all its files: without one of them it is no checkpoint.
            continue
        assert checkpoint in answer.skipped, f"{checkpoint} was passed over without a word"
        for store in run.views()[view]:
            has_it = any(
                str(checkpoint) in p.parts for p in run.pristine if store.root in p.parents
            )
            assert not (has_it and is_whole(run, fault, checkpoint, store.root)), (
                f"{checkpoint} is whole in {store.root} and was not restored"
            )
    else:
        raise AssertionError(f"{answer.id} is not on the timeline")


def on_the_way(run: DamagedRun, fault: Fault, view: str, answer: Answer) -> list[Path]:
    """The damaged files of which a byte had to be read on the way to the answer."""
    passed = [*answer.skipped, answer.id]
    found = []
    for path, data in fault.changed.items():
        if data == run.pristine[path]:
            continue
        kind = kind_of(path)
        if kind == "run" or kind == "attempt":
            found.append(path)
        checkpoint = next((c for c in passed if str(c) == path.parent.name), None)
        if checkpoint is None or not any(s.root in path.parents for s in run.views()[view]):
            continue
        in_ram = view == "ahead" or (view == "with-ram" and checkpoint in TIMELINE[-2:])
        is_read_first = kind == "RAM image" or not in_ram
        # A missing copy is no copy; where there is no other, `skipped` names it.
        if data is None and checkpoint not in answer.skipped:
            continue
        is_image = kind.endswith("image")
        if not is_image or (is_read_first and is_bad_image(run.pristine[path], data)):
            found.append(path)
    return found


def is_bad_image(pristine: bytes, present: bytes | None) -> bool:
    """Whether a block of it is not what it was; its header is not needed to read it."""
    return present is None or any(changed_blocks(pristine, present))


def is_told(run: DamagedRun, path: Path, data: bytes | None, told: str) -> bool:
    """Whether the report names the file, and what is wrong with which of its bytes."""
    key = path.name if kind_of(path) == "run" else f"{path.parent.name}/{path.name}"
    if data is None:
        return key in told or "missing" in told or "none" in told
    if key not in told:
        return False
    pristine = run.pristine[path]
    if not kind_of(path).endswith("image"):
        # The recorded digest may itself be damaged.
        pair = re.search(r"bytes \[0, \d+\).* expected .{32}.*found [0-9a-f]{32}", told)
        pair = pair or re.search(r"bytes \[0, \d+\) have digest [0-9a-f]{32}, expected", told)
        return bool(pair or "ends with" in told or "it is the" in told)
    for start, stop in changed_blocks(pristine, data):
        wanted = xxhash.xxh3_128_hexdigest(pristine[start:stop])
        found = xxhash.xxh3_128_hexdigest(data[start:stop])
        if len(data) >= stop and f"[{start}, {stop})" in told and wanted in told and found in told:
            return True
    return f"bytes [{len(data)}, {len(pristine)}) are missing" in told or (
        f"found its end at {len(data)}" in told
    )


def check_verify(run: DamagedRun, fault: Fault, view: str) -> None:
    """`holdfast verify` finds every fault that lies in bytes of the format."""
    _, own = read_damaged(run.run)
    ram = run.views()[view][0] if view != "disk" else None
    whole = ReadableRun(
        location=RunLocation(run.run), run_id=RUN_ID, durable=run.durable, find_ram=lambda: ram
    )
    bad = {("durable", check.key) for check in check_attempts(whole) if check.problem}
    if own is not None:
        bad.add(("durable", "holdfast.json"))
    for copy in copies_of(whole):
        bad |= {(check.tier, check.key) for check in check_copy(copy) if check.problem}
    for path, data in fault.changed.items():
        # RAM that has lost a file holds less; no byte that it holds is wrong.
        is_lost = data is None and kind_of(path).startswith("RAM")
        # The newest attempt's copy is written after its record, perhaps just now.
        is_lost |= data is None and path.name == NEWEST_COPY
        if data != run.pristine[path] and not is_lost:
            root = next(s.root for s in run.views()[view] if s.root in path.parents)
            tier = "durable" if root == run.run else "ram"
            assert (tier, str(path.relative_to(root))) in bad, f"verify does not find {path}"
    if not fault.changed:
        assert not bad


def break_and_restore(run: DamagedRun, seed: int, count: int) -> Counter[str]:
    """Does `count` faults, one after another; returns what came of them."""
    faults, seen = Faults(run, seed), Counter[str]()
    for number in range(count):
        view = ["disk", "with-ram", "ahead"][number % 3]
        rank = number % run.count
        fault = faults.draw(view)
        where = f"seed {seed}, fault {number}, view {view}: {fault.damage} {[*fault.changed]}"
        faults.do(fault)
        try:
            with told_on_failure(where):
                answer = restore(run, view, rank)
                right = right_state(answer.id, rank, run.big)
                assert same_tree(answer.state, right), f"{where}: wrong bytes of {answer.id}"
                check_fallback(run, fault, view, answer)
                needed = on_the_way(run, fault, view, answer)
                if needed:
                    told = [p for p in needed if is_told(run, p, fault.changed[p], answer.told)]
                    assert told, f"{needed} silent: {answer.told!r}"
                check_verify(run, fault, view)
        finally:
            faults.undo(fault)
        seen[f"{fault.kind}, {fault.damage}"] += 1
        seen["told"] += bool(needed)
        seen["older"] += answer.id != expected_candidates(view)[0]
    return seen


@pytest.mark.parametrize(
    "share", [50, pytest.param(WANTED, marks=pytest.mark.soak)], ids=["some", "all"]
)
def test_no_fault_is_restored_or_passed_over_in_silence(share: int) -> None:
    print(f"seed {SEED}")
    seen: Counter[str] = Counter()
    for count, big in ((1, False), (2, False), (2, True)):
        with memory_folder() as root:
            run = DamagedRun(Path(root), count, big)
            try:
                faults = share // 90 + 2 if big else share // 2
                seen += break_and_restore(run, SEED + count, faults)
                check_verify(run, Fault("", "", {}), "ahead")
                for view, newest in (("disk", NEWEST), ("with-ram", NEWEST), ("ahead", AHEAD)):
                    answer = restore(run, view, 0)
                    assert (answer.id, answer.told) == (newest, "")
            finally:
                run.close()
    done = sum(n for what, n in seen.items() if ", " in what)
    if share == WANTED:
        pairs = {f"{kind}, {damage}" for kind in KINDS for damage in DAMAGES}
        assert pairs - set(seen) <= {"manifest, gone", "run, swapped", "run, of another"}
        tell(
            "corruption",
            f"{WANTED:,} faults, 0 silent",
            f"{done:,} faults, 0 silent: {seen['told']:,} on the way to what was restored, all "
            f"told; {seen['older']:,} led to an older step; `holdfast verify` found all",
        )
    assert done >= share


def test_where_every_copy_of_a_block_is_bad_each_of_them_is_told() -> None:
    with memory_folder() as root:
        run = DamagedRun(Path(root), 1)
        try:
            name = f"checkpoints/{NEWEST}/image-00000-of-00001.safetensors"
            for store in (run.with_ram, run.durable):
                flip_bit(store.root / name, 8 * 4100)
            answer = restore(run, "with-ram", 0)
            assert answer.id == TIMELINE[-2]
            assert f"ram: {name}: bytes [4096, " in answer.told
            assert f"durable: {name}: bytes [4096, " in answer.told
        finally:
            run.close()


class BadSector(LocalFileSystem):
    """A file system that cannot read one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bad: set[int] = set()

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        if path == self._path:
            self._bad.add(fd)
        return fd

    def read(self, fd: int, target: memoryview, offset_bytes: int) -> int:
        if fd in self._bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, target, offset_bytes)

    def close(self, fd: int) -> None:
        self._bad.discard(fd)
        super().close(fd)


@pytest.mark.parametrize(
    ("tier", "name", "newest"),
    [
        ("ram", "part-00000-of-00001.json", NEWEST),
        ("ram", "image-00000-of-00001.safetensors", NEWEST),
        ("durable", "part-00000-of-00001.json", NEWEST),
        ("durable", "manifest", NEWEST),
        ("alone", "part-00000-of-00001.json", TIMELINE[-2]),
        ("alone", "image-00000-of-00001.safetensors", TIMELINE[-2]),
        ("alone", "manifest", TIMELINE[-2]),
    ],
)
def test_a_file_that_cannot_be_read_is_passed_over_and_told(
    tier: str, name: str, newest: CheckpointId
) -> None:
    with memory_folder() as root:
        run = DamagedRun(Path(root), 1)
        try:
            in_ram, on_disk = (run.with_ram.root, run.run)
            path = (in_ram if tier == "ram" else on_disk) / "checkpoints" / str(NEWEST) / name
            if name == "manifest":
                path = on_disk / manifest_key(NEWEST)
            files, clock = BadSector(path), SystemClock()
            run.durable = DiskStore(on_disk, clock, files)
            run.with_ram = RamStore(in_ram, lambda size: "", clock, files)
            answer = restore(run, "disk" if tier == "alone" else "with-ram", 0)
            assert answer.id == newest
            assert same_tree(answer.state, right_state(newest, 0, False))
            assert str(path) in answer.told
            assert os.strerror(errno.EIO) in answer.told
        finally:
            run.close()


def manager_state(step: int) -> dict[str, object]:
    """A state of NumPy arrays alone, so that every restore gives them back as they were."""
    rng = np.random.default_rng(step)
    return {"w": rng.integers(0, 255, 5000, np.uint8), "b": rng.standard_normal(7), "n": step}


def spoil_data(path: Path, pristine: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Change one bit, or 64 bytes, that a reader of the whole file has to use; return where."""
    first = 4096 if path.suffix == ".safetensors" else 0
    spoilt, start = bytearray(pristine), rng.randrange(first, len(pristine) - 64)
    if rng.random() < 0.5:
        spoilt[start] ^= 1 << rng.randrange(8)
    else:
        spoilt[start : start + 64] = bytes(b ^ 0x5A for b in pristine[start : start + 64])
    return f"{path} from byte {start} on", bytes(spoilt)


def overwrite(path: Path, data: bytes) -> None:
    """In place, so that a slot sees it too."""
    with path.open("r+b") as file:
        file.write(data)


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.soak)])
def test_a_manager_restores_what_is_right_and_tells_what_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    with host() as own:
        monkeypatch.setenv("HOLDFAST_RAM", str(own.folder))
        monkeypatch.setenv("HOLDFAST_HOST", own.name)
        # The framework is named: this process may have imported JAX before.
        with holdfast.CheckpointManager(
            tmp_path / "run", preservation_policy=KEEP_ALL, framework="numpy"
        ) as manager:
            for step in (1, 2, 3):
                assert manager.save(step, manager_state(step), force=True)
                manager.wait_until_finished(timeout_secs=60)
            folder = folder_of(Path(own.agent().folder) / "ram", 3)
            for number in range(count):
                path = sorted(folder.iterdir())[number % 2]
                pristine = path.read_bytes()
                where, spoilt = spoil_data(path, pristine, rng)
                overwrite(path, spoilt)
                assert same_tree(manager.restore(), manager_state(3)), where
                report = manager.last_restore
                assert report is not None
                assert (report.step, report.skipped) == (3, ())
                assert f"checkpoints/{folder.name}/{path.name}" in report.passed_over[0], where
                overwrite(path, pristine)
        damaged = folder_of(tmp_path / "run", 3) / "image-00000-of-00001.safetensors"
        where, spoilt = spoil_data(damaged, damaged.read_bytes(), rng)
        overwrite(damaged, spoilt)
        stop = subprocess.run(
            [sys.executable, "-m", "holdfast", "stop", str(tmp_path / "run")],
            env=own.environment,
            timeout=60,
            check=False,
            capture_output=True,
        )
        assert stop.returncode == 0, stop.stderr
        with holdfast.CheckpointManager(tmp_path / "run", ram=None) as manager:
            step, state = manager.resume(manager_state(0))
            assert step == 3
            assert same_tree(state, manager_state(2))
            report = manager.last_restore
            assert report is not None
            ((skipped, _, reason),) = report.skipped
            assert (skipped, damaged.name in reason) == (3, True), reason
