"""`holdfast rm` and `holdfast clean`: what they remove, and what they leave alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from holdfast.cli.main import main
from tests.cli.command_line import (
    answer,
    await_line,
    holdfast,
    kill_all,
    start_training,
    train,
)
from tests.hosts import Host, events, is_running, wait_until
from tests.manifests import folders
from tests.trust.in_process import InProcessHost, in_process_host


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InProcessHost:
    """A run with steps 1 and 2, whose agent and trainers are gone."""
    monkeypatch.setenv("HOLDFAST_RAM", str(tmp_path / "none"))
    with in_process_host(tmp_path) as host:
        host.start_agent()
        trainer = host.attach()
        for step in (1, 2):
            host.save(trainer, step)
            host.settle()
        host.detach(trainer)
        host.settle()
    return host


def steps(run: Path) -> list[str]:
    return sorted(folders(run))


def test_rm_removes_itself_what_an_agent_that_left_meanwhile_has_not_removed(
    ended: InProcessHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The agent's folder was found, and is gone when the agent is asked.
    monkeypatch.setattr("holdfast.cli.rm.find_live_agent", lambda *_: tmp_path / "left")
    assert main(["rm", str(ended.run), "1", "--yes"]) == 0
    assert steps(ended.run) == ["000000002.1"]


def test_rm_removes_the_steps_that_are_named(
    ended: InProcessHost, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(ended.run)
    assert main(["ls", run, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"][0]
    assert main(["rm", run, "1", "--dry-run"]) == 0
    assert steps(ended.run) == ["000000001.1", "000000002.1"]
    shown = capsys.readouterr().out
    assert shown.startswith("step 1 (attempt 1): ")
    assert shown.endswith(" in durable\n")
    assert main(["rm", run, "1", "--yes", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    removed = document["checkpoints"][0]
    assert (document["removed"], removed["step"]) == (True, 1)
    assert (removed["written_bytes"], removed["tiers"]) == (
        listed["written_bytes"],
        listed["tiers"],
    )
    assert steps(ended.run) == ["000000002.1"]
    # No agent runs that could report it.
    (event,) = events(ended.run, "deleted")
    assert (event["step"], event["attempt"], event["reason"]) == (1, 1, "asked")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["7"], "step 7"), (["--attempt", "9"], "step 1 of attempt 9")],
)
def test_rm_names_what_there_is_not_and_removes_nothing(
    ended: InProcessHost, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(["rm", str(ended.run), "1", *arguments, "--yes", "--json"]) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["error"] == "StepNotFoundError"
    assert named in document["message"]
    assert document["message"].endswith("; nothing was removed")
    assert captured.err.startswith("error: ")
    assert steps(ended.run) == ["000000001.1", "000000002.1"]


def test_rm_asks_and_where_it_cannot_ask_removes_nothing(
    ended: InProcessHost, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rm", str(ended.run), "1"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert steps(ended.run) == ["000000001.1", "000000002.1"]


def test_rm_is_refused_beside_a_trainer_on_another_host(
    ended: InProcessHost, capsys: pytest.CaptureFixture[str]
) -> None:
    leases = ended.run / "leases"
    leases.mkdir(exist_ok=True)
    (leases / "000000001.json").write_text("not read")
    assert main(["rm", str(ended.run), "1", "--yes"]) == 1
    assert "attempt 1 is live on host" in capsys.readouterr().err
    assert steps(ended.run) == ["000000001.1", "000000002.1"]


def test_rm_beside_a_live_run_and_clean_of_what_is_left(one_host: Host, tmp_path: Path) -> None:
    live_run, idle_run, left_run = (tmp_path / name for name in ("live", "idle", "left"))
    # `clean` shall not find what other tests have just killed.
    one_host.variables["TMPDIR"] = str(tmp_path)
    live = start_training(one_host, live_run, steps=10**6, sleep=0.02, every=1000)
    await_line(live, "1")
    answer(one_host, "save", live_run)
    holdfast(one_host, "rm", live_run, "0", "--yes")
    assert "000000000.1" not in steps(live_run)
    await_line(live, "2")

    own = one_host.agent()
    train(one_host, idle_run, steps=2, lost=True, linger=600)
    # Its agent has to see that the trainer is gone, and that all is durable.
    wait_until(lambda: any(agent.leaves_in_secs is not None for agent in one_host.agents()))
    found = answer(one_host, "clean", "--yes")
    (row,) = found["found"]
    assert str(idle_run) in row["reason"]
    assert row["size_bytes"] > 64 * 32 * 4
    assert not is_running(row["pid"])
    assert not Path(row["folder"]).exists()
    # The live run is as it was.
    assert one_host.agent().pid == own.pid
    live.kill()
    live.wait()
    wait_until(lambda: not one_host.agent().trainers)
    assert answer(one_host, "stop", live_run)["problems"] == []

    kill_all(one_host, start_training(one_host, left_run, steps=3, every=9, ram_every=1, leave=600))
    (row,) = answer(one_host, "clean", "--yes")["found"]
    assert "step 2 may not be durable" in row["kept_for"]
    assert Path(row["folder"]).exists()
    shutil.rmtree(left_run)
    # It may have been moved.
    (row,) = answer(one_host, "clean", "--yes")["found"]
    assert "step 2 may be in RAM alone" in row["kept_for"]
    assert Path(row["folder"]).exists()
    answer(one_host, "clean", "--all", "--yes")
    wait_until(lambda: list(one_host.folder.iterdir()) == [])
