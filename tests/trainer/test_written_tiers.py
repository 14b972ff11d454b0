"""Two durable tiers as starts, readers and commands find them; no agent runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import holdfast
from holdfast.cli.main import main
from holdfast.engine.lifecycle.leases import Lease, Leases
from holdfast.engine.lifecycle.run import noted_remote, read_run_record
from holdfast.errors import (
    CheckpointDamagedError,
    InvalidArgumentError,
    NotARunError,
    StepNotFoundError,
    StorageError,
)
from holdfast.reading import FillTarget, open_checkpoint
from holdfast.trainer.opening.run_access import read_only
from holdfast.trainer.run_copies import copy_run
from tests.attempts import folder_of
from tests.engine.making import flip_bit
from tests.manifests import manifest_path
from tests.trainer.tiers import steps_in
from tests.trainer.two_tier_trainer import state_of
from tests.trainer.written_tiers import WrittenTiers, opened, train_alone


@pytest.fixture
def tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WrittenTiers:
    # Of a host without agents.
    monkeypatch.setenv("HOLDFAST_RAM", str(tmp_path / "ram"))
    monkeypatch.setenv("HOLDFAST_HOST", "host-a")
    return WrittenTiers(tmp_path)


def newest_step(tiers: WrittenTiers) -> int | None:
    newest = tiers.newest()
    return newest.step if newest is not None else None


def files_in(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


# Starts.


@pytest.mark.parametrize("damaged", [b"", b'{"run_id": "other"}', None])
def test_a_start_writes_a_damaged_or_missing_record_of_the_remote_tier_anew(
    tiers: WrittenTiers, damaged: bytes | None
) -> None:
    tiers.train(1)
    before = tiers.record(tiers.remote)
    path = tiers.remote / "holdfast.json"
    if damaged is None:
        path.unlink()
    else:
        path.write_bytes(damaged)
    tiers.open()
    after = read_run_record(tiers.stores()[1], "")
    assert (after.run_id, after.place) == (before.run_id, before.place)
    tiers.check_alike()


def test_a_start_that_leaves_the_remote_tier_out_names_it(
    tiers: WrittenTiers, caplog: pytest.LogCaptureFixture
) -> None:
    tiers.train(0, 1)
    opened(tiers.fast)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"the run has the remote tier {tiers.remote}, which this start does not use" in line
    caplog.clear()
    tiers.open()
    assert caplog.records == []


def test_a_lost_directory_is_created_anew_as_the_same_run(tiers: WrittenTiers) -> None:
    tiers.train(0, 1)
    tiers.train(2)
    run_id = tiers.record(tiers.fast).run_id
    shutil.rmtree(tiers.fast)
    assert tiers.open().run_id == run_id
    tiers.check_alike()
    assert (newest_step(tiers), steps_in(tiers.fast)) == (2, [])
    assert tiers.view().find(1).step == 1


def test_a_newer_step_of_the_directory_wins(tiers: WrittenTiers) -> None:
    tiers.train(0, 1, 2, copied=1)
    assert steps_in(tiers.remote) == [0]
    assert newest_step(tiers) == 2


def test_a_run_without_a_remote_tier_gets_one_later(tiers: WrittenTiers) -> None:
    train_alone(tiers.fast, 0)
    tiers.open()
    tiers.check_alike()
    assert noted_remote(tiers.stores()[0]) == str(tiers.remote)


def test_the_remote_tier_can_be_trained_alone_and_the_directory_follows(
    tiers: WrittenTiers,
) -> None:
    tiers.train(0, 1)
    train_alone(tiers.remote, 2)
    tiers.open()
    tiers.check_alike()
    assert newest_step(tiers) == 2


def test_a_start_warns_of_steps_that_a_takeover_has_abandoned(
    tiers: WrittenTiers, caplog: pytest.LogCaptureFixture
) -> None:
    tiers.train(0, 1, 5, copied=1)
    train_alone(tiers.remote, 1)
    tiers.open(takeover=True)
    assert "step 5 of attempt 1, the newest one here, is abandoned" in caplog.text
    assert newest_step(tiers) == 1


def test_tiers_that_were_trained_apart_are_refused(tiers: WrittenTiers) -> None:
    tiers.train(1)
    for place in (tiers.fast, tiers.remote):
        train_alone(place, 2)
    before = files_in(tiers.fast), files_in(tiers.remote)
    with pytest.raises(NotARunError, match=r"attempt 2 was begun .* trained apart"):
        tiers.open()
    assert (files_in(tiers.fast), files_in(tiers.remote)) == before


def test_a_damaged_attempt_in_one_tier_is_named_with_that_tier_and_the_advice_helps(
    tiers: WrittenTiers,
) -> None:
    tiers.train(0, 1)
    records = [tiers.remote / f"attempts/000000001{suffix}.json" for suffix in ("", ".copy")]
    for path in records:
        if not path.exists():
            shutil.copy(records[0], path)
        flip_bit(path, 80)
    with pytest.raises(CheckpointDamagedError, match=rf"{tiers.remote}.* remove attempts/"):
        tiers.open()
    for path in records:
        path.unlink()
    tiers.open()
    assert newest_step(tiers) == 1
    assert (tiers.remote / "attempts/000000001.json").read_bytes() == (
        tiers.fast / "attempts/000000001.json"
    ).read_bytes()


def test_the_remote_tier_of_another_run_is_refused(tiers: WrittenTiers) -> None:
    for place in (tiers.fast, tiers.remote):
        opened(place)
    with pytest.raises(NotARunError, match=r"expected run .* found run"):
        tiers.open()


def test_a_link_to_the_runs_directory_is_no_remote_tier(tiers: WrittenTiers) -> None:
    opened(tiers.fast)
    tiers.remote.symlink_to(tiers.fast)
    with pytest.raises(InvalidArgumentError, match="leads to the same one"):
        tiers.open()


# Tiers that were moved, copied or restored from a backup.


@pytest.mark.parametrize("tier", ["fast", "remote"])
@pytest.mark.parametrize("is_moved", [False, True])
def test_a_tier_that_is_restored_from_a_backup_or_moved_is_recognised_by_the_other_one(
    tiers: WrittenTiers, tmp_path: Path, tier: str, is_moved: bool
) -> None:
    place: Path = getattr(tiers, tier)
    tiers.train(0)
    run_id = tiers.record(tiers.fast).run_id
    if not is_moved:
        backup = shutil.copytree(place, tmp_path / "backup")
    # A second attempt.
    tiers.train(1, 2)
    if is_moved:
        setattr(tiers, tier, Path(shutil.copytree(place, tmp_path / "moved")))
        shutil.rmtree(place)
    else:
        shutil.rmtree(place)
        shutil.copytree(backup, place)
    assert tiers.open().run_id == run_id
    assert newest_step(tiers) == 2
    assert noted_remote(tiers.stores()[0]) == str(tiers.remote)
    tiers.check_alike()


@pytest.mark.parametrize("is_other_copied", [False, True])
def test_a_copy_with_the_remote_tier_of_the_original_is_refused_and_not_changed(
    tiers: WrittenTiers, tmp_path: Path, is_other_copied: bool
) -> None:
    tiers.train(0)
    original = tiers.fast
    tiers.fast = Path(shutil.copytree(tiers.fast, tmp_path / "copy"))
    if is_other_copied:
        tiers.remote = Path(shutil.copytree(tiers.remote, tmp_path / "remote-copy"))
        # Nothing is at the places of both.
        (tmp_path / "fast").rename(tmp_path / "fast-renamed")
        (tmp_path / "remote").rename(tmp_path / "remote-renamed")
    before = files_in(tiers.fast), files_in(tiers.remote)
    with pytest.raises(NotARunError, match=rf"a copy of it at .*; the original was at {original}"):
        tiers.open()
    assert (files_in(tiers.fast), files_in(tiers.remote)) == before
    # Without it the copy is a run of its own, and stays one.
    train_alone(tiers.fast, 1)
    with pytest.raises(NotARunError, match=r"was opened as a copy .* open an empty directory"):
        tiers.open()


def test_a_start_that_is_refused_for_its_remote_tier_changes_no_directory(
    tiers: WrittenTiers, tmp_path: Path
) -> None:
    tiers.train(0)
    tiers.fast = Path(shutil.copytree(tiers.fast, tmp_path / "restored"))
    shutil.rmtree(tmp_path / "fast")
    before = files_in(tiers.fast)
    shutil.move(tiers.remote, tmp_path / "away")
    opened(tiers.remote)
    with pytest.raises(NotARunError, match=r"expected run .* found run"):
        tiers.open()
    assert files_in(tiers.fast) == before


@pytest.mark.parametrize("refused", ["directory", "remote tier", "same place"])
def test_a_start_that_is_refused_makes_no_folder(
    tiers: WrittenTiers, tmp_path: Path, refused: str
) -> None:
    used = tiers.fast if refused == "directory" else tiers.remote
    if refused == "same place":
        tiers.remote = tmp_path / "link" / "fast"
        tmp_path.joinpath("link").symlink_to(tmp_path)
    else:
        used.mkdir()
        (used / "file").write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises((NotARunError, InvalidArgumentError)):
        tiers.open()
    assert sorted(tmp_path.iterdir()) == before


def test_a_start_names_a_remote_tier_that_it_makes_anew(
    tiers: WrittenTiers, caplog: pytest.LogCaptureFixture
) -> None:
    tiers.train(0, 1)
    assert caplog.records == []
    shutil.rmtree(tiers.remote)
    tiers.train(2)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"its remote tier {tiers.remote} has no run any more, and is made anew" in line
    assert (steps_in(tiers.remote), newest_step(tiers)) == ([2], 2)


def test_a_copy_does_not_use_the_remote_tier_of_the_original(
    tiers: WrittenTiers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers.train(0, 1)
    named = (tiers.fast / "remote.json").read_bytes()
    copy = Path(shutil.copytree(tiers.fast, tmp_path / "copy"))
    opened(copy)
    assert not (copy / "remote.json").exists()
    # As a start that was killed in between would leave it.
    (copy / "remote.json").write_bytes(named)
    assert main(["rm", str(copy), "1", "--yes"]) == 0
    assert "is left out: use" in capsys.readouterr().err
    assert (steps_in(copy), steps_in(tiers.remote)) == ([0], [0, 1])


# Readers and commands.


def harm_step(place: Path, step: int, harm: str) -> None:
    """Damage a step in one tier."""
    folder, manifest = folder_of(place, step), manifest_path(place, step)
    harms: dict[str, Callable[[], object]] = {
        "bytes": lambda: flip_bit(next(folder.glob("image-*")), 200_000 * 8),
        "image": lambda: next(folder.glob("image-*")).unlink(),
        "record": lambda: next(folder.glob("part-*")).unlink(),
        "folder": lambda: shutil.rmtree(folder),
        "manifest": lambda: flip_bit(manifest, 99),
    }
    harms[harm]()


HARMS = ["bytes", "image", "record", "folder", "manifest"]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("step", [0, 1])
def test_a_step_that_is_damaged_in_the_directory_is_read_from_the_remote_tier(
    tiers: WrittenTiers, harm: str, step: int
) -> None:
    tiers.train(0, 1)
    harm_step(tiers.fast, step, harm)
    assert newest_step(tiers) == 1
    with holdfast.open_run(tiers.fast) as run:
        assert (run.restore(step)["w"] == step).all()
        assert run.metadata(step).step == step
        assert main(["show", str(tiers.fast), str(step)]) == 0
        shutil.rmtree(tiers.remote)
        with pytest.raises(CheckpointDamagedError):
            run.restore(step)


@pytest.mark.parametrize("harm", HARMS)
def test_ls_lists_a_step_as_damaged_only_if_no_tier_has_it_intact(
    tiers: WrittenTiers, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed() -> tuple[int, str, str]:
        capsys.readouterr()
        assert main(["ls", str(tiers.fast), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        row = document["checkpoints"][-1]
        return document["latest_step"], row["state"], row["problem"] or ""

    tiers.train(0, 1)
    harm_step(tiers.fast, 1, harm)
    step, state, problem = listed()
    assert (step, state) == (1, "committed")
    if harm == "bytes":
        # Images are not read.
        assert problem == ""
        return
    assert problem.startswith("a copy is damaged, another tier's is intact; durable: ")
    harm_step(tiers.remote, 1, harm)
    step, state, problem = listed()
    assert (step, state) == (0, "damaged")
    assert "another tier" not in problem


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("steps", [(), (1,)])
def test_a_copy_reads_what_is_damaged_in_the_directory_from_the_remote_tier(
    tiers: WrittenTiers, tmp_path: Path, harm: str, steps: tuple[int, ...]
) -> None:
    tiers.train(0, 1)
    harm_step(tiers.fast, 1, harm)
    copy = tmp_path / "copy"
    assert copy_run(tiers.fast, copy, steps).copied == (steps or (0, 1))
    assert main(["verify", str(copy)]) == 0
    shutil.rmtree(tiers.remote)
    with pytest.raises(CheckpointDamagedError):
        copy_run(tiers.fast, tmp_path / "second", steps)


@pytest.mark.parametrize("harm", HARMS)
def test_an_export_reads_what_is_damaged_in_the_directory_from_the_remote_tier(
    tiers: WrittenTiers, tmp_path: Path, harm: str
) -> None:
    tiers.train(0, 1)
    harm_step(tiers.fast, 1, harm)
    assert main(["export", str(tiers.fast), "1", "--hf", str(tmp_path / "hf")]) == 0
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(np.array_equal(weights[name], array) for name, array in state_of(1).items())
    checkpoint = open_checkpoint(tiers.remote, 1)
    shutil.rmtree(tiers.remote)
    assert main(["export", str(tiers.fast), "1", "--hf", str(tmp_path / "second")]) == 1
    frozen = checkpoint.arrays["frozen",]
    target = FillTarget(frozen.path, frozen.region, np.empty(frozen.shape, frozen.numpy_dtype))
    with pytest.raises((CheckpointDamagedError, StorageError)):
        checkpoint.fill([target])


@pytest.mark.parametrize("copied", [None, 1, 0])
def test_the_next_start_of_a_directory_that_was_put_back_is_found_in_the_remote_tier(
    tiers: WrittenTiers, tmp_path: Path, copied: int | None
) -> None:
    tiers.train(0)
    backup = shutil.copytree(tiers.fast, tmp_path / "backup")
    attempt = tiers.train(1, 2, copied=copied)
    assert read_only(tiers.fast).find_put_back(2, attempt.number, is_durable=True) is None
    for path in tiers.fast.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(backup, tiers.fast, dirs_exist_ok=True)
    put_back = read_only(tiers.fast).find_put_back(2, attempt.number, is_durable=True)
    step = {None: 2, 1: 1, 0: 0}[copied]
    assert put_back is not None
    assert put_back.step == step
    of_attempt = attempt.number if copied != 0 else 1
    assert put_back.text.endswith(f"continues from step {step} of attempt {of_attempt}")
    # As the next start does.
    tiers.open()
    assert newest_step(tiers) == step


def test_the_newest_step_that_any_tier_has_intact_is_found_after_damage_in_both(
    tiers: WrittenTiers,
) -> None:
    tiers.train(0, 1, 2, 3)
    for step, places in ((3, (tiers.fast, tiers.remote)), (2, (tiers.fast,))):
        for place in places:
            (record,) = folder_of(place, step).glob("part-*")
            flip_bit(record, 80)
    assert newest_step(tiers) == 2
    with holdfast.open_run(tiers.fast) as run:
        assert (run.restore(2)["w"] == 2).all()


def test_a_step_that_only_the_remote_tier_has_is_read_copied_and_removed_from_there(
    tiers: WrittenTiers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiers.train(0, 1, 2)
    for step in (0, 1):
        shutil.rmtree(folder_of(tiers.fast, step))
        manifest_path(tiers.fast, step).unlink()
    assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([2], [0, 1, 2])
    run = holdfast.open_run(tiers.fast)
    assert (run.restore(1)["w"] == 1).all()
    assert run.metadata(0).step == 0
    assert (run.latest_step(), run.all_steps()) == (2, [2])
    capsys.readouterr()
    assert main(["ls", str(tiers.fast), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert {row["step"]: row["tiers"] for row in rows}[2] == ["durable", "remote"]
    assert main(["show", str(tiers.fast), "1", "--json"]) == 0
    capsys.readouterr()
    assert main(["verify", str(tiers.remote)]) == 0
    assert main(["verify", str(tiers.fast), "1"]) == 1
    assert f"holdfast verify {tiers.remote} 1" in capsys.readouterr().err
    assert main(["verify", str(tiers.fast)]) == 0
    assert f"holdfast verify {tiers.remote}" in capsys.readouterr().err
    assert main(["copy", str(tiers.fast), str(tmp_path / "copy")]) == 0
    assert f"{tiers.remote} alone has were not copied" in capsys.readouterr().err
    assert main(["copy", str(tiers.fast), str(tmp_path / "copy"), "0", "1"]) == 0
    assert steps_in(tmp_path / "copy") == [0, 1, 2]
    assert main(["verify", str(tmp_path / "copy")]) == 0
    with pytest.raises(StepNotFoundError, match="step 7"):
        run.restore(7)
    assert main(["rm", str(tiers.fast), "1", "--attempt", "1", "--yes"]) == 0
    assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([2], [0, 2])
    shutil.rmtree(tiers.remote)
    with pytest.raises(StepNotFoundError, match=f"step 0.*remote tier {tiers.remote}"):
        run.restore(0)
    assert f"the remote tier is left out: open {tiers.remote}" in caplog.text
    assert (run.restore(2)["w"] == 2).all()


def test_commands_on_a_directory_know_what_was_trained_in_the_remote_tier_since(
    tiers: WrittenTiers, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers.train(0, 1)
    train_alone(tiers.remote, 2)
    capsys.readouterr()
    assert main(["ls", str(tiers.fast), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    rows = [(row["step"], row["on_timeline"]) for row in listed["checkpoints"]]
    assert (listed["latest_step"], rows[-1]) == (2, (2, True))
    assert main(["rm", str(tiers.fast), "2", "--dry-run"]) == 0


def test_removing_a_step_removes_it_from_both_tiers(tiers: WrittenTiers) -> None:
    tiers.train(1, 2, 3)
    assert main(["rm", str(tiers.fast), "1", "--yes"]) == 0
    assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([2, 3], [2, 3])
    assert main(["rm", str(tiers.remote), "2", "--yes"]) == 0
    assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([2, 3], [3])
    assert main(["verify", str(tiers.remote)]) == 0


def test_nothing_is_removed_from_the_remote_tier_of_a_live_run_alone(
    tiers: WrittenTiers, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = tiers.train(1, 2)
    leases = Leases(tiers.stores()[1].fleeting, tiers.record(tiers.fast).run_id)
    lease = Lease(
        run_id=tiers.record(tiers.fast).run_id,
        attempt=attempt,
        host="host-b",
        pid=1,
        user="alice",
        incarnation=1,
        counter=1,
    )
    leases.write(lease)
    assert main(["rm", str(tiers.remote), "1", "--yes"]) == 1
    assert "attempt 1 is live on host host-b" in capsys.readouterr().err
    moved = tiers.remote.rename(tiers.remote.with_name("moved"))
    assert main(["rm", str(moved), "1", "--yes"]) == 1
    moved.rename(tiers.remote)
    assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([1, 2], [1, 2])
    leases.remove(attempt.number)
    assert main(["rm", str(tiers.remote), "1", "--yes"]) == 0
    assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([1, 2], [2])


def test_a_run_that_has_replaced_the_remote_tier_is_left_alone(tiers: WrittenTiers) -> None:
    tiers.train(0, 1)
    shutil.rmtree(tiers.remote)
    train_alone(tiers.remote, 0, 1)
    assert main(["rm", str(tiers.fast), "1", "--yes"]) == 0
    assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([0], [0, 1])


def test_a_copy_to_the_runs_own_remote_tier_is_refused_by_that_reason(
    tiers: WrittenTiers,
) -> None:
    tiers.train(0)
    with pytest.raises(NotARunError, match="found that run itself, as its remote tier is"):
        copy_run(tiers.fast, tiers.remote)
