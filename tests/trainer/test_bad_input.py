"""Bad input gets an error that names the thing, and nothing is changed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import holdfast
from holdfast import errors, save_decision_policy
from holdfast.format.records import RunRecord
from holdfast.format.sealed import seal
from tests.attempts import folder_of
from tests.hosts import Host, events, wait_until
from tests.manifests import manifest_path

EVERY_STEP = save_decision_policy.FixedIntervalPolicy(1)


def manager(directory: Any, **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(directory, **{"save_decision_policy": EVERY_STEP} | options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


STATE = {
    "w": np.zeros((4, 3), np.float32),
    "n": 3,
    "layers": [np.zeros(2), {"b": np.zeros(5)}],
    "key": "text",
}


def test_all_differences_of_structure_are_told_at_once(tmp_path: Path) -> None:
    like = {
        "w": jnp.zeros((4, 5)),
        "n": 3.0,
        "layers": [jnp.zeros(2, jnp.bfloat16), {"c": np.zeros(5)}],
        "key": None,
        "rng": jax.random.key(0),
    }
    holdfast.save(tmp_path / "saved", STATE)
    with pytest.raises(errors.StructureMismatchError) as caught:
        holdfast.load(tmp_path / "saved", like=like)
    told = str(caught.value)
    assert "w: expected array float32[4, 5], found array float32[4, 3]" in told
    assert "n: expected float, found int" in told
    assert "layers/0: expected array bfloat16[2], found array float64[2]" in told
    assert "layers/1/c: expected array float64[5], found nothing" in told
    assert "layers/1/b: expected nothing, found array float64[5]" in told
    assert "key: expected None, found str" in told
    assert "rng: expected array key<threefry2x32>[], found nothing" in told


def test_at_most_twenty_differences_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "saved", {f"a{i:02}": np.zeros(2) for i in range(50)})
    with pytest.raises(errors.StructureMismatchError, match="in 50 places") as caught:
        holdfast.load(tmp_path / "saved", like={f"a{i:02}": np.zeros(3) for i in range(50)})
    assert str(caught.value).count("expected array") == 20
    assert "and 30 more" in str(caught.value)


def test_a_restore_that_does_not_fit_changes_no_object(one_host: Host, tmp_path: Path) -> None:
    generator = np.random.RandomState(1)
    before = generator.get_state()[1].copy()
    with manager(tmp_path / "run") as saving:
        saving.save(0, {"g": np.random.RandomState(2), "w": np.zeros(3)})
        with pytest.raises(errors.StructureMismatchError):
            saving.resume({"g": generator, "w": np.zeros(4)})
    np.testing.assert_array_equal(generator.get_state()[1], before)


def test_a_step_never_saved_uncommitted_or_damaged_is_told_apart(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with manager(run) as saving:
        for step in range(3):
            saving.save(step, STATE)
        saving.wait_until_finished()
        image = next(folder_of(run, 1).glob("image*"))
        data = bytearray(image.read_bytes())
        data[4096 + 8] ^= 1
        image.write_bytes(data)
        manifest_path(run, 2).rename(tmp_path / "manifest")
        next(folder_of(run, 2).glob("image*")).unlink()
        # RAM may hold the newest; a reader without it sees the disk alone.
    one_host.kill_agent()
    for folder in one_host.folder.iterdir():
        shutil.rmtree(folder)
    with manager(run, ram=None) as reading:
        with pytest.raises(errors.StepNotFoundError, match=r"step 7.*0, 1"):
            reading.restore(7)
        with pytest.raises(errors.CheckpointDamagedError, match=r"image-00000.*bytes \[\d+, \d+\)"):
            reading.restore(1)
        with pytest.raises(errors.StepNotFoundError):
            reading.restore(2)
        assert reading.restore()["n"] == 3
        assert reading.last_restore is not None
        assert reading.last_restore.step == 0
        ((step, attempt, reason),) = reading.last_restore.skipped
        assert (step, attempt) == (1, 1)
        assert "digest" in reason


def test_a_folder_of_images_alone_is_no_checkpoint(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with manager(run) as saving:
        saving.save(0, STATE)
        saving.wait_until_finished()
        first = folder_of(run, 0)
        begun = first.with_name(first.name.replace("000000000", "000000005"))
        begun.mkdir()
        shutil.copy(next(first.glob("image*")), begun)
        # Images alone are there for later checkpoints that reuse them.
        with pytest.raises(errors.StepNotFoundError, match="step 5"):
            saving.restore(5)
        assert saving.all_steps() == [0]


def test_a_folder_that_is_no_run_is_refused_and_left_as_it_was(
    one_host: Host, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(errors.NotARunError, match=r"files but no holdfast\.json"):
        manager(tmp_path)
    assert contents(tmp_path) == before
    file = tmp_path / "notes.txt"
    with pytest.raises(errors.NotARunError, match="found a file"):
        manager(file)


def test_a_directory_that_cannot_be_made_is_told_as_such(one_host: Host) -> None:
    with pytest.raises(errors.StorageError, match=r"/proc/nope/run: the directory cannot be made"):
        manager(Path("/proc/nope/run"))


def test_a_link_that_leads_nowhere_is_not_taken_for_a_deleted_run(
    one_host: Host, tmp_path: Path
) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "disk/run")
    with pytest.raises(errors.StorageError, match=r"symbolic link to .*disk/run, which does not"):
        manager(tmp_path / "run")


def test_a_new_run_inside_another_one_is_told_once(
    one_host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        manager(tmp_path / "run").close()
        manager(tmp_path / "run/inner/run").close()
    told = [r.getMessage() for r in caplog.records if "inside another run" in r.getMessage()]
    assert len(told) == 1
    assert f"{tmp_path}/run:" in told[0]


def test_a_damaged_run_record_is_no_run(one_host: Host, tmp_path: Path) -> None:
    (tmp_path / "holdfast.json").write_text("{}")
    with pytest.raises(errors.NotARunError, match=r"holdfast\.json"):
        manager(tmp_path)


def test_a_run_of_a_newer_format_is_refused_and_left_as_it_was(
    one_host: Host, tmp_path: Path
) -> None:
    with manager(tmp_path / "run") as saving:
        saving.save(0, STATE)
    record_path = tmp_path / "run" / "holdfast.json"
    record = msgspec.json.decode(record_path.read_bytes(), type=RunRecord)
    record_path.write_bytes(seal(msgspec.structs.replace(record, format_version=2)))
    one_host.kill_agent()
    before = contents(tmp_path)
    with pytest.raises(errors.NewerFormatError, match="version 2"):
        manager(tmp_path / "run")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("directory", [7, None, "", "s3://bucket", "ftp://bucket/run", b"bytes"])
def test_what_is_no_path_is_refused(one_host: Host, directory: Any) -> None:
    with pytest.raises(errors.HoldfastError, match="open"):
        manager(directory)
    assert not Path("bytes").exists()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte of the test's own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_directory_that_is_not_writable_is_told_by_name(one_host: Host, mounted: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    with pytest.raises(errors.StorageError, match=r"small/run.*[Rr]ead-only"):
        manager(mounted / "run")


@pytest.mark.soak
def test_a_full_directory_is_told_by_name_and_training_goes_on(
    one_host: Host, mounted: Path
) -> None:
    filler = mounted / "filler"
    with manager(mounted / "run") as saving:
        filler.write_bytes(bytes(600_000))
        assert saving.save(0, {"w": np.zeros(100_000)})
        with pytest.raises(errors.SaveFailedError, match="no space left") as caught:
            saving.wait_until_finished()
        assert caught.value.step == 0
        filler.unlink()
        assert saving.save(1, {"w": np.ones(100_000)})
        saving.wait_until_finished()
        assert saving.latest_step() == 1


@pytest.mark.usefixtures("quick_tries")
def test_a_failure_is_raised_once_at_the_next_save(one_host: Host, mounted: Path) -> None:
    saving = manager(mounted / "run")
    saving.save(0, {"w": np.zeros(1_000_000)})
    wait_until(lambda: events(mounted / "run", "failed"))
    wait_until(lambda: saving._progress.has_failed)
    with pytest.raises(errors.SaveFailedError) as caught:
        saving.save(1, {"w": np.zeros(10)})
    assert caught.value.step == 0
    assert saving.save(2, {"w": np.zeros(10)})
    saving.wait_until_finished()
    saving.close()


@pytest.mark.usefixtures("quick_tries")
def test_with_warnings_a_failed_save_ends_no_training_and_close_raises_for_the_last_one(
    one_host: Host, mounted: Path
) -> None:
    def awaited_failures(count: int) -> None:
        wait_until(lambda: len(events(mounted / "run", "failed")) == count)
        wait_until(lambda: not saving._progress.steps())

    with pytest.raises(errors.InvalidArgumentError, match="expected 'raise' or 'warn'"):
        manager(mounted / "run", on_save_failure="ignore")
    with manager(mounted / "run", on_save_failure="warn") as saving:
        saving.save(0, {"w": np.zeros(1_000_000)})
        awaited_failures(1)
        assert saving.save(1, {"w": np.zeros(10)})
    saving = manager(mounted / "run", on_save_failure="warn")
    for step in (2, 3):
        assert saving.save(step, {"w": np.zeros(1_000_000)})
        awaited_failures(step)
    assert saving.finish(3, {"w": np.zeros(1_000_000)})
    with pytest.raises(errors.SaveFailedError, match="no space left") as caught:
        saving.close()
    assert caught.value.steps[-1] == 3
    assert "is in RAM until a newer checkpoint takes its room, and the agent tries again" in str(
        caught.value
    )
    assert "may continue" not in str(caught.value)


def fill_up(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(512))


def test_an_open_of_a_full_run_changes_nothing(one_host: Host, mounted: Path) -> None:
    with manager(mounted / "run") as saving:
        saving.save(0, {"w": np.zeros(10)})
    # The agent releases its lease after the last trainer has left.
    wait_until(lambda: not (mounted / "run" / "leases").exists())
    one_host.kill_agent()
    fill_up(mounted)
    before = {k: v for k, v in contents(mounted).items() if "events" not in k}
    with pytest.raises(errors.OutOfSpaceError, match="small/run"):
        manager(mounted / "run")
    assert {k: v for k, v in contents(mounted).items() if "events" not in k} == before


def test_a_step_that_is_none_or_a_wait_for_no_remote_tier_is_refused(
    one_host: Host, tmp_path: Path
) -> None:
    bad: list[Any] = [-1, 1.0, "1", None, True, np.bool_(True), 10**16]
    with manager(tmp_path / "run") as saving:
        for step in bad:
            with pytest.raises(errors.InvalidArgumentError, match=f"step.*{step!r}"):
                saving.save(step, STATE)
        assert saving.save(4, STATE)
        with pytest.raises(errors.InvalidArgumentError, match="a manager with a remote tier"):
            saving.wait_until_finished(remote=True)


def test_steps_that_go_backwards_are_refused(one_host: Host, tmp_path: Path) -> None:
    with manager(tmp_path / "run") as saving:
        saving.save(4, STATE)
        with pytest.raises(errors.StepOrderError, match="step 3"):
            saving.save(3, STATE)
        with pytest.raises(errors.StepExistsError, match="step 4"):
            saving.save(4, STATE)
    with manager(tmp_path / "run") as again:
        with pytest.raises(errors.StepOrderError, match="step 2"):
            again.save(2, STATE)
        with pytest.raises(errors.StepExistsError, match="step 4"):
            again.save(4, STATE)
        assert again.save(5, STATE)


def test_a_state_in_more_shards_than_a_manifest_may_have_is_refused(
    one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.trainer.planning.CHUNK_COUNT_MAX", 2)
    with manager(tmp_path / "run") as saving:
        with pytest.raises(errors.InvalidArgumentError, match="found 3 of 3 arrays; shard them"):
            saving.save(0, {name: np.zeros(4) for name in "abc"})
        assert saving.save(1, {"a": np.zeros(4)})
        saving.wait_until_finished()
        assert saving.all_steps() == [1]


def test_bad_options_are_refused_by_name(one_host: Host, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"ram": 5}, "ram"),
        ({"save_decision_policy": 10}, "save_decision_policy .* found 10"),
        ({"preservation_policy": 10}, "preservation_policy .* found 10"),
        ({"preservation_policy": object()}, "should_preserve"),
    ]
    for options, told in cases:
        with pytest.raises(errors.InvalidArgumentError, match=told):
            manager(tmp_path / "run", **options)
    for options, told in [
        ({"copies": 0}, "copies"),
        ({"limit_bytes": -1}, "limit_bytes"),
        ({"linger_secs": -1}, "linger_secs"),
    ]:
        with pytest.raises(errors.InvalidArgumentError, match=told):
            holdfast.RamTier(**options)
    with manager(tmp_path / "run") as saving:
        with pytest.raises(errors.InvalidArgumentError, match="metrics"):
            saving.save(0, STATE, metrics={"loss": "low"})  # type: ignore[dict-item]
        with pytest.raises(errors.InvalidArgumentError, match="timeout_secs"):
            saving.wait_until_finished(timeout_secs=-1)


def test_bad_metrics_are_refused_at_the_first_step_that_has_some(
    one_host: Host, tmp_path: Path
) -> None:
    seldom = save_decision_policy.FixedIntervalPolicy(1000)
    with manager(tmp_path / "run", save_decision_policy=seldom, ram=None) as saving:
        saving.save(0, STATE)
        assert not saving.save(1, STATE)
        with pytest.raises(errors.InvalidArgumentError, match=r"metrics\['loss'\].*found 'low'"):
            saving.save(2, STATE, metrics={"loss": "low"})  # type: ignore[dict-item]
        assert not saving.save(2, STATE, metrics={"loss": 0.5})
        saving.finish(2, STATE)


def test_errors_of_resume_name_it_and_propose_no_like(one_host: Host, tmp_path: Path) -> None:
    with manager(tmp_path / "run") as saving:
        saving.save(0, STATE)
        saving.wait_until_finished()
        with pytest.raises(errors.StructureMismatchError, match=r"^resume: ") as caught:
            saving.resume(STATE | {"n": 2.5})
        assert "like" not in str(caught.value)
        with pytest.raises(errors.StructureMismatchError, match=r"(?s)^restore: .*like=None"):
            saving.restore(like=STATE | {"n": 2.5})
        with pytest.raises(errors.StructureMismatchError, match=r"^resume: .*partial"):
            saving.resume(STATE, partial="wrong")
        with pytest.raises(errors.InvalidArgumentError, match=r"^resume: .*state, found None"):
            saving.resume(None)


def test_a_failed_close_is_a_note_of_the_error_that_left_the_block(
    one_host: Host, tmp_path: Path
) -> None:
    class StoppedError(Exception):
        pass

    def train() -> None:
        with manager(tmp_path / "run", ram=None) as saving:
            saving.save(0, STATE)
            saving.wait_until_finished()
            shutil.rmtree(tmp_path / "run")
            with contextlib.suppress(errors.HoldfastError):
                saving.save(1, STATE, force=True)
            raise StoppedError

    with pytest.raises(StoppedError) as caught:
        train()
    (note,) = caught.value.__notes__
    assert note.startswith("holdfast: ")
    assert "was deleted" in note


def test_the_manifest_of_a_run_is_plain_json(tmp_path: Path) -> None:
    metrics = {"loss": float("nan"), "accuracy": 0.5}
    holdfast.save(tmp_path / "run", STATE, metrics=metrics)
    with holdfast.open_run(tmp_path / "run") as run:
        assert np.isnan(run.metadata(0).metrics["loss"])
    manifest = json.loads(manifest_path(tmp_path / "run", 0).read_text())
    assert manifest["step"] == 0
