"""Attempts: one at a time, fenced by the next one, and branches of the timeline."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import errors, preservation_policy, save_decision_policy
from holdfast.clock import SystemClock
from holdfast.coordination.settings import LEASE_SECS
from holdfast.engine.lifecycle.attempts import (
    AttemptStart,
    begin_attempt,
    newest_attempt,
    read_attempt,
)
from holdfast.format.names import CheckpointId, checkpoint_folder
from holdfast.host.wire import protocol
from holdfast.host.wire.agent_directory import user_name
from holdfast.local_agent.client import AgentGoneError
from holdfast.store.disk import DiskStore
from tests.attempts import attempt_id
from tests.cli.command_line import holdfast as command
from tests.hosts import Host, await_events, events, finished, host, is_running, wait_until
from tests.manifests import folders, manifest_path
from tests.store.places import mounted
from tests.trainer.job import lose
from tests.trust.failing_rig import fill_up

TRAINER = Path(__file__).with_name("trainer.py")
EVERY_STEP = save_decision_policy.FixedIntervalPolicy(1)


def manager(directory: Path, **options: Any) -> holdfast.CheckpointManager:
    options = {"save_decision_policy": EVERY_STEP} | options
    return holdfast.CheckpointManager(directory, **options)


def state(value: int) -> dict[str, Any]:
    return {"w": np.full(10, value), "n": value}


def test_a_second_live_attempt_is_refused_with_the_firsts_host_and_process_also_by_a_new_agent(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = one_host.start(TRAINER, run, 100000, json.dumps({"sleep": 0.01}), stem="numpy")
    first.stdout.readline()
    with pytest.raises(errors.RunBusyError, match=rf"host-a .*process {first.pid}") as refused:
        manager(run)
    assert "takeover=True" in str(refused.value)
    first.stdout.readline()
    assert first.poll() is None
    one_host.kill_agent()
    with pytest.raises(errors.RunBusyError, match=f"process {first.pid}"):
        manager(run)


def test_a_manager_replaces_the_one_that_the_process_had_of_the_run(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (tmp_path / "same").symlink_to(run)
    threads = set(threading.enumerate())
    for opening in range(3):
        first = manager(run)
        assert first.resume(state(-1))[0] == opening
        assert first.save(opening, state(opening))
        if opening == 1:
            del first
        else:
            # It is referenced still, and the path is another one of the same directory.
            with manager(tmp_path / "same") as second:
                start, resumed = second.resume(state(-1))
                assert (start, resumed["n"]) == (opening + 1, opening)
            with pytest.raises(errors.FencedError, match="opened again in this process"):
                first.save(100, state(100))
            for call in (first.restore, first.latest_step, first.wait_until_finished):
                with pytest.raises(errors.FencedError, match="opened again in this process"):
                    call()
            first.close()

    def own_threads() -> list[str]:
        names = [thread.name for thread in set(threading.enumerate()) - threads]
        return [name for name in names if name.startswith("holdfast")]

    wait_until(lambda: not own_threads())


def test_a_takeover_fences_the_first_attempt_and_nothing_of_it_is_committed_after(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = manager(run)
    first.save(0, state(0))
    first.save(1, state(1))
    first.wait_until_finished()
    second = manager(run, takeover=True)
    assert second.resume(state(-1))[0] == 2
    with pytest.raises(errors.FencedError, match="attempt"):
        first.save(2, state(2))
    with pytest.raises(errors.FencedError):
        first.save(3, state(3))
    assert second.save(2, state(22))
    second.wait_until_finished()
    assert second.all_steps() == [0, 1, 2]
    assert second.restore(2)["n"] == 22
    first.close()
    second.close()
    names = folders(run)
    assert names == {"000000000.1", "000000001.1", "000000002.2"}


def test_an_attempt_that_another_host_has_overtaken_deletes_nothing_and_waits_for_nothing(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = manager(run)
    first.save(0, state(0))
    first.wait_until_finished()
    store, clock = DiskStore(run, SystemClock()), SystemClock()
    record = read_attempt(store, 1)
    origin = CheckpointId(0, record.attempt)
    start = AttemptStart(run_id=record.run_id, origin=origin, host="other", pid=1, time=clock.now())
    begin_attempt(store, attempt_id(2), start)
    with pytest.raises(errors.FencedError, match="attempt 2 has taken the run over"):
        first.delete(0)
    assert manifest_path(run, 0).exists()
    assert first.save(1, state(1))
    with pytest.raises(errors.FencedError, match="attempt 2 has taken the run over"):
        first.wait_until_finished(30)
    session = first._session
    wait_until(lambda: not session._watch.is_alive())
    first.close()
    assert session.sockets() == []
    assert not manifest_path(run, 1).exists()


def test_a_thread_that_outlives_its_manager_opens_no_connection(
    one_host: Host, tmp_path: Path
) -> None:
    with manager(tmp_path / "run") as saving:
        session = saving._session
        client = session._client()
        client.call("status", protocol.Empty(), protocol.AgentStatus)
    with pytest.raises(errors.AgentUnavailableError, match="the manager is closed"):
        session.call("status", protocol.Empty(), protocol.AgentStatus)
    with pytest.raises(AgentGoneError):
        client.call("status", protocol.Empty(), protocol.AgentStatus)
    assert session.sockets() == []
    assert client.fileno() is None


def test_a_save_that_is_being_filled_when_the_takeover_comes_is_not_committed(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = manager(run, ram=None)
    for step in range(5):
        # Large enough to be under way still when the other attempt begins.
        first.save(step, {"w": np.zeros(30_000_000), "n": step})
    second = manager(run, takeover=True, ram=None)
    origin = second.latest_step()
    # On a machine that is busy elsewhere all of them may be committed before the other one begins.
    with contextlib.suppress(errors.HoldfastError):
        first.close()
    second.save(100, {"w": np.zeros(3), "n": 100})
    second.close()
    committed = [e["step"] for e in events(run, "committed") if e["attempt"] == 1]
    started = await_events(run, "attempt_started", count=2)[1]["time"]
    late = [e for e in events(run, "committed") if e["attempt"] == 1 and e["time"] > started]
    assert all(e["step"] <= (origin if origin is not None else -1) for e in late), (committed, late)


def test_after_going_back_later_steps_are_an_abandoned_branch(
    one_host: Host, tmp_path: Path
) -> None:
    keep_all = preservation_policy.LatestN(100)
    run = tmp_path / "run"
    with manager(run, preservation_policy=keep_all) as first:
        for step in (50, 60, 70):
            first.save(step, state(step))
        first.wait_until_finished()
        assert first.all_steps() == [50, 60, 70]
        start, resumed = first.resume(state(0), step=50)
        assert (start, resumed["n"]) == (51, 50)
        assert first.latest_step() == 50
        assert first.all_steps() == [50]
        with pytest.raises(errors.StepNotFoundError, match="abandoned"):
            first.resume(state(0), step=60)
        assert first.save(55, state(55))
        first.wait_until_finished()
        assert first.all_steps() == [50, 55]
        names = folders(run)
        assert {"000000060.1", "000000070.1"} <= names
        assert first.save(61, state(61))
        first.wait_until_finished()
    expected = {"000000050.1", "000000055.2", "000000061.2", "000000070.1"}
    wait_until(lambda: folders(run) == expected)
    with manager(run, preservation_policy=keep_all) as second:
        start, resumed = second.resume(state(0))
        assert (start, resumed["n"]) == (62, 61)


def test_a_resume_without_a_checkpoint_starts_the_steps_again(
    one_host: Host, tmp_path: Path
) -> None:
    never = save_decision_policy.SpecificStepsPolicy([10**9])
    with manager(tmp_path / "run", save_decision_policy=never) as training:
        for step in range(10):
            assert not training.save(step, state(step))
        start, _ = training.resume(state(0))
        assert start == 0
        assert not training.save(0, state(0))
        assert training.save(1, state(1), force=True)
        training.wait_until_finished()
        training.delete(1)
        assert training.resume(state(0))[0] == 0
        assert training.save(1, state(2), force=True)
        training.wait_until_finished()
        assert training.all_steps() == [1]
    with manager(tmp_path / "run") as again:
        start, resumed = again.resume(state(9))
        assert (start, resumed["n"]) == (2, 2)


def test_a_deleted_step_is_saved_again_after_a_resume(one_host: Host, tmp_path: Path) -> None:
    with manager(tmp_path / "run") as training:
        for step in range(2):
            training.save(step, state(step))
        training.wait_until_finished()
        training.delete(1)
        assert training.resume(state(0))[0] == 1
        assert training.save(1, state(7))
        training.wait_until_finished()
        assert training.all_steps() == [0, 1]
        assert training.restore(1)["n"] == 7


def test_a_newest_step_that_was_deleted_is_saved_by_force_after_a_reopening(
    one_host: Host, tmp_path: Path
) -> None:
    with manager(tmp_path / "run") as training:
        for step in range(3):
            training.save(step, state(step))
    with manager(tmp_path / "run") as training:
        training.delete(2)
        assert training.save(2, state(7), force=True)
        training.wait_until_finished()
        assert training.all_steps() == [0, 1, 2]
        assert training.restore(2)["n"] == 7


def test_the_old_checkpoint_stays_until_the_forced_one_is_committed(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with manager(run) as saving:
        for step in range(3):
            saving.save(step, state(step))
        saving.wait_until_finished()
        assert saving.save(2, state(200), force=True)
        saving.wait_until_finished()
        assert saving.all_steps() == [0, 1, 2]
        assert saving.restore(2)["n"] == 200
        assert saving.save(3, state(3))
    wait_until(lambda: "000000002.1" not in folders(run))

    def of_step_2(name: str, attempt: int) -> list[dict]:
        found = events(run, name)
        return [event for event in found if (event["step"], event["attempt"]) == (2, attempt)]

    wait_until(lambda: of_step_2("committed", 2) and of_step_2("deleted", 1))
    assert of_step_2("committed", 2)[0]["time"] < of_step_2("deleted", 1)[0]["time"]


def test_a_step_whose_save_failed_is_saved_again_without_losing_the_earlier_ones(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with manager(run, ram=None) as saving:
        saving.save(0, state(0))
        saving.wait_until_finished()
        (run / "checkpoints").rename(tmp_path / "aside")
        (run / "checkpoints").write_text("in the way")
        saving.save(1, state(1))
        with pytest.raises(errors.SaveFailedError):
            saving.wait_until_finished()
        (run / "checkpoints").unlink()
        (tmp_path / "aside").rename(run / "checkpoints")
        assert saving.save(1, state(1), force=True)
        saving.wait_until_finished()
        assert saving.all_steps() == [0, 1]


def test_force_saves_a_step_that_no_policy_wants(one_host: Host, tmp_path: Path) -> None:
    never = save_decision_policy.SpecificStepsPolicy([10**9])
    with manager(tmp_path / "run", save_decision_policy=never) as saving:
        assert not saving.save(0, state(0))
        assert not saving.save(1, state(1))
        assert saving.save(2, state(2), force=True)
        saving.wait_until_finished()
        assert saving.all_steps() == [2]


def test_delete_removes_a_checkpoint_from_every_tier(one_host: Host, tmp_path: Path) -> None:
    with manager(tmp_path / "run") as saving:
        for step in range(3):
            saving.save(step, state(step))
        saving.wait_until_finished()
        saving.delete(1)
        assert saving.all_steps() == [0, 2]
        saving.delete(2)
        assert saving.latest_step() == 0
        with pytest.raises(errors.StepNotFoundError):
            saving.delete(1)


def test_an_attempt_whose_agent_was_killed_saves_on_with_another_agent(
    one_host: Host, tmp_path: Path
) -> None:
    with manager(tmp_path / "run") as saving:
        for step in range(10):
            if step in (3, 6):
                # The agent writes its events after it has started.
                await_events(tmp_path / "run", "agent_started", count=step // 3)
                one_host.kill_agent()
            # Forced, it waits for the new agent also on a machine that starts one slowly.
            assert saving.save(step, state(step), force=True)
        saving.wait_until_finished()
        assert saving.latest_step() == 9
    assert len(await_events(tmp_path / "run", "agent_started", count=3)) == 3


def test_the_agent_finishes_what_is_sealed_and_leaves_nothing_in_ram(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = {"ram": {"linger_secs": 0.3, "every": 1}, "interval": 10**9}
    trainer = one_host.start(
        TRAINER, run, 100000, json.dumps(options | {"sleep": 0.01}), stem="numpy"
    )
    wait_until(lambda: events(run, "sealed"))
    agent = one_host.agent()
    trainer.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_running(agent.pid))
    sealed = [e["step"] for e in events(run, "sealed")]
    committed = [e["step"] for e in events(run, "committed")]
    assert committed[-1] == sealed[-1]
    assert list(one_host.folder.iterdir()) == []
    again = one_host.start(TRAINER, run, sealed[-1] + 5, json.dumps(options), stem="numpy")
    first = json.loads(finished(again).splitlines()[0])
    assert first["start"] == sealed[-1] + 1
    assert set(first["sources"]) == {"durable"}


@pytest.mark.usefixtures("quick_tries")
def test_what_cannot_become_durable_stays_in_ram_for_the_next_agent(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ram = holdfast.RamTier(linger_secs=0)
    saving = manager(run, ram=ram)
    saving.save(0, state(0))
    saving.wait_until_finished()
    # A file where the folder should be: no checkpoint can be written any more.
    (run / "checkpoints").rename(tmp_path / "aside")
    (run / "checkpoints").write_text("in the way")
    saving.save(1, state(1))
    with pytest.raises(errors.SaveFailedError):
        saving.wait_until_finished()
    agent = one_host.agent()
    saving.close()
    wait_until(lambda: not is_running(agent.pid))
    (run / "checkpoints").unlink()
    (tmp_path / "aside").rename(run / "checkpoints")
    with manager(run, ram=ram) as again:
        assert again.resume(state(-1))[0] == 2
    wait_until(lambda: list(one_host.folder.iterdir()) == [])
    assert manifest_path(run, 1).exists()


def test_a_damaged_record_of_an_abandoned_attempt_does_no_harm(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with manager(run) as saving:
        saving.save(0, state(0))
        saving.save(1, state(1))
        saving.resume(state(0), step=0)
        saving.save(1, state(10))
        saving.resume(state(0), step=0)
        saving.save(1, state(100))
    for name in ("000000002.json", "000000002.copy.json"):
        (run / "attempts" / name).write_text("{")
    with manager(run) as again:
        assert again.resume(state(-1)) is not None
        assert again.restore(1)["n"] == 100
    (run / "attempts" / "000000001.json").write_text("{")
    with manager(run) as again:
        assert again.restore(1)["n"] == 100
    (run / "attempts" / "000000001.json").write_text("{")
    (run / "attempts" / "000000001.copy.json").write_text("{")
    # The agent that lingers has read the record; the next one has to.
    one_host.kill_agent()
    with pytest.raises(errors.CheckpointDamagedError, match=r"000000001\.json"):
        manager(run)


def test_a_manager_that_is_never_closed_still_seals_what_it_accepted(
    one_host: Host, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, numpy as np, holdfast\n"
        "manager = holdfast.CheckpointManager(sys.argv[1])\n"
        "assert manager.save(7, {'w': np.zeros(5_000_000)}, force=True)\n"
    )
    finished(one_host.start(script, tmp_path / "run", stem="numpy"))
    with manager(tmp_path / "run") as again:
        assert again.resume({"w": np.zeros(5_000_000)})[0] == 8


def test_what_an_abandoned_branch_left_in_ram_alone_is_given_up(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ram = holdfast.RamTier(save_decision_policy=EVERY_STEP, linger_secs=0.2)
    never = save_decision_policy.SpecificStepsPolicy([0])
    with manager(run, save_decision_policy=never, ram=ram) as saving:
        for step in range(4):
            saving.save(step, state(step))
        wait_until(lambda: saving.latest_step() == 3)
        assert saving.resume(state(-1), step=0)[1]["n"] == 0
        assert saving.latest_step() == 0
    wait_until(lambda: list(one_host.folder.iterdir()) == [])
    assert folders(run) == {"000000000.1"}


def test_memory_that_a_killed_agent_had_not_removed_yet_is_removed_by_the_next(
    one_host: Host, tmp_path: Path
) -> None:
    with manager(tmp_path / "run") as saving:
        saving.save(0, state(0))
    folder = Path(one_host.agent().folder)
    one_host.kill_agent()
    left = folder.with_name(f".{folder.name}.{2**22 + 1}")  # no process has so high a pid
    left.mkdir()
    (left / "slot").write_bytes(b"x")
    with manager(tmp_path / "run") as again:
        assert again.latest_step() == 0
        assert not left.exists()


def check_names_holder(told: str, pid: int) -> None:
    """Check that a refusal names the attempt and who has it, for how long, and what to do."""
    assert "RunBusyError" in told
    assert f"attempt 1 is live on host host-a (process {pid} of user {user_name()})" in told
    lease = re.search(r"valid for another (\d+) s; stop it first, or open with takeover", told)
    assert lease is not None
    assert 0 < int(lease[1]) <= 30


def contents(run: Path) -> dict[str, tuple[int, int]]:
    """The files of a run that no live attempt rewrites, with their sizes and times."""
    paths = [p for name in ("attempts", "checkpoints") for p in (run / name).rglob("*")]
    files = [p.stat() for p in (*paths, run / "holdfast.json") if p.is_file()]
    names = [str(p) for p in (*paths, run / "holdfast.json") if p.is_file()]
    return {n: (f.st_size, f.st_mtime_ns) for n, f in zip(names, files, strict=True)}


def test_a_start_on_the_same_host_with_another_ram_folder_is_refused_and_changes_nothing(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = json.dumps({"sleep": 0.01, "interval": 10**6})
    first = one_host.start(TRAINER, run, 100000, options, stem="numpy")
    first.stdout.readline()
    wait_until(lambda: manifest_path(run, 0).exists())
    wait_until(lambda: not [*run.rglob(".*.unfinished")])
    # As of a save that the first one is at.
    folder = run / "checkpoints" / "000090000.1"
    folder.mkdir(parents=True)
    (folder / "image-00000-of-00001.safetensors").write_bytes(b"bytes")
    before = contents(run)
    with host(one_host.name) as twin:
        second = twin.start(TRAINER, run, 1, json.dumps({}), stem="numpy")
        _, told = second.communicate(timeout=240)
        assert second.returncode != 0
        check_names_holder(told, first.pid)
        assert contents(run) == before
        first.stdout.readline()
        assert first.poll() is None
        assert len(await_events(run, "attempt_started", count=1)) == 1
        took_over = twin.start(TRAINER, run, 3, json.dumps({"takeover": True}), stem="numpy")
        _, told = took_over.communicate(timeout=240)
        assert took_over.returncode == 0, told
        assert len(await_events(run, "attempt_started", count=2)) == 2


def test_a_start_on_another_host_is_refused_while_the_first_trains_and_goes_on_once_it_has_ended(
    one_host: Host, two_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = one_host.start(TRAINER, run, 100000, json.dumps({"sleep": 0.01}), stem="numpy")
    first.stdout.readline()
    # As of a save that the first host is at.
    present = newest_attempt(DiskStore(run, SystemClock()))
    folder = run / checkpoint_folder(CheckpointId(90000, present))
    folder.mkdir(parents=True)
    (folder / "image-00000-of-00001.safetensors").write_bytes(b"bytes")
    other = two_hosts[1]
    second = other.start(TRAINER, run, 1, json.dumps({}), stem="numpy")
    _, told = second.communicate(timeout=240)
    assert second.returncode != 0
    assert [path.name for path in folder.iterdir()] == ["image-00000-of-00001.safetensors"]
    assert "RunBusyError" in told
    check_names_holder(told, first.pid)
    log = run / "events" / "agent-host-b.log"
    doubt = "attempt 1 of host host-a may be live"
    # A thread of the agent writes its log.
    wait_until(lambda: doubt in log.read_text())
    first.stdout.readline()
    assert first.poll() is None
    assert [e["host"] for e in await_events(run, "attempt_started", count=1)] == ["host-a"]

    refused_log = log.read_text()
    waiting = other.start(TRAINER, run, 100000, json.dumps({"sleep": 0.01}), stem="numpy")
    # It has listed the run, and does not know whether the first host's attempt lives.
    wait_until(lambda: doubt in log.read_text().removeprefix(refused_log))
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=240)
    line = waiting.stdout.readline()
    if not line:
        # On a busy machine the first has renewed its lease once more before it ended.
        assert "RunBusyError" in waiting.communicate()[1]
        waiting = other.start(TRAINER, run, 100000, json.dumps({"sleep": 0.01}), stem="numpy")
        line = waiting.stdout.readline()
    origin = json.loads(line)["start"] - 1
    committed = lambda: [e["step"] for e in events(run, "committed") if e["attempt"] == 1]  # noqa: E731
    wait_until(lambda: max(committed()) == origin)
    waiting.kill()


def test_a_start_on_another_host_waits_for_what_the_first_ones_agent_has_yet_to_store(
    one_host: Host, two_hosts: list[Host], tmp_path: Path
) -> None:
    options = {"sleep": 0.01, "interval": 10**6, "ram": {"every": 1, "linger_secs": 60}}
    with mounted("tmpfs", tmp_path / "disk", "size=8m") as disk:
        run, other = disk / "run", two_hosts[1]
        first = one_host.start(TRAINER, run, 100000, json.dumps(options), stem="numpy")
        wait_until(lambda: events(run, "committed"))
        filler = fill_up(disk)
        # Room for all but a part.
        os.truncate(filler, filler.stat().st_size - 500_000)
        wait_until(lambda: max(held.step for held in one_host.agent().held) > 10)
        first.kill()
        wait_until(lambda: not one_host.agent().trainers)
        newest = max(held.step for held in one_host.agent().held)
        second = other.start(TRAINER, run, 100000, json.dumps(options), stem="numpy")
        waits = "attempt 1 of host host-a has ended, and its agent, which serves its own host"
        log = run / "events" / "agent-host-b.log"
        wait_until(lambda: log.exists() and waits in log.read_text())
        shown = " ".join(command(other, "status", run).stdout.split())
        assert f"starting waits: {waits}" in shown
        assert "runs while trainers are attached" in shown
        filler.unlink()
        assert json.loads(second.stdout.readline())["start"] == newest + 1
        second.kill()
        # No lease is left once all is stored.
        (lease,) = [json.loads(path.read_text()) for path in run.glob("leases/*.json")]
        assert lease["host"] == "host-b"
        for each in (one_host, other):
            each.end()


@pytest.mark.soak
@pytest.mark.slow
def test_a_lost_host_is_taken_over_by_another_one_once_its_lease_has_run_out(
    one_host: Host, two_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = one_host.start(TRAINER, run, 100000, json.dumps({"sleep": 0.05}), stem="numpy")
    wait_until(lambda: events(run, "committed"))
    lost_at = time.monotonic()
    lose(one_host)
    committed = max(e["step"] for e in events(run, "committed"))
    second = two_hosts[1].start(TRAINER, run, committed + 5, json.dumps({}), stem="numpy")
    out, told = second.communicate(timeout=240)
    assert second.returncode == 0, told
    assert LEASE_SECS - 10 < time.monotonic() - lost_at < LEASE_SECS + 25
    assert json.loads(out.splitlines()[0])["start"] == committed + 1
    assert "its lease runs out in at most" in told
    assert "the run continues without checkpoints of attempt 1" in told
    assert first.poll() is not None


@pytest.mark.soak
def test_a_training_that_saves_to_ram_alone_ends_soon_after_a_takeover_elsewhere(
    one_host: Host, two_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = {"sleep": 0.05, "interval": 10**6, "ram": {"every": 1}}
    first = one_host.start(TRAINER, run, 100000, json.dumps(options), stem="numpy")
    wait_until(lambda: events(run, "committed"))
    takeover = json.dumps(options | {"takeover": True})
    second = two_hosts[1].start(TRAINER, run, 100000, takeover, stem="numpy")
    _, told = first.communicate(timeout=240)
    assert "FencedError" in told
    assert second.poll() is None


@pytest.mark.soak
def test_a_run_that_was_closed_is_opened_on_another_host_without_a_wait(
    one_host: Host, two_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finished(one_host.start(TRAINER, run, 3, json.dumps({}), stem="numpy"))
    assert not list(run.glob("leases/*"))
    finished(two_hosts[1].start(TRAINER, run, 5, json.dumps({}), stem="numpy"))
    assert [e["host"] for e in await_events(run, "attempt_started", count=2)] == [
        "host-a",
        "host-b",
    ]
    assert "may be live" not in (run / "events" / "agent-host-b.log").read_text()
