import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from holdfast.engine.lifecycle.catalog import Listings, list_stores
from holdfast.engine.reading import inventory
from holdfast.store.contract import ReadableStore
from holdfast.trainer.opening.run_access import read_only
from tests.attempts import folder_of
from tests.cli.command_line import answer, holdfast, kill_all, start_training, train
from tests.hosts import Host
from tests.manifests import manifest_path


@pytest.fixture(scope="module")
def run(shared_host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 3 of attempt 1; then 2 again, from a deliberate restore of step 1."""
    directory = tmp_path_factory.mktemp("listing") / "run"
    train(shared_host, directory, steps=4)
    train(shared_host, directory, steps=3, restore=1, linger=600, lost=True)
    return directory


def test_ls_tells_of_every_checkpoint(shared_host: Host, run: Path) -> None:
    found = answer(shared_host, "ls", run)
    assert found["run"] == str(run)
    assert found["latest_step"] == 2
    assert found["count"] == len(found["checkpoints"]) == 4
    rows = found["checkpoints"]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    newest = rows[2]
    assert newest["metrics"] == {"loss": 1 / 3, "bad": "nan"}
    assert newest["tiers"] == ["ram", "durable"]
    assert rows[0]["tiers"] == ["durable"]
    assert {row["state"] for row in rows} == {"committed"}
    assert all(row["problem"] is None for row in rows)
    taken = datetime.fromisoformat(newest["time"])
    assert timedelta(0) < datetime.now(UTC) - taken < timedelta(minutes=5)
    assert 0 < newest["age_secs"] < 300
    folder = folder_of(run, 2, newest["attempt"])
    assert newest["size_bytes"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_ls_of_a_folder_with_runs_lists_them(shared_host: Host, run: Path, tmp_path: Path) -> None:
    train(shared_host, run.parent / "another", steps=2)
    bad = run.parent / "bad"
    bad.mkdir()
    (bad / "holdfast.json").write_text("{}")
    try:
        runs = answer(shared_host, "ls", run.parent)["runs"]
        text = holdfast(shared_host, "ls", run.parent).stdout
        both = holdfast(shared_host, "ls", run, run.parent / "another").stdout
        with_bad = holdfast(shared_host, "ls", run, run.parent, tmp_path, code=1).stdout
    finally:
        shutil.rmtree(run.parent / "another")
        shutil.rmtree(bad)
    assert [(Path(r["run"]).name, r["latest_step"]) for r in runs] == [
        ("another", 1),
        ("bad", None),
        ("run", 2),
    ]
    assert "holdfast.json" in runs[1]["problem"]
    assert text.splitlines()[0].split() == ["run", "newest", "step"]
    assert [line.split()[:2] for line in text.splitlines()[1:4]] == [
        ["another", "1"],
        ["bad", "?"],
        ["run", "2"],
    ]
    named = [line.split() for line in both.splitlines()[1:]]
    assert named == [[str(run), "2"], [str(run.parent / "another"), "1"]]
    assert f"{run.parent}/another" in with_bad
    assert f"{tmp_path}: " in with_bad
    # A folder without runs is refused as before.
    assert "expected a run" in holdfast(shared_host, "ls", tmp_path, code=1).stderr


def test_ls_tells_abandoned_branches_from_the_timeline(shared_host: Host, run: Path) -> None:
    rows = answer(shared_host, "ls", run)["checkpoints"]
    abandoned = [(row["step"], row["attempt"]) for row in rows if not row["on_timeline"]]
    assert abandoned == [(3, 1)]
    assert holdfast(shared_host, "ls", run).stdout.count("committed (abandoned)") == 1


def test_ls_lists_only_the_newest_that_were_asked_for(shared_host: Host, run: Path) -> None:
    found = answer(shared_host, "ls", run, "--limit", "2")
    assert [row["step"] for row in found["checkpoints"]] == [2, 3]
    assert found["count"] == 4
    assert "2 older not shown" in holdfast(shared_host, "ls", run, "--limit", "2").stdout


def test_ls_lines_fit_a_terminal(shared_host: Host, run: Path) -> None:
    lines = holdfast(shared_host, "ls", run).stdout.splitlines()
    assert lines[0].split() == [
        "step",
        "attempt",
        "age",
        "size",
        "written",
        "tiers",
        "state",
        "metrics",
    ]
    assert all(len(line) <= 100 for line in lines)


def test_what_an_agent_that_was_killed_left_in_ram_is_listed(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    kill_all(one_host, start_training(one_host, run, steps=3, every=9, ram_every=1, leave=600))
    rows = answer(one_host, "ls", run)["checkpoints"]
    assert (rows[-1]["step"], rows[-1]["tiers"], rows[-1]["state"]) == (2, ["ram"], "in RAM")
    (left,) = answer(one_host, "status", run)["left_behind"]
    assert left["ram_bytes"] > 64 * 32 * 4


def test_ls_of_a_run_with_damage_lists_the_rest(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(one_host, run, steps=5, linger=0)
    folders = sorted((run / "checkpoints").glob("0*"))
    manifest = manifest_path(run, 0)
    manifest.write_text(manifest.read_text().replace('"step":0', '"step":9'))
    next(folders[1].glob("image*")).unlink()
    manifest_path(run, 2).unlink()
    next(folders[2].glob("part*")).unlink()
    rows = answer(one_host, "ls", run)["checkpoints"]
    assert [row["state"] for row in rows] == [
        "damaged",
        "damaged",
        "uncommitted",
        "committed",
        "committed",
    ]
    assert "digest" in rows[0]["problem"]
    assert "is missing" in rows[1]["problem"]
    for name in ("000000001.json", "000000001.copy.json"):
        attempt = run / "attempts" / name
        attempt.write_text(attempt.read_text().replace('"host"', '"hast"'))
    done = holdfast(one_host, "ls", run)
    assert "the timeline is not known" in done.stderr
    assert len(done.stdout.splitlines()) >= 6
    for path in (run / "attempts").iterdir():
        path.unlink()
    done = holdfast(one_host, "ls", run)
    assert "attempts/ has no record" in done.stderr
    assert "abandoned" not in done.stdout


def test_show_tells_arrays_values_and_iterators(shared_host: Host, run: Path) -> None:
    found = answer(shared_host, "show", run)
    assert (found["step"], found["process_count"]) == (2, 1)
    arrays = {array["name"]: array for array in found["arrays"]}
    kernel = arrays["params/kernel"]
    assert kernel["shape"] == [64, 32]
    assert kernel["dtype"] == "float32"
    assert kernel["grid"] == [1, 1]
    assert kernel["size_bytes"] == 64 * 32 * 4
    assert found["values"] == [{"name": "note", "type": "str", "value": "[bold]"}]
    assert found["process_values"] == ["data"]
    assert found["tiers"] == ["ram", "durable"]


def test_show_is_readable(shared_host: Host, run: Path) -> None:
    out = holdfast(shared_host, "show", run, "1").stdout
    assert "step 1, attempt 1" in out
    row = next(line for line in out.splitlines() if "params/kernel" in line)
    assert row.split() == ["params/kernel", "(64,", "32)", "float32", "1", "8,192"]
    assert "'[bold]'" in out
    assert "data" in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_another_host_on_this_machine_has_its_own_agent_and_ram(
    shared_host: Host, run: Path
) -> None:
    other = replace(shared_host, name="host-b")
    assert answer(other, "ls", run)["checkpoints"][2]["tiers"] == ["durable"]
    assert "host-b" in holdfast(other, "save", run, code=1).stderr
    # All agents of this user are told of, whatever their hosts are called.
    # Another test's agent may just have lost its run, and not know yet.
    agents = [(agent["host"], agent["run"]) for agent in answer(other, "status")["agents"]]
    assert agents.count(("host-a", str(run))) == 1


def test_a_pipe_that_is_closed_early_is_no_traceback(shared_host: Host, run: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "ls", str(run)],
        env=shared_host.environment,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_step_that_was_never_saved_is_told_with_those_that_were(
    shared_host: Host, run: Path, command: str
) -> None:
    done = holdfast(shared_host, command, run, "7", code=1)
    assert done.stdout == ""
    assert "find step 7" in done.stderr
    assert "0, 1, 2)" in done.stderr


def test_a_checkpoint_that_is_being_deleted_is_no_row(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (folder,) = (copy / "checkpoints").glob("000000000.*")
    # The first listing sees nothing but images of the checkpoint, the second one not even those.
    for record in (manifest_path(copy, 0), *folder.glob("*.json")):
        record.unlink()
    listed: list[int] = []

    def list_slowly(stores: Sequence[ReadableStore]) -> tuple[Listings, tuple[str, ...]]:
        found = list_stores(stores)
        listed.append(len(found[0]["durable"]))
        shutil.rmtree(folder, ignore_errors=True)
        return found

    monkeypatch.setattr(inventory, "list_stores", list_slowly)
    rows = inventory.take_inventory(read_only(copy), None).rows
    assert listed == [4, 3]
    assert [row.id.step for row in rows] == [1, 2, 3]


def test_every_command_answers_for_a_run_that_was_put_back_as_the_next_start_decides(
    one_host: Host, tmp_path: Path
) -> None:
    run, backup = tmp_path / "run", tmp_path / "backup"
    train(one_host, run, steps=5)
    shutil.copytree(run, backup)
    train(one_host, run, steps=10, linger=600, lost=True)
    before = answer(one_host, "watch", run, "--once")
    assert before["newest_step"] == 9
    assert "put back" not in holdfast(one_host, "status", run).stderr
    for entry in run.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.copytree(backup, run, dirs_exist_ok=True)
    text = "step 9 of attempt 2 as durable, and .* put back .* continues from step 4 of attempt 1"
    assert re.search(text, holdfast(one_host, "status", run).stderr)
    watched = answer(one_host, "watch", run, "--once")
    assert watched["newest_step"] == 4
    assert re.search(text, watched["newest"])
    assert answer(one_host, "ls", run)["latest_step"] == answer(one_host, "show", run)["step"] == 4
    holdfast(one_host, "verify", run)
    starting = start_training(one_host, run, steps=6)
    out, _ = starting.communicate(timeout=240)
    assert out.split() == ["open", "5"]
