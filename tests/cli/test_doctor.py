"""`holdfast doctor`: a sound host and run, and each finding on one that is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.trainer.checks import storage_checks
from holdfast.trainer.checks.check_results import Severity
from holdfast.trainer.checks.host_checks import check_host
from holdfast.trainer.checks.storage_checks import check_storage
from tests.cli.command_line import answer, holdfast, train
from tests.hosts import Host
from tests.store.places import mounted
from tests.test_launchers import SLURM


def severities(found: dict, subject: str) -> set[str]:
    rows = [row for row in found["checks"] if row["subject"].startswith(subject)]
    assert rows
    return {row["severity"] for row in rows}


def worst(place: Path) -> dict[str, str]:
    """The findings about the storage that are not ok, by severity."""
    found = check_storage(str(place), SystemClock())
    return {r.severity.value: r.found for r in found if r.severity is not Severity.OK}


def test_a_sound_host_and_run_have_no_finding_and_stay_as_they_are(
    shared_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(shared_host, run, steps=2)
    before = sorted(run.rglob("*"))
    # A busy disk may be found slow.
    found = answer(shared_host, "doctor", run, code=None)
    bad = [c for c in found["checks"] if c["severity"] in ("problem", "warning")]
    assert [c for c in bad if "durable" not in c["found"]] == []
    assert severities(found, "run, ") == {"ok"}
    assert severities(found, "RAM tier, ") == {"ok"}
    assert sorted(run.rglob("*")) == before
    text = holdfast(shared_host, "doctor", run, code=None).stdout
    assert "2 checkpoints, to step 1" in text
    assert "0 problems, " in text.splitlines()[-1]


def test_ram_on_a_disk_is_a_warning_and_no_interface_a_problem(
    shared_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shared_host.variables, "HOLDFAST_RAM", str(tmp_path))
    found = answer(shared_host, "doctor", code=3)
    assert severities(found, "RAM tier, ") == {"warning", "ok"}
    monkeypatch.setitem(shared_host.variables, "HOLDFAST_INTERFACE", "no-such-interface")
    found = answer(shared_host, "doctor", code=1)
    assert severities(found, "interface") == {"problem"}
    assert (found["problems"], found["warnings"]) == (1, 1)


def test_ram_without_room_for_two_checkpoints_is_a_warning(
    shared_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train(shared_host, run, steps=1, megabytes=1)
    with mounted("tmpfs", tmp_path / "small", "size=1m") as small:
        monkeypatch.setitem(shared_host.variables, "HOLDFAST_RAM", str(small))
        found = answer(shared_host, "doctor", run, code=3)
    (row,) = (row for row in found["checks"] if row["subject"].startswith("RAM tier"))
    assert "the newest checkpoint needs" in row["found"]
    assert "docs/ram.md" in row["advice"]


def test_ram_that_only_this_job_has_mounted_is_a_note(
    shared_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    ram = tmp_path / "own ram"
    ram.mkdir()
    monkeypatch.setitem(shared_host.variables, "HOLDFAST_RAM", str(ram))
    monkeypatch.setitem(shared_host.variables, "SLURM_JOB_ID", "7")
    mounting = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs ram "$0" && exec "$@"', str(ram))
    monkeypatch.setattr(shared_host, "prefix", mounting)
    note, rest = (
        row
        for row in answer(shared_host, "doctor")["checks"]
        if row["subject"].startswith("RAM tier")
    )
    assert (note["severity"], rest["severity"]) == ("note", "ok")
    assert "ends with it (Slurm's job_container/tmpfs" in note["found"]


def test_a_directory_that_is_no_run_is_a_problem_and_a_new_one_is_not(tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").write_text("mine")
    assert "expected a run" in worst(used)["problem"]
    assert worst(tmp_path / "new" / "run") == {"note": "there is no run yet; a training creates it"}
    assert sorted(tmp_path.rglob("*")) == [used, used / "file"]


def test_storage_that_cannot_be_written_or_is_full_is_a_problem(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "full", "size=1m") as full:
        assert "No space left" in worst(full / "run")["problem"]
        assert [*full.iterdir()] == []
    with mounted("tmpfs", tmp_path / "fixed", "ro") as fixed:
        assert "cannot be written" in worst(fixed / "run")["problem"]


def test_slow_storage_and_another_clock_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_checks, "SLOW_BYTES_PER_SEC", 1e15)
    assert "MB/s" in worst(tmp_path)["warning"]
    monkeypatch.setattr(storage_checks, "SLOW_BYTES_PER_SEC", 0)
    monkeypatch.setattr(storage_checks, "SLOW_SECS", 0)
    assert "small durable write" in worst(tmp_path)["warning"]
    monkeypatch.setattr(storage_checks, "SLOW_SECS", 60)
    file_time = storage_checks._file_time
    monkeypatch.setattr(storage_checks, "_file_time", lambda probe: file_time(probe) + 90)
    assert "+90.0 s" in worst(tmp_path)["warning"]


def test_too_little_room_for_three_checkpoints_is_a_warning(tmp_path: Path) -> None:
    found = storage_checks._check_space("storage", tmp_path, 1 << 60)
    assert found.severity is Severity.WARNING
    assert os.fspath(tmp_path) not in found.found


def test_a_file_in_place_of_a_run_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("pass")
    for place in (file, file / "run"):
        assert "problem" in {r.severity.value for r in check_storage(str(place), SystemClock())}


def test_a_check_leaves_no_folder_in_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "ram"
    monkeypatch.setenv("HOLDFAST_RAM", str(root))
    assert list(check_host(None))
    assert not root.exists()
    root.mkdir(mode=0o700)
    assert list(check_host(None))
    assert root.exists()


def test_launchers_are_shown_with_what_they_say(
    shared_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer(shared_host, "doctor")
    assert severities(found, "launcher") == {"ok"}
    for name, value in SLURM.items():
        monkeypatch.setitem(shared_host.variables, name, value)
    found = answer(shared_host, "doctor")
    (row,) = (row for row in found["checks"] if row["subject"] == "launcher, slurm")
    assert "Slurm (job 12) as rank 1 of 2; SLURM_JOB_ID=12" in row["found"]
    monkeypatch.setitem(shared_host.variables, "RANK", "0")
    monkeypatch.setitem(shared_host.variables, "WORLD_SIZE", "2")
    found = answer(shared_host, "doctor", code=3)
    assert severities(found, "launcher") == {"ok", "note", "warning"}
    monkeypatch.setitem(shared_host.variables, "HOLDFAST_LAUNCHER", "slrum")
    found = answer(shared_host, "doctor", code=1)
    assert severities(found, "launcher") == {"problem"}


def test_a_store_that_torchrun_shares_is_a_warning(
    shared_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shared_host.variables, "TORCHELASTIC_MAX_RESTARTS", "3")
    subject = "restarts by torchrun"
    for is_shared, severity in (("True", "warning"), ("False", "ok")):
        monkeypatch.setitem(shared_host.variables, "TORCHELASTIC_USE_AGENT_STORE", is_shared)
        found = answer(shared_host, "doctor", code=3 if severity == "warning" else 0)
        assert severities(found, subject) == {severity}
