"""`holdfast copy`, between directories; tests/buckets has the same between a disk and a bucket."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import CheckpointManager, preservation_policy
from holdfast.cli.main import main
from holdfast.errors import (
    CheckpointDamagedError,
    InvalidArgumentError,
    NotARunError,
    StepNotFoundError,
    StorageError,
)
from holdfast.format.names import MANIFESTS
from holdfast.store.disk import DiskStore
from holdfast.trainer import run_copies
from holdfast.trainer.run_copies import CopiedSteps, copy_run
from tests.hosts import Host

KEEP_ALL = preservation_policy.LatestN(None)
FROZEN = np.arange(300_000, dtype=np.float32)


def state_of(step: int) -> dict[str, np.ndarray]:
    return {"frozen": FROZEN, "w": np.full(1000, step, np.float64)}


def train(run: Path, *steps: int) -> None:
    with CheckpointManager(run, ram=None, preservation_policy=KEEP_ALL) as manager:
        manager.resume(state_of(0))
        for step in steps:
            manager.save(step, state_of(step), force=True)


def check(run: Path, steps: list[int]) -> None:
    with holdfast.open_run(run) as found:
        assert found.all_steps() == steps
        for step in steps:
            restored = found.restore(step)
            assert all(np.array_equal(restored[k], v) for k, v in state_of(step).items())


@pytest.fixture
def run(one_host: Host, tmp_path: Path) -> Path:
    train(tmp_path / "run", 1, 2, 3)
    return tmp_path / "run"


@pytest.mark.parametrize("inner", ["copy", "checkpoints/copy", ".."])
def test_a_copy_into_the_run_or_around_it_is_refused_and_writes_nothing(
    run: Path, inner: str
) -> None:
    before = sorted(run.rglob("*"))
    with pytest.raises(InvalidArgumentError, match="one is inside the other"):
        copy_run(run, run / inner)
    assert sorted(run.rglob("*")) == before


def test_a_copy_has_the_same_checkpoints_and_is_trained_as_a_run_of_its_own(
    run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "deep" / "other"
    assert copy_run(run, other) == CopiedSteps((1, 2, 3), (), ())
    check(other, [1, 2, 3])
    assert copy_run(run, other) == CopiedSteps((), (1, 2, 3), ())
    # Not every checkpoint has written the frozen array, nor is it so in the copy.
    sizes = [sum(p.stat().st_size for p in r.rglob("*.safetensors")) for r in (run, other)]
    assert sizes[0] == sizes[1] < 3 * FROZEN.nbytes
    train(other, 4)
    train(run, 5)
    check(other, [1, 2, 3, 4])
    check(run, [1, 2, 3, 5])
    assert holdfast.open_run(other).run_id != holdfast.open_run(run).run_id
    with pytest.raises(NotARunError, match="an unfinished copy"):
        copy_run(run, other)


def test_an_unfinished_copy_is_not_opened_and_says_how_to_end_it(
    run: Path, one_host: Host, tmp_path: Path
) -> None:
    other = tmp_path / "other"

    def interrupted(step: int, size_bytes: int) -> None:
        if step == 2:
            raise KeyboardInterrupt

    def refused(*steps: int) -> None:
        text = rf"unfinished copy of run.*`holdfast copy RUN {other}`.*`holdfast copy {other} NEW`"
        with pytest.raises(NotARunError, match=text):
            CheckpointManager(other)
        with pytest.raises(NotARunError, match="unfinished copy"):
            CheckpointManager(tmp_path / "fast", remote=other)
        check(other, [*steps])

    with pytest.raises(KeyboardInterrupt):
        copy_run(run, other, progress=interrupted)
    refused(1, 2)
    copy_run(other, tmp_path / "given-up")
    train(tmp_path / "given-up", 7)
    # Of step 2 the manifest is missing.
    check(tmp_path / "given-up", [1, 7])
    copy_run(run, other, [1])
    with pytest.raises(KeyboardInterrupt):
        # Adds to a finished one.
        copy_run(run, other, progress=interrupted)
    refused(1, 2)
    copy_run(run, other)
    train(other, 4)
    check(other, [1, 2, 3, 4])


def test_a_target_that_is_opened_meanwhile_ends_the_copy_and_keeps_what_it_has(
    run: Path, one_host: Host, tmp_path: Path
) -> None:
    other = tmp_path / "other"

    def opened_after_the_first(step: int, size_bytes: int) -> None:
        if step == 2:
            # Another copy to the same place ends earlier.
            copy_run(run, other, [1])
            CheckpointManager(other, ram=None, preservation_policy=KEEP_ALL).close()

    with pytest.raises(NotARunError, match="opened meanwhile and continues as run"):
        copy_run(run, other, progress=opened_after_the_first)
    # All of step 2 was there, so the run that was opened has it.
    check(other, [1, 2])


def test_some_steps_are_copied_with_the_images_that_they_reuse(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert copy_run(run, other, [3]).copied == (3,)
    shutil.rmtree(run)
    check(other, [3])


def test_later_checkpoints_are_added_by_the_same_command(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    copy_run(run, other)
    train(run, 4)
    assert copy_run(run, other) == CopiedSteps((4,), (1, 2, 3), ())
    check(other, [1, 2, 3, 4])


def test_a_copy_that_fails_anywhere_is_a_run_and_is_continued(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, count = DiskStore.put, 0

    def failing(self: DiskStore, key: str, source: object) -> None:
        nonlocal count
        count += 1
        if count == allowed:
            raise StorageError("no space")
        put(self, key, source)  # type: ignore[arg-type]

    allowed = 0
    copy_run(run, tmp_path / "whole")
    monkeypatch.setattr(DiskStore, "put", failing)
    copy_run(run, tmp_path / "counted")
    total = count
    assert total > 6
    for allowed in range(1, total + 1):
        other, count = tmp_path / f"other-{allowed}", 0
        with pytest.raises(StorageError, match="no space"):
            copy_run(run, other)
        count = total
        with holdfast.open_run(other) as found:
            steps = found.all_steps()
        check(other, steps)
        copy_run(run, other)
        check(other, [1, 2, 3])


def test_a_damaged_block_is_named_and_its_checkpoint_not_copied(run: Path, tmp_path: Path) -> None:
    (image,) = (run / "checkpoints").glob("000000002.*/*.safetensors")
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match="000000002"):
        copy_run(run, tmp_path / "other")
    check(tmp_path / "other", [1])


def test_wrong_places_and_steps_are_named_and_nothing_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").write_text("mine")
    with pytest.raises(NotARunError, match="found files"):
        copy_run(run, used)
    assert [path.name for path in used.iterdir()] == ["file"]
    with pytest.raises(InvalidArgumentError, match="expected two places"):
        copy_run(run, tmp_path / "used" / ".." / "run")
    other = tmp_path / "other"
    with pytest.raises(StepNotFoundError, match="step 7"):
        copy_run(run, other, [3, 7])
    with pytest.raises(NotARunError):
        copy_run(tmp_path / "none", other)
    assert not other.exists()
    assert main(["copy", str(run), str(other), "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["copied"], printed["present"]) == ([2], [])
    assert main(["copy", str(run), str(other)]) == 0
    assert "copied 2 checkpoints" in "".join(capsys.readouterr())


def test_a_copy_that_was_finished_counts_though_the_run_deletes_its_original(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_if_absent = DiskStore.put_if_absent

    def deleting(self: DiskStore, key: str, data: bytes, *, after: Sequence[str] = ()) -> bool:
        if key.startswith(MANIFESTS):
            (run / key).unlink()
        return put_if_absent(self, key, data, after=after)

    monkeypatch.setattr(DiskStore, "put_if_absent", deleting)
    assert copy_run(run, tmp_path / "one", [1]).copied == (1,)
    assert copy_run(run, tmp_path / "rest").copied == (2, 3)
    check(tmp_path / "one", [1])
    check(tmp_path / "rest", [2, 3])


def test_what_a_live_run_deletes_meanwhile_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deleting(*arguments: object) -> None:
        if not done:
            done.append(1)
            assert main(["rm", str(run), "2", "--yes"]) == 0
        copy(*arguments)  # type: ignore[arg-type]

    done: list[int] = []
    copy = run_copies._copy_attempts
    monkeypatch.setattr(run_copies, "_copy_attempts", deleting)
    assert copy_run(run, tmp_path / "other") == CopiedSteps((1, 3), (), (2,))
    done.clear()
    with pytest.raises(StepNotFoundError, match="step 2"):
        copy_run(run, tmp_path / "third", [1, 2])
    check(tmp_path / "other", [1, 3])


def test_a_run_that_deletes_all_that_was_listed_is_listed_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def deleting(*arguments: object) -> None:
        copy(*arguments)  # type: ignore[arg-type]
        for record in (run / "checkpoints").glob("*/*.json") if later else ():
            record.unlink()
        for step in later:
            train(run, *step)
        later.clear()

    later = [[4]]
    copy = run_copies._copy_attempts
    monkeypatch.setattr(run_copies, "_copy_attempts", deleting)
    assert copy_run(run, tmp_path / "other") == CopiedSteps((4,), (), (1, 2, 3))
    check(tmp_path / "other", [4])
    later.append([])
    assert main(["copy", str(run), str(tmp_path / "none")]) == 1
    assert "steps deleted meanwhile: 4" in "".join(capsys.readouterr())


def test_exports_and_imports_print_a_document(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def document(*arguments: object) -> dict[str, object]:
        assert main([*map(str, arguments), "--json"]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    exported = document("export", run, 2, "--hf", tmp_path / "hf")
    assert exported["step"] == 2
    assert str(tmp_path / "hf" / "model.safetensors") in str(exported["paths"])
    pytest.importorskip("torch", reason="needs PyTorch")
    file, copy = tmp_path / "state.pt", tmp_path / "copy"
    assert document("export", run, 2, "--torch", file) == {"step": 2, "paths": [str(file)]}
    assert document("import", file, copy) == {"run": str(copy)}
