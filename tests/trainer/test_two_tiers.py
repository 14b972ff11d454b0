"""Runs with a remote tier, which is a second directory here; tests/buckets has one in a bucket."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import CheckpointManager, RemoteTier
from holdfast.cli.main import main
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.run import read_run_record
from holdfast.errors import (
    AgentUnavailableError,
    CheckpointDamagedError,
    InvalidArgumentError,
    NotARunError,
    RunBusyError,
    StepNotFoundError,
)
from holdfast.host.tiers.mirroring import WATCH_SECS
from holdfast.policy.save_decision_policy import ContinuousCheckpointingPolicy
from holdfast.store.location import open_durable
from holdfast.trainer.opening.opening import open_run
from holdfast.trainer.opening.rendezvous import OneProcess, Rendezvous
from holdfast.trainer.run_copies import copy_run
from tests.attempts import folder_of
from tests.engine.making import flip_bit
from tests.hosts import Host, events, expire_leases, host, is_running, wait_until
from tests.manifests import manifest_path
from tests.said import Said
from tests.trainer import two_tier_trainer
from tests.trainer.job import check_went_on, lose, run_job, sources, start_job
from tests.trainer.tiers import Tiers, steps_in, stopped
from tests.trainer.two_tier_trainer import state_of

TRAINER = Path(two_tier_trainer.__file__)
LONE_TRAINER = TRAINER.with_name("lone_trainer.py")


@pytest.fixture
def tiers(one_host: Host, tmp_path: Path) -> Tiers:
    return Tiers(tmp_path)


@pytest.fixture
def two_machines(tmp_path: Path) -> Iterator[list[tuple[Host, Path]]]:
    """Two hosts that share nothing but the remote tier."""
    with host("host-a") as one, host("host-b") as other:
        yield [(one, tmp_path / "scratch-a"), (other, tmp_path / "scratch-b")]


def start(machine: tuple[Host, Path], remote: Path, **options: object) -> Said:
    one, scratch = machine
    return Said(one.start(TRAINER, scratch, remote, json.dumps(options)))


@pytest.mark.parametrize("damaged", [b"", b'{"run_id": "other"}', None])
def test_a_start_writes_a_damaged_or_missing_record_of_the_remote_tier_anew(
    tiers: Tiers, one_host: Host, damaged: bytes | None
) -> None:
    tiers.train(1)
    before = tiers.record(tiers.remote)
    stopped(one_host, tiers.fast)
    path = tiers.remote / "holdfast.json"
    if damaged is None:
        path.unlink()
    else:
        path.write_bytes(damaged)
    assert tiers.train(1) == 1
    store = open_durable(str(tiers.remote), SystemClock())
    after = read_run_record(store, "")
    assert (after.run_id, after.place) == (before.run_id, before.place)
    tiers.check_alike()


def test_each_tier_has_its_own_policies_and_the_remote_one_is_a_run_of_its_own(
    tiers: Tiers, one_host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiers.train(9, every=3, keep=2, fast_keep=3) == 0
    # Steps 0, 3 and 6 by the policy, and the last one before the agent leaves.
    tiers.await_remote(8)
    wait_until(lambda: not one_host.agent_processes())
    assert [e["step"] for e in events(tiers.fast, "uploaded")] == [0, 3, 6, 8]
    assert [(e["step"], e["reason"]) for e in events(tiers.fast, "remote_deleted")] == [
        (0, "preservation"),
        (3, "preservation"),
    ]
    assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([6, 7, 8], [6, 8])
    tiers.check_alike()
    with holdfast.open_run(tiers.remote) as run:
        assert np.array_equal(run.restore(6)["w"], state_of(6)["w"])
    assert main(["verify", str(tiers.remote)]) == 0
    capsys.readouterr()
    assert main(["ls", str(tiers.fast), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["tiers"]) for row in rows] == [
        (6, ["durable", "remote"]),
        (7, ["durable"]),
        (8, ["durable", "remote"]),
    ]


def test_a_lost_fast_tier_goes_on_from_the_remote_one_as_the_same_run(
    tiers: Tiers, one_host: Host
) -> None:
    tiers.train(4)
    stopped(one_host, tiers.fast)
    run_id = tiers.record(tiers.fast).run_id
    shutil.rmtree(tiers.fast)
    with tiers.manager() as manager:
        first, state = manager.resume(state_of(-1))
        assert (first, manager.last_restore.sources.keys()) == (4, {"remote"})
        assert np.array_equal(state["w"], state_of(3)["w"])
        # A step that is taken while the one before is uploaded is left out there.
        *earlier, newest = manager.all_steps()
        assert newest == 3
        assert set(earlier) < {0, 1, 2}
        manager.save(4, state_of(4))
        manager.wait_until_finished(30)
        tiers.await_remote(4)
    assert tiers.record(tiers.fast).run_id == run_id
    tiers.check_alike()
    assert sorted(tiers.attempts(tiers.fast)) == [
        f"{number:09d}{copy}.json" for number in (1, 2) for copy in (".copy", "")
    ]


def test_the_remote_tier_keeps_the_events_of_a_directory_that_is_lost(
    tiers: Tiers, one_host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (0, 1):
        assert tiers.train(1) == step
        stopped(one_host, tiers.fast)
        if step == 0:
            shutil.rmtree(tiers.fast)

    def committed(place: Path) -> list[int]:
        capsys.readouterr()
        assert main(["events", str(place), "--kind", "committed", "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return [json.loads(line)["step"] for line in captured.out.splitlines()]

    assert committed(tiers.fast) == committed(tiers.remote) == [0, 1]
    assert main(["report", str(tiers.fast), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["attempts"]) == 2
    # Trained alone, it has events of its own too.
    with CheckpointManager(tiers.remote) as manager:
        manager.save(manager.resume(state_of(-1))[0], state_of(2), force=True)
    stopped(one_host, tiers.remote)
    assert committed(tiers.fast) == committed(tiers.remote) == [0, 1, 2]


def test_events_are_not_uploaded_to_a_remote_tier_that_was_deleted(
    tiers: Tiers, one_host: Host
) -> None:
    with tiers.manager() as manager:
        manager.resume(state_of(-1))
        manager.save(0, state_of(0), force=True)
        manager.wait_until_finished(30)
        tiers.await_remote(0)
        shutil.rmtree(tiers.remote)
    assert main(["stop", str(tiers.fast)]) == 0
    wait_until(lambda: not one_host.agent_processes(), 60)
    assert not (tiers.remote / "events").exists()


def test_a_damaged_block_of_the_fast_tier_is_read_from_the_remote_one(
    tiers: Tiers, one_host: Host
) -> None:
    tiers.train(1, ram=None)
    stopped(one_host, tiers.fast)
    (image,) = tiers.fast.glob("checkpoints/*/image-*")
    flip_bit(image, image.stat().st_size - 100)
    with tiers.manager(ram=None) as manager:
        first, state = manager.resume(state_of(-1))
        assert first == 1
        assert all(np.array_equal(state[name], found) for name, found in state_of(0).items())
        assert manager.last_restore.sources["remote"] > 0
        assert any(
            "durable" in text or "image" in text for text in manager.last_restore.passed_over
        )


def test_a_damaged_manifest_of_the_fast_tier_is_read_from_the_remote_one(
    tiers: Tiers, one_host: Host
) -> None:
    tiers.train(1, ram=None)
    stopped(one_host, tiers.fast)
    (manifest,) = tiers.fast.glob("checkpoints/manifests/*.json")
    flip_bit(manifest, 10)
    with tiers.manager(ram=None) as manager:
        assert manager.resume(state_of(-1))[0] == 1


def test_a_newer_step_of_the_fast_tier_wins(tiers: Tiers, one_host: Host) -> None:
    trainer = start((one_host, tiers.fast), tiers.remote, steps=2000, every=5000, sleep=0.05)
    trainer.await_line("step", lambda line: line["step"] == 10)
    tiers.await_remote(0)
    pid = one_host.agent().pid
    trainer.process.kill()
    os.kill(pid, signal.SIGKILL)
    trainer.wait()
    wait_until(lambda: not is_running(pid))
    newest = steps_in(tiers.fast)[-1]
    assert newest > 0
    assert steps_in(tiers.remote) == [0]
    # What RAM had beyond it is lost with the host.
    shutil.rmtree(one_host.folder)
    one_host.folder.mkdir()
    expire_leases(tiers.fast, tiers.remote)
    # Of a later one the commit alone may have been missing.
    assert tiers.train(1) > newest


def test_a_run_without_a_remote_tier_gets_one_later(tiers: Tiers, one_host: Host) -> None:
    with CheckpointManager(tiers.fast) as manager:
        manager.save(0, state_of(0), force=True)
    stopped(one_host, tiers.fast)
    assert tiers.train(0) == 1
    tiers.await_remote(0)
    tiers.check_alike()


@pytest.mark.soak
def test_the_remote_tier_can_be_trained_alone_and_the_fast_one_follows(
    tiers: Tiers, one_host: Host
) -> None:
    tiers.train(2)
    # Each start waits for the agent of the other place, which leaves after a few seconds.
    with CheckpointManager(tiers.remote) as manager:
        assert manager.resume(state_of(-1))[0] == 2
        manager.save(2, state_of(2), force=True)
    assert tiers.train(1) == 3
    tiers.check_alike()


def test_a_copy_does_not_use_the_remote_tier_of_the_original(
    tiers: Tiers, one_host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers.train(2)
    stopped(one_host, tiers.fast)
    named = (tiers.fast / "remote.json").read_bytes()
    copy = Path(shutil.copytree(tiers.fast, tmp_path / "copy"))
    with CheckpointManager(copy):
        pass
    stopped(one_host, copy)
    assert not (copy / "remote.json").exists()
    # As a start that was killed in between would leave it.
    (copy / "remote.json").write_bytes(named)
    assert main(["rm", str(copy), "1", "--yes"]) == 0
    assert "is left out: use" in capsys.readouterr().err
    assert (steps_in(copy)[-1:], steps_in(tiers.remote)[-1:]) == ([0], [1])


@pytest.mark.parametrize("is_live", [False, True])
def test_a_run_that_has_replaced_the_remote_tier_is_left_alone(
    tiers: Tiers, one_host: Host, tmp_path: Path, is_live: bool
) -> None:
    with tiers.manager() as manager:
        manager.resume(state_of(-1))
        for step in (0, 1):
            manager.save(step, state_of(step), force=True)
            manager.wait_until_finished(30)
        tiers.await_remote(1)
        shutil.rmtree(tiers.remote)
        with host("host-b") as other:
            job = start((other, tiers.remote), tmp_path / "further", steps=2)
            job.await_line("end")
        there = steps_in(tiers.remote)
        assert there[-1:] == [1]
        if is_live:
            manager.delete(0)
            assert main(["rm", str(tiers.fast), "1", "--yes"]) == 0
    if not is_live:
        stopped(one_host, tiers.fast)
        assert main(["rm", str(tiers.fast), "1", "--yes"]) == 0
    assert steps_in(tiers.remote) == there


def test_commands_on_a_directory_know_what_was_trained_in_the_remote_tier_since(
    tiers: Tiers, one_host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers.train(2)
    stopped(one_host, tiers.fast)
    with CheckpointManager(tiers.remote) as manager:
        manager.save(manager.resume(state_of(-1))[0], state_of(2), force=True)
    stopped(one_host, tiers.remote)
    capsys.readouterr()
    assert main(["ls", str(tiers.fast), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [(row["step"], row["on_timeline"]) for row in found["checkpoints"]]
    assert (found["latest_step"], rows[-1]) == (2, (2, True))
    assert main(["rm", str(tiers.fast), "2", "--dry-run"]) == 0


@pytest.mark.parametrize("is_there", [False, True])
def test_ram_of_a_tier_that_was_trained_apart_is_not_taken_for_the_others(
    tiers: Tiers, one_host: Host, is_there: bool
) -> None:
    tiers.train(1)
    stopped(one_host, tiers.fast)
    with CheckpointManager(tiers.remote) as manager:
        manager.save(manager.resume(state_of(-1))[0], state_of(1), force=True)
    stopped(one_host, tiers.remote)
    # The directory's attempt of the same number, killed with what only RAM has.
    job = one_host.start(LONE_TRAINER, tiers.fast)
    said = Said(job)
    said.await_line("sealed")
    one_host.kill_agent()
    job.kill()
    job.wait()
    with holdfast.open_run(tiers.remote) as run:
        assert (run.latest_step(), run.restore()["w"][0]) == (1, 1)
    if is_there:
        # The start would displace it.
        with pytest.raises(
            AgentUnavailableError, match=rf"{tiers.fast}, up to step 5 of attempt 2"
        ):
            CheckpointManager(tiers.remote)
        with CheckpointManager(tiers.fast) as manager:
            assert manager.resume(state_of(-1))[0] == 6
        return
    shutil.rmtree(tiers.fast)
    with CheckpointManager(tiers.remote) as manager:
        first, state = manager.resume(state_of(-1))
        assert (first, state["w"][0]) == (2, 1)


@pytest.mark.soak
def test_tiers_that_were_trained_apart_are_refused(tiers: Tiers, one_host: Host) -> None:
    tiers.train(1)
    stopped(one_host, tiers.fast)
    for place in (tiers.fast, tiers.remote):
        with CheckpointManager(place) as manager:
            manager.save(manager.resume(state_of(-1))[0], state_of(1), force=True)
        stopped(one_host, place)
    before = tiers.attempts(tiers.fast), tiers.attempts(tiers.remote)
    with pytest.raises(NotARunError, match=r"attempt 2 was begun .* trained apart"):
        tiers.manager()
    assert (tiers.attempts(tiers.fast), tiers.attempts(tiers.remote)) == before


def test_a_damaged_attempt_in_one_tier_is_named_with_that_tier_and_the_advice_helps(
    tiers: Tiers, one_host: Host
) -> None:
    tiers.train(2)
    stopped(one_host, tiers.fast)
    records = [tiers.remote / f"attempts/000000001{suffix}.json" for suffix in ("", ".copy")]
    for path in records:
        flip_bit(path, 80)
    with pytest.raises(CheckpointDamagedError, match=rf"{tiers.remote}.* remove attempts/"):
        tiers.manager()
    for path in records:
        path.unlink()
    assert tiers.train(1) == 2
    tiers.check_alike()


def test_a_copy_to_the_runs_own_remote_tier_is_refused_by_that_reason(
    tiers: Tiers, one_host: Host
) -> None:
    tiers.train(1)
    stopped(one_host, tiers.fast)
    with pytest.raises(NotARunError, match="found that run itself, as its remote tier is"):
        copy_run(tiers.fast, tiers.remote)


def test_the_remote_tier_of_another_run_is_refused(tiers: Tiers, one_host: Host) -> None:
    for place in (tiers.fast, tiers.remote):
        with CheckpointManager(place, ram=None):
            pass
    with pytest.raises(NotARunError, match=r"expected run .* found run"):
        tiers.manager()


def test_a_place_in_the_runs_directory_is_no_remote_tier(tiers: Tiers) -> None:
    for place in (tiers.fast, tiers.fast / "remote", tiers.fast.parent):
        with pytest.raises(InvalidArgumentError, match="at another place"):
            CheckpointManager(tiers.fast, remote=place)
    assert not tiers.fast.exists()


def test_a_link_to_the_runs_directory_is_no_remote_tier(tiers: Tiers, one_host: Host) -> None:
    with CheckpointManager(tiers.fast, ram=None):
        pass
    tiers.remote.symlink_to(tiers.fast)
    with pytest.raises(InvalidArgumentError, match="leads to the same one"):
        tiers.manager()


def test_processes_with_different_remote_tiers_are_told(tmp_path: Path) -> None:
    class Job(Rendezvous):
        def decide(self, name, value, judge, *rest):
            return judge([value, "s3://other/run"])

    job = Job(OneProcess(), SystemClock())
    with pytest.raises(InvalidArgumentError, match=r"found none in rank 0 and s3://other/run in"):
        open_run(tmp_path / "run", job, SystemClock())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (7, "a URL, a path or a RemoteTier"),
        ("", "a URL, a path or a RemoteTier"),
        ("s3:/bucket/run", "one slash"),
        ("ftp://host/run", "begins with one of"),
    ],
)
def test_a_bad_remote_tier_is_named(tmp_path: Path, given: object, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        CheckpointManager(tmp_path / "run", remote=given)


def test_policies_that_no_agent_can_evaluate_are_refused() -> None:
    class Own:
        def should_save(self, step, previous_steps, *, context):
            return True

        def should_preserve(self, checkpoints, *, context):
            return [True] * len(checkpoints)

    for options in (
        {"save_decision_policy": Own()},
        {"preservation_policy": Own()},
        {"save_decision_policy": ContinuousCheckpointingPolicy(max_overhead=0.1)},
    ):
        with pytest.raises(InvalidArgumentError, match="RemoteTier"):
            RemoteTier("/remote", **options)


def test_a_program_may_wait_for_the_remote_tier_whatever_its_policy_says(
    tiers: Tiers, one_host: Host
) -> None:
    with tiers.manager(every=1000) as manager:
        for step in range(3):
            manager.save(step + 1, state_of(step + 1), force=True)
        manager.wait_until_finished(60, remote=True)
        assert steps_in(tiers.remote) == [3]
        with pytest.raises(InvalidArgumentError, match="timeout_secs"):
            manager.wait_until_finished(-1, remote=True)
    with (
        CheckpointManager(tiers.fast.with_name("other"), ram=None) as manager,
        pytest.raises(InvalidArgumentError, match="expected a manager with a remote tier"),
    ):
        manager.wait_until_finished(remote=True)


def test_the_wait_for_the_remote_tier_after_a_return_is_for_the_step_that_was_returned_to(
    tiers: Tiers, one_host: Host
) -> None:
    with tiers.manager(every=1000) as manager:
        for step in range(1, 4):
            manager.save(step, state_of(step), force=True)
        manager.wait_until_finished(60)
    stopped(one_host, tiers.fast)
    with tiers.manager(every=1000) as manager:
        manager.resume(state_of(0), step=2)
        # Step 3 is abandoned, and so never copied.
        manager.wait_until_finished(60, remote=True)
        assert 2 in steps_in(tiers.remote)


def test_the_newest_step_that_any_tier_has_intact_is_found_after_damage_in_both(
    tiers: Tiers, one_host: Host
) -> None:
    tiers.train(4, copies_each=True, keep=4)
    stopped(one_host, tiers.fast)
    for step, places in ((3, (tiers.fast, tiers.remote)), (2, (tiers.fast,))):
        for place in places:
            image = folder_of(place, step) / "image-00000-of-00001.safetensors"
            flip_bit(image, 8 * image.stat().st_size - 1)
    with tiers.manager() as manager:
        start, state = manager.resume(state_of(-1))
        assert manager.last_restore is not None
        assert manager.last_restore.sources.get("remote", 0) > 0
    assert start == 3
    assert (state["w"] == 2).all()


def test_a_step_that_the_remote_tier_alone_has_can_be_returned_to(
    tiers: Tiers, one_host: Host
) -> None:
    tiers.train(3, copies_each=True)
    stopped(one_host, tiers.fast)
    shutil.rmtree(tiers.fast)
    lose(one_host)
    with tiers.manager() as manager:
        start, state = manager.resume(state_of(-1), step=1)
    assert start == 2
    assert (state["w"] == 1).all()


def test_a_directory_deleted_under_a_training_ends_it_and_the_remote_tier_goes_on(
    tiers: Tiers, one_host: Host
) -> None:
    trainer = start((one_host, tiers.fast), tiers.remote, steps=2000, sleep=0.05)
    wait_until(lambda: len(steps_in(tiers.remote)) > 1)

    def is_deleted() -> bool:
        # The live run adds and removes files meanwhile.
        shutil.rmtree(tiers.fast, ignore_errors=True)
        return not tiers.fast.exists()

    wait_until(is_deleted)
    assert trainer.wait() == 1
    told = trainer.told()
    assert "was deleted" in told
    newest = steps_in(tiers.remote)[-1]
    wait_until(lambda: not one_host.agent_processes())
    with tiers.manager() as manager:
        # RAM has a newer one, and an empty directory continues the run by its remote tier.
        first = manager.resume(state_of(-1))[0]
    assert first > newest + 1
    assert re.search(rf"RAM .* keeps .*\b{first - 1}, which may be nowhere else", told)
    tiers.check_alike()


def test_removing_a_step_removes_it_from_both_tiers(tiers: Tiers, one_host: Host) -> None:
    with tiers.manager() as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step), force=True)
            manager.wait_until_finished(30, remote=True)
        manager.delete(2)
        assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([1, 3], [1, 3])
    stopped(one_host, tiers.fast)
    assert main(["rm", str(tiers.fast), "1", "--yes"]) == 0
    assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([3], [3])
    assert main(["verify", str(tiers.remote)]) == 0


def test_a_step_that_only_the_remote_tier_has_is_removed(tiers: Tiers, one_host: Host) -> None:
    with tiers.manager(fast_keep=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step), force=True)
            manager.wait_until_finished(30, remote=True)
        wait_until(lambda: steps_in(tiers.fast) == [3])
        assert main(["rm", str(tiers.fast), "1", "--yes"]) == 0
        assert steps_in(tiers.remote) == [2, 3]
    stopped(one_host, tiers.fast)
    assert main(["rm", str(tiers.fast), "2", "--attempt", "1", "--yes"]) == 0
    assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([3], [3])


def test_a_step_that_only_the_remote_tier_has_is_read_and_copied_from_there(
    tiers: Tiers,
    one_host: Host,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiers.train(3, copies_each=True, fast_keep=1)
    stopped(one_host, tiers.fast)
    assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([2], [0, 1, 2])
    run = holdfast.open_run(tiers.fast)
    assert (run.restore(1)["w"] == 1).all()
    assert run.metadata(0).step == 0
    assert (run.latest_step(), run.all_steps()) == (2, [2])
    assert main(["show", str(tiers.fast), "1", "--json"]) == 0
    capsys.readouterr()
    assert main(["verify", str(tiers.fast), "1"]) == 1
    assert f"holdfast verify {tiers.remote} 1" in capsys.readouterr().err
    assert main(["verify", str(tiers.fast)]) == 0
    assert f"holdfast verify {tiers.remote}" in capsys.readouterr().err
    assert main(["copy", str(tiers.fast), str(tmp_path / "copy")]) == 0
    assert f"{tiers.remote} was not read" in capsys.readouterr().err
    assert main(["copy", str(tiers.fast), str(tmp_path / "copy"), "0", "1"]) == 0
    assert steps_in(tmp_path / "copy") == [0, 1, 2]
    assert main(["verify", str(tmp_path / "copy")]) == 0
    with pytest.raises(StepNotFoundError, match="step 7"):
        run.restore(7)
    shutil.rmtree(tiers.remote)
    with pytest.raises(StepNotFoundError, match=f"step 1.*remote tier {tiers.remote}"):
        run.restore(1)
    assert f"the remote tier is left out: open {tiers.remote}" in caplog.text
    assert (run.restore(2)["w"] == 2).all()


@pytest.mark.parametrize("harm", ["bytes", "image", "record", "folder", "manifest"])
def test_a_step_that_is_damaged_in_the_directory_is_read_from_the_remote_tier(
    tiers: Tiers, one_host: Host, tmp_path: Path, harm: str
) -> None:
    tiers.train(2)
    stopped(one_host, tiers.fast)
    folder = folder_of(tiers.fast, 0)
    (image,), (record,) = folder.glob("image-*"), folder.glob("part-*")
    manifest = manifest_path(tiers.fast, 0)
    if harm == "folder":
        shutil.rmtree(folder)
    elif harm == "bytes":
        flip_bit(image, 200_000 * 8)
    else:
        flip_bit(manifest, 99) if harm == "manifest" else (
            image if harm == "image" else record
        ).unlink()
    run = holdfast.open_run(tiers.fast)
    assert (run.restore(0)["w"] == 0).all()
    assert run.metadata(0).step == 0
    assert main(["show", str(tiers.fast), "0"]) == 0
    shutil.rmtree(tiers.remote)
    with pytest.raises(CheckpointDamagedError):
        run.restore(0)


def test_what_is_removed_from_the_remote_tier_of_a_live_run_is_not_removed_from_its_directory(
    tiers: Tiers, one_host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiers.manager() as manager:
        for step in (1, 2):
            manager.save(step, state_of(step), force=True)
            manager.wait_until_finished(30, remote=True)
        assert main(["rm", str(tiers.remote), "1", "--yes"]) == 1
        assert f"holdfast rm {tiers.fast} STEP" in capsys.readouterr().err
        assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([1, 2], [1, 2])
        moved = tiers.remote.rename(tiers.remote.with_name("moved"))
        assert main(["rm", str(moved), "1", "--yes"]) == 1
        moved.rename(tiers.remote)
    stopped(one_host, tiers.fast)
    assert main(["rm", str(tiers.remote), "1", "--yes"]) == 0
    assert (steps_in(tiers.fast), steps_in(tiers.remote)) == ([1, 2], [2])


def test_of_two_starts_that_share_the_remote_tier_alone_exactly_one_wins(
    two_machines: list[tuple[Host, Path]], tmp_path: Path
) -> None:
    remote = tmp_path / "remote"
    both = [start(machine, remote, steps=1000, sleep=0.05) for machine in two_machines]
    wait_until(lambda: any(said.process.poll() is not None for said in both))
    ended = [said for said in both if said.process.poll() is not None]
    assert len(ended) == 1
    assert ended[0].wait() == 1
    told = ended[0].told()
    assert RunBusyError.__name__ in told
    winner = 1 - both.index(ended[0])
    assert two_machines[winner][0].name in told
    both[winner].await_line("step", lambda line: line["step"] == 5)
    both[winner].kill()
    assert len(list((remote / "attempts").glob("*[0-9].json"))) == 1


@pytest.mark.soak
def test_a_takeover_on_another_machine_fences_the_first(
    two_machines: list[tuple[Host, Path]], tmp_path: Path
) -> None:
    remote = tmp_path / "remote"
    first = start(two_machines[0], remote, steps=1000, sleep=0.05)
    first.await_line("step", lambda line: line["step"] == 5)
    wait_until(lambda: bool(steps_in(remote)))
    second = start(two_machines[1], remote, steps=1000, sleep=0.05, takeover=True)
    second.await_line("step")
    assert first.wait() == 1
    assert "FencedError" in first.told()
    assert "has taken the run over" in first.told() or "has begun" in first.told()
    second.kill()


@pytest.mark.soak
def test_a_takeover_is_found_by_a_training_that_uploads_nothing(
    two_machines: list[tuple[Host, Path]], tmp_path: Path
) -> None:
    remote = tmp_path / "remote"
    first = start(two_machines[0], remote, steps=20_000, sleep=0.05, every=10**6)
    first.await_line("step", lambda line: line["step"] == 5)
    second = start(two_machines[1], remote, steps=20_000, sleep=0.05, takeover=True)
    second.await_line("step")
    began = time.monotonic()
    assert first.wait() == 1
    assert time.monotonic() - began < 3 * WATCH_SECS
    assert "FencedError" in first.told()
    second.kill()


def test_a_start_warns_of_steps_that_a_takeover_has_abandoned(
    two_machines: list[tuple[Host, Path]], tmp_path: Path
) -> None:
    remote = tmp_path / "remote"
    first = start(two_machines[0], remote, steps=1000, sleep=0.05, every=10**6)
    first.await_line("step", lambda line: line["step"] == 5)
    wait_until(lambda: len(steps_in(two_machines[0][1])) > 1)
    lose(two_machines[0][0])
    newest = steps_in(two_machines[0][1])[-1]
    second = start(two_machines[1], remote, steps=2, takeover=True)
    assert second.wait() == 0
    again = start(two_machines[0], remote, steps=1)
    assert again.wait() == 0
    assert again.await_line("start")["start"] == second.await_line("start")["start"] + 2
    assert f"step {newest} of attempt 1, the newest one here, is abandoned" in again.told()


def test_each_host_uploads_its_own_parts_and_new_hosts_go_on_from_them(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    run, remote = tmp_path / "run", tmp_path / "remote"
    job = start_job(two_hosts, run, steps=9, interval=4, remote=str(remote))
    job.results()
    wait_until(lambda: steps_in(remote)[-1:] == [8])
    uploaded = events(run, "uploaded")
    assert {event["hosts"] for event in uploaded} == {2}
    assert main(["verify", str(remote)]) == 0
    lose(*two_hosts)
    shutil.rmtree(run)
    check_went_on(run_job(two_hosts, run, steps=1, interval=4, remote=str(remote)), 8)
    assert sources(run).keys() == {"remote"}
