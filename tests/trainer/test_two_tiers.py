"""Runs with a remote tier, a second directory here, whose agents run.

What starts, readers and commands make of two tiers is in `test_written_tiers.py`; what one agent
does with them is in tests/host/tiers/test_mirroring.py, and what several do in tests/coordination.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import CheckpointManager, RemoteTier
from holdfast.adapt.contract import OwnProcess
from holdfast.cli.main import main
from holdfast.clock import SystemClock
from holdfast.errors import (
    AgentUnavailableError,
    InvalidArgumentError,
    RunBusyError,
)
from holdfast.policy.save_decision_policy import ContinuousCheckpointingPolicy
from holdfast.trainer.opening.opening import open_run
from holdfast.trainer.ranks.rendezvous import Rendezvous
from tests.hosts import Host, await_events, host, wait_until
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
    return Said(one.start(TRAINER, scratch, remote, json.dumps(options), stem="numpy"))


def test_a_lost_fast_tier_goes_on_from_the_remote_one_as_the_same_run(
    tiers: Tiers, one_host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers.train(4, copies_each=True)
    stopped(one_host, tiers.fast)
    run_id = tiers.record(tiers.fast).run_id
    shutil.rmtree(tiers.fast)
    with tiers.manager() as manager:
        first, state = manager.resume(state_of(-1))
        assert (first, manager.last_restore.sources.keys()) == (4, {"remote"})
        assert np.array_equal(state["w"], state_of(3)["w"])
        assert manager.all_steps() == [1, 2, 3]
        manager.save(4, state_of(4))
        with pytest.raises(InvalidArgumentError, match="timeout_secs"):
            manager.wait_until_finished(-1, remote=True)
        manager.wait_until_finished(30, remote=True)
        assert steps_in(tiers.remote)[-1] == 4
        assert main(["rm", str(tiers.remote), "3", "--yes"]) == 1
        assert f"holdfast rm {tiers.fast} STEP" in capsys.readouterr().err
    assert tiers.record(tiers.fast).run_id == run_id
    tiers.check_alike()
    stopped(one_host, tiers.fast)
    # The events of both attempts are in both tiers, also those that were lost with the directory.
    for place in (tiers.fast, tiers.remote):
        capsys.readouterr()
        assert main(["events", str(place), "--kind", "committed", "--json"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4]


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
    job = one_host.start(LONE_TRAINER, tiers.fast, stem="numpy")
    Said(job).await_line("sealed")
    one_host.kill_with_agent(job)
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


def test_a_place_in_the_runs_directory_is_no_remote_tier(tiers: Tiers) -> None:
    for place in (tiers.fast, tiers.fast / "remote", tiers.fast.parent):
        with pytest.raises(InvalidArgumentError, match="at another place"):
            CheckpointManager(tiers.fast, remote=place)
    assert not tiers.fast.exists()


def test_processes_with_different_remote_tiers_are_told(tmp_path: Path) -> None:
    class Job(Rendezvous):
        def decide(self, name, value, judge, *rest):
            return judge([value, "s3://other/run"])

    job = Job(OwnProcess(), SystemClock())
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


def test_a_directory_deleted_under_a_training_ends_it_and_the_remote_tier_goes_on(
    tiers: Tiers, one_host: Host
) -> None:
    trainer = start((one_host, tiers.fast), tiers.remote, steps=10**6, sleep=0.05)
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
    kept = re.search(r"RAM .* keeps .*\b(\d+), which may be nowhere else", told)
    # What was saved until it was told of that stays too.
    assert kept is not None
    assert newest < int(kept[1]) <= first - 1
    tiers.check_alike()


def test_of_two_starts_that_share_the_remote_tier_alone_exactly_one_wins(
    two_machines: list[tuple[Host, Path]], tmp_path: Path
) -> None:
    remote = tmp_path / "remote"
    both = [start(machine, remote, steps=10**6, sleep=0.05) for machine in two_machines]
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


def test_each_host_uploads_its_own_parts_and_new_hosts_go_on_from_them(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    run, remote = tmp_path / "run", tmp_path / "remote"
    job = start_job(two_hosts, run, steps=9, interval=4, remote=str(remote))
    job.results()
    wait_until(lambda: steps_in(remote)[-1:] == [8])
    uploaded = await_events(run, "uploaded", count=1)
    assert {event["hosts"] for event in uploaded} == {2}
    assert main(["verify", str(remote)]) == 0
    lose(*two_hosts)
    shutil.rmtree(run)
    check_went_on(run_job(two_hosts, run, steps=1, interval=4, remote=str(remote)), 8)
    await_events(run, "restored", count=2)
    assert sources(run).keys() == {"remote"}
