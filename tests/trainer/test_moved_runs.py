"""A run's directory is moved, copied, replaced or deleted while its agent or a trainer lives."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import errors, save_decision_policy
from holdfast.cli.main import main
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import newest_attempt
from holdfast.format.names import RUN_FILE, attempt_keys
from holdfast.store.disk import DiskStore
from tests.engine.making import flip_bit
from tests.hosts import (
    Host,
    await_events,
    copy_run,
    delete_run,
    events,
    host,
    is_running,
    stop,
    wait_until,
)
from tests.manifests import manifests
from tests.said import Said
from tests.store.places import mounted
from tests.trainer.two_tier_trainer import state_of

TRAINER = Path(__file__).with_name("trainer.py")
LONE_TRAINER = TRAINER.with_name("lone_trainer.py")
EVERY_STEP = save_decision_policy.FixedIntervalPolicy(1)


def manager(directory: Path, **options: Any) -> holdfast.CheckpointManager:
    options = {"save_decision_policy": EVERY_STEP} | options
    return holdfast.CheckpointManager(directory, **options)


def state(value: int) -> dict[str, Any]:
    return {"w": np.full(10, value), "n": value}


def train(directory: Path, *steps: int, **options: Any) -> None:
    """Saves these steps, each durable."""
    with manager(directory, **options) as opened:
        opened.resume(state(-1))
        for step in steps:
            assert opened.save(step, state(step))
            opened.wait_until_finished()


def run_id(run: Path) -> str:
    return json.loads((run / RUN_FILE).read_bytes())["run_id"]


def saved(run: Path) -> list[int]:
    return sorted(int(name[:9]) for name in manifests(run))


def first_error(opened: holdfast.CheckpointManager, steps: Iterable[int]) -> Exception | None:
    """What a training that saves these steps ends with."""
    try:
        for step in steps:
            opened.save(step, state(step))
            opened.wait_until_finished(30)
            time.sleep(0.05)
    except errors.HoldfastError as error:
        return error
    return None


def resumed(run: Path) -> int:
    with manager(run) as opened:
        return opened.resume(state(-1))[0]


def test_a_refused_opening_leaves_the_earlier_manager_as_it_was(
    one_host: Host, tmp_path: Path
) -> None:
    train(tmp_path / "other", 0)
    run = tmp_path / "run"
    with manager(run) as first:
        first.save(0, state(0))
        with pytest.raises(errors.NotARunError, match="as the remote tier"):
            manager(run, remote=tmp_path / "other")
        assert first.save(1, state(1))
    assert saved(run) == [0, 1]


def test_the_manager_of_a_directory_that_was_moved_goes_on_beside_a_new_run_at_its_path(
    one_host: Host, tmp_path: Path
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    with manager(run) as first:
        first.save(0, state(0))
        first.wait_until_finished()
        run.rename(moved)
        train(run, 5)
        first.save(1, state(1))
    assert (saved(moved), saved(run)) == ([0, 1], [5])


def test_the_manager_of_a_deleted_directory_is_closed_when_a_new_run_is_opened_at_its_path(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = manager(run)
    first.save(0, state(0))
    first.wait_until_finished()
    delete_run(run)
    train(run, 5)
    with pytest.raises(errors.StorageError, match="it was deleted"):
        first.save(1, state(1))
    assert saved(run) == [5]


def assert_sound(run: Path) -> None:
    """`holdfast verify` finds nothing wrong."""
    assert main(["verify", str(run)]) == 0


def test_training_in_a_moved_run_is_written_there_while_its_agent_lingers(
    one_host: Host, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    train(old, 0, 1)
    pid = one_host.agent().pid
    old.rename(new)
    train(new, 2, 3)
    assert one_host.agent().pid == pid
    assert not old.exists()
    assert saved(new) == [1, 2, 3]
    assert one_host.agent().run == str(new)
    wait_until(lambda: [e["step"] for e in events(new, "committed")][-1:] == [3])
    assert resumed(new) == 4
    assert_sound(new)


def test_a_run_that_is_moved_while_it_trains_goes_on_where_it_is(
    one_host: Host, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with manager(old) as opened:
        for step in range(6):
            assert opened.save(step, state(step))
            opened.wait_until_finished()
            if step == 2:
                old.rename(new)
            if step == 3:
                one_host.kill_agent()
        assert opened.all_steps() == [3, 4, 5]
    assert not old.exists()
    assert resumed(new) == 6


def test_without_ram_a_moved_run_is_followed_too(one_host: Host, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with manager(old, ram=None) as opened:
        assert opened.save(0, state(0))
        opened.wait_until_finished()
        old.rename(new)
        assert opened.save(1, state(1))
        opened.wait_until_finished()
    assert not old.exists()
    assert saved(new) == [0, 1]


def test_a_new_run_at_the_path_of_one_that_was_moved_is_another_run(
    one_host: Host, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    train(old, 0)
    old.rename(new)
    train(old, 10)
    train(new, 1)
    assert saved(old) == [10]
    assert saved(new) == [0, 1]


def test_a_copy_is_a_run_of_its_own_while_the_original_trains(
    one_host: Host, tmp_path: Path
) -> None:
    run, fork = tmp_path / "run", tmp_path / "fork"
    with manager(run) as first:
        for step in (0, 1):
            assert first.save(step, state(step))
            first.wait_until_finished()
        copy_run(run, fork)
        with manager(fork, takeover=True) as second:
            start, found = second.resume(state(-1))
            assert (start, found["n"]) == (2, 1)
            for step in (2, 3):
                assert first.save(step, state(step))
                assert second.save(step, state(100 + step))
                first.wait_until_finished()
                second.wait_until_finished()
            assert second.restore(3)["n"] == 103
        assert first.save(4, state(4))
        first.wait_until_finished()
        assert first.restore(3)["n"] == 3
    assert run_id(run) != run_id(fork)
    assert (saved(run)[-1], saved(fork)[-1]) == (4, 3)
    assert events(run, "fenced") == []
    for one in (run, fork):
        assert_sound(one)


def test_moved_and_copied_back_both_go_on_as_different_runs(one_host: Host, tmp_path: Path) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    train(run, 0)
    run.rename(new)
    copy_run(new, run)
    train(run, 1, 2)
    train(new, 10)
    assert run_id(run) != run_id(new)
    assert (saved(run), saved(new)) == ([0, 1, 2], [0, 10])
    assert (resumed(run), resumed(new)) == (3, 11)


def test_a_live_trainer_is_told_that_its_directory_was_deleted(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    opened = manager(run)
    assert opened.save(0, state(0))
    opened.wait_until_finished()
    pid = one_host.agent().pid
    delete_run(run)
    told = first_error(opened, range(1, 100))
    assert f"{run}: it was deleted" in str(told)
    assert not isinstance(told, errors.FencedError)
    # It may have been moved, and the move may have passed the place of the last commit before.
    assert f"RAM ({one_host.folder}/" in str(told)
    wait_until(lambda: not is_running(pid))
    assert "it was deleted" in str(first_error(opened, range(200, 202)))
    opened.close()
    assert not run.exists()


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder on another file system than the tests' own."""
    with tempfile.TemporaryDirectory(prefix="holdfast-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_killed_run_that_is_moved_to_another_file_system_goes_on_from_ram(
    one_host: Host,
    tmp_path: Path,
    elsewhere: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # `clean` shall not remove what other tests have just killed.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run, new = tmp_path / "run", elsewhere / "run"
    job = one_host.start(LONE_TRAINER, run, stem="numpy")
    Said(job).await_line("sealed")
    first_id = run_id(run)
    one_host.kill_with_agent(job)
    assert run.stat().st_dev != elsewhere.stat().st_dev
    subprocess.run(["mv", run, new], check=True)
    assert saved(new) == []
    assert main(["clean", "--yes"]) == 0
    assert "step 5 may be in RAM alone" in capsys.readouterr().out
    assert main(["ls", str(new), "--json"]) == 0
    assert [c["step"] for c in json.loads(capsys.readouterr().out)["checkpoints"]] == [5]
    with manager(new) as opened:
        assert opened.resume(state_of(-1))[0] == 6
    assert run_id(new) == first_id
    wait_until(lambda: saved(new) == [5])
    assert_sound(new)


@pytest.mark.usefixtures("quick_tries")
def test_a_live_run_on_a_full_disk_that_is_moved_goes_on_from_the_step_that_ram_had(
    one_host: Host, tmp_path: Path, elsewhere: Path
) -> None:
    with mounted("tmpfs", tmp_path / "disk", "size=2m") as disk:
        run, new = disk / "run", elsewhere / "run"
        opened = manager(run)
        assert opened.save(0, state(0))
        opened.wait_until_finished()
        first_id, pid = run_id(run), one_host.agent().pid
        with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        for step in range(1, 4):
            assert opened.save(step, state(step))
            with pytest.raises(errors.SaveFailedError):
                opened.wait_until_finished(30)
        # What the agent writes meanwhile may keep `mv` from removing all that it has moved.
        subprocess.run(["mv", run, new], check=False)
        delete_run(run)
        wait_until(lambda: not is_running(pid))
        told = str(first_error(opened, range(4, 100)))
        assert "moved to another file system" in told
        assert "keeps step 3, " in told
        # The old manager is not closed: its process may hang.
        assert resumed(new) == 4
        assert run_id(new) == first_id
        wait_until(lambda: saved(new) == [0, 3])
        assert_sound(new)
        opened.close()


def test_a_trainer_whose_agent_was_killed_before_the_move_names_what_ram_has(
    one_host: Host, tmp_path: Path
) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    ram = holdfast.RamTier(save_decision_policy=EVERY_STEP)
    once = save_decision_policy.SpecificStepsPolicy([0])
    opened = manager(run, ram=ram, save_decision_policy=once)
    for step in range(3):
        assert opened.save(step, state(step))
        opened._progress.wait(lambda sealed, finished: sealed or finished, 30)
    wait_until(lambda: any(held.step == 2 for held in one_host.agent().held))
    pid = one_host.agent().pid
    stop(pid)
    shutil.copytree(run, new)
    shutil.rmtree(run)
    os.kill(pid, signal.SIGKILL)
    told = str(first_error(opened, range(3, 100)))
    assert "keeps " in told
    assert "2, which may be nowhere else" in told
    with contextlib.suppress(errors.HoldfastError):
        opened.close()
    assert resumed(new) == 3


def test_an_agent_that_lingers_gives_its_ram_back_once_the_directory_is_gone(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(run, 0)
    pid = one_host.agent().pid
    assert list(one_host.folder.iterdir())
    wait_until(lambda: not (run / "leases").exists())
    delete_run(run)
    wait_until(lambda: not is_running(pid))
    assert list(one_host.folder.iterdir()) == []
    assert not run.exists()


def test_a_backup_that_is_put_back_is_trained_at_once(one_host: Host, tmp_path: Path) -> None:
    run, backup = tmp_path / "run", tmp_path / "backup"
    train(run, 0, 1)
    # The agent releases its lease after the last trainer has left.
    wait_until(lambda: not (run / "leases").exists())
    copy_run(run, backup)
    delete_run(run)
    shutil.copytree(backup, run)
    assert resumed(run) == 2
    train(run, 2)
    assert saved(run)[-1] == 2


VALUED = """
import sys
import numpy as np
import holdfast
from holdfast import preservation_policy, save_decision_policy
every_step = save_decision_policy.FixedIntervalPolicy(1)
run, offset, count, is_durable, takeover = sys.argv[1], *map(int, sys.argv[2:])
policy = every_step if is_durable else save_decision_policy.SpecificStepsPolicy([10**9])
ram = holdfast.RamTier(save_decision_policy=every_step)
keep = preservation_policy.LatestN(100)
manager = holdfast.CheckpointManager(
    run, save_decision_policy=policy, preservation_policy=keep, ram=ram, takeover=bool(takeover)
)
start, _ = manager.resume({"w": np.full(10, -1), "n": -1})
for step in range(start, start + count):
    assert manager.save(step, {"w": np.full(10, offset + step), "n": offset + step})
    manager.wait_until_finished()
print("saved", flush=True)
sys.stdin.read()
"""
"""A training whose values differ by `offset`; it saves its steps, and waits to be killed."""


def save_and_die(
    one: Host,
    folder: Path,
    run: Path,
    *,
    offset: int,
    count: int,
    is_durable: bool,
    takeover: bool = False,
) -> None:
    """Trains on that host, until the trainer and the agent are killed; its RAM remains."""
    script = folder / "valued.py"
    script.write_text(VALUED)
    flags = int(is_durable), int(takeover)
    trainer = one.start(script, run, offset, count, *flags, stem="numpy")
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "saved\n", trainer.communicate()
    one.kill_with_agent(trainer)


def put_back(backup: Path, run: Path) -> None:
    """Makes a run's directory what it was, as `rsync --delete` does: it stays the same one."""
    for path in run.iterdir():
        # A living agent adds and removes files meanwhile.
        with contextlib.suppress(FileNotFoundError):
            delete_run(path) if path.is_dir() else path.unlink()
    shutil.copytree(backup, run, dirs_exist_ok=True)


def agent_log(run: Path, one: Host) -> str:
    return (run / "events" / f"agent-{one.name}.log").read_text()


def test_a_run_that_is_put_back_under_a_living_agent_continues_from_its_newest_step(
    one_host: Host, tmp_path: Path
) -> None:
    run, backup = tmp_path / "run", tmp_path / "backup"
    train(run, 0, 1, 2)
    copy_run(run, backup)
    # The agent removes what it does not keep, and remembers that.
    train(run, 3, 4, 5, 6)
    assert saved(run)[0] > 2
    put_back(backup, run)
    assert resumed(run) == 3
    with manager(run) as opened:
        assert opened.resume(state(-1))[1]["n"] == 2


def test_what_is_lost_by_putting_a_run_back_under_a_living_agent_is_reported_once(
    one_host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, backup = tmp_path / "run", tmp_path / "backup"
    train(run, 0)
    copy_run(run, backup)
    # The agent remembers two attempts, so that the next start takes three numbers.
    train(run, 1)
    train(run, 2)
    put_back(backup, run)
    assert resumed(run) == 1
    lost = [record for record in caplog.records if "continues without it" in record.message]
    assert len(lost) == len(await_events(run, "given_up", count=1)) == 1
    assert "step 2 of attempt 3" in lost[0].message


@pytest.mark.parametrize("is_durable", [True, False], ids=["durable", "in RAM"])
def test_of_a_run_that_was_put_back_and_trained_elsewhere_ram_of_the_lost_attempt_is_not_used(
    one_host: Host, tmp_path: Path, is_durable: bool
) -> None:
    run, backup = tmp_path / "run", tmp_path / "backup"
    train(run, 0, 1)
    assert main(["stop", str(run)]) == 0
    shutil.copytree(run, backup)
    save_and_die(one_host, tmp_path, run, offset=100, count=5, is_durable=is_durable)
    put_back(backup, run)
    with host("host-b") as other:
        save_and_die(other, tmp_path, run, offset=200, count=2, is_durable=True)
    assert saved(run)[-1] == 3
    # The attempt of host B may be live for all that host A knows.
    with manager(run, takeover=True) as opened:
        start, found = opened.resume(state(-1))
        assert (start, found["n"], set(found["w"])) == (4, 203, {203})
        assert opened.all_steps()[-2:] == [2, 3]
        for step, value in ((1, 1), (2, 202), (3, 203)):
            assert opened.restore(step)["n"] == value
        assert opened.save(4, state(4))
        opened.wait_until_finished()
        assert opened.restore(4)["n"] == 4
    assert "step 6 in RAM is of another attempt 2 than" in agent_log(run, one_host)
    assert resumed(run) == 5
    assert_sound(run)


def test_the_attempt_after_one_whose_bad_record_was_removed_has_none_of_its_steps(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(run, 0, 1)
    save_and_die(one_host, tmp_path, run, offset=100, count=3, is_durable=True)
    store = DiskStore(run, SystemClock())
    lost = newest_attempt(store)
    records = [run / key for key in attempt_keys(lost.number)]
    for record in records:
        flip_bit(record, 400)
    with pytest.raises(errors.CheckpointDamagedError, match="remove attempts/000000002"):
        manager(run)
    one_host.kill_agent()
    for record in records:
        record.unlink()
    shutil.rmtree(run / "leases", ignore_errors=True)
    with host("host-b") as other:
        save_and_die(other, tmp_path, run, offset=200, count=2, is_durable=True, takeover=True)
    assert (newest_attempt(store).number, lost.number) == (3, 2)
    with manager(run, takeover=True) as opened:
        start, found = opened.resume(state(-1))
        assert (start, found["n"], set(found["w"])) == (4, 203, {203})
        assert opened.all_steps()[-3:] == [1, 2, 3]
        assert [opened.restore(step)["n"] for step in (1, 2, 3)] == [1, 202, 203]
        with pytest.raises(errors.StepNotFoundError):
            opened.restore(4)
        assert opened.save(4, state(4))
        opened.wait_until_finished()
        assert opened.restore(4)["n"] == 4
    assert resumed(run) == 5
    assert_sound(run)


def test_the_command_line_takes_no_agent_of_the_original_for_the_copys(
    one_host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    with manager(run) as opened:
        assert opened.save(0, state(0))
        opened.wait_until_finished()
        copy_run(run, copy)
        before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
        assert opened.save(1, state(1))
        opened.wait_until_finished()
        assert main(["save", str(copy)]) != 0
        assert "no agent of the run is on host" in capsys.readouterr().err
        assert main(["ls", str(copy), "--json"]) == 0
        assert [c["step"] for c in json.loads(capsys.readouterr().out)["checkpoints"]] == [0]
        assert main(["stop", str(copy)]) == 0
        assert one_host.agent().run == str(run)
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before
