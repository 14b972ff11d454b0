"""Commands that talk to live agents."""

import signal
import time
from contextlib import closing
from pathlib import Path

from holdfast.host.wire.agent_directory import WORDS
from holdfast.host.wire.control_block import TARGET_DURABLE, ControlBlock, met_cell, met_step
from tests.cli.command_line import (
    INTERRUPTIBLE,
    answer,
    await_line,
    holdfast,
    start_training,
    train,
)
from tests.hosts import Host, events, is_running, wait_until


def test_status_tells_of_two_agents(one_host: Host, tmp_path: Path) -> None:
    train(one_host, tmp_path / "one", steps=2, lost=True, linger=600)
    live = start_training(one_host, tmp_path / "two", steps=10**6, sleep=0.01, every=1000)
    await_line(live, "1")
    # The room of the first save in RAM is reserved beside the training.
    wait_until(lambda: answer(one_host, "status")["agents"][1]["ram_bytes"] > 0)
    one, two = answer(one_host, "status")["agents"]
    assert (one["run"], two["run"]) == (str(tmp_path / "one"), str(tmp_path / "two"))
    assert one["pid"] != two["pid"]
    assert one["trainers"] == []
    assert one["leaves_in_secs"] > 0
    assert [held["step"] for held in one["held"]] == [1]
    (trainer,) = two["trainers"]
    assert (trainer["rank"], trainer["pid"]) == (0, live.pid)
    assert trainer["step"] >= 1
    assert two["leaves_in_secs"] is None
    first, second = answer(one_host, "status")["runs"]
    assert (first["run"], second["run"]) == (one["run"], two["run"])
    assert first["goes_on_from"] == [{"lost_domains_max": None, "step": 1, "attempt": 1}]
    assert [(h["host"], h["pid"], h["problem"]) for h in second["hosts"]] == [
        ("host-a", two["pid"], "")
    ]
    out = holdfast(one_host, "status", tmp_path / "two").stdout
    assert str(tmp_path / "one") not in out
    assert f"rank 0: process {live.pid}, at step" in out
    assert all(len(line) <= 100 for line in out.splitlines())
    # Of a run on one host nothing is told of hosts.
    assert "survives" not in out
    assert out.startswith("run ")

    # Which of the two is to be stopped has to be said, and not while its trainer lives.
    assert "name a DIR, or --all" in holdfast(one_host, "stop", code=2).stderr
    both = answer(one_host, "stop", "--all", code=1)
    assert [agent["run"] for agent in both["stopped"]] == [str(tmp_path / "one")]
    assert [agent["run"] for agent in both["problems"]] == [str(tmp_path / "two")]
    assert not is_running(one["pid"])
    assert is_running(two["pid"])


def test_stop_waits_until_the_agent_has_left(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(one_host, run, steps=3, every=1000, ram_every=1, leave=0.1, linger=600)
    agent = one_host.agent()
    # A busy machine may have dropped the save of a later step.
    newest = max(held.step for held in agent.held)
    stopped = answer(one_host, "stop")["stopped"]
    assert stopped == [{"run": str(run), "pid": agent.pid, "folder": agent.folder}]
    assert not is_running(agent.pid)
    assert not Path(agent.folder).exists()
    # What stood in RAM alone was made durable first.
    assert answer(one_host, "ls", run)["latest_step"] == newest
    assert "no agent to stop" in holdfast(one_host, "stop").stdout
    assert "no agents on this host" in holdfast(one_host, "status").stdout


def test_save_asks_a_live_trainer_and_waits(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    live = start_training(one_host, run, steps=10**6, sleep=0.02, every=100_000)
    await_line(live, "1")
    wait_until(lambda: answer(one_host, "ls", run)["latest_step"] == 0)
    saved = answer(one_host, "save", run)
    assert saved["committed"]
    assert saved["step"] >= saved["target_step"] > 1
    with closing(ControlBlock(Path(one_host.agent().folder) / WORDS)) as control:
        met = control.cells[met_cell(0)]
    assert met_step(met, TARGET_DURABLE) == saved["step"]
    after = {row["step"] for row in answer(one_host, "ls", run)["checkpoints"]}
    assert after == {0, saved["step"]}
    asked = answer(one_host, "save", run, "--no-wait")
    assert (asked["committed"], asked["step"]) == (False, None)
    assert asked["target_step"] > saved["step"]
    assert str(live.pid) in holdfast(one_host, "stop", run, code=1).stderr
    live.kill()
    live.wait(timeout=240)
    wait_until(lambda: not one_host.agent().trainers)
    assert "no trainer works on it" in holdfast(one_host, "save", run, code=1).stderr


def test_save_ends_with_its_time_with_its_trainers_and_with_ctrl_c(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    live = start_training(one_host, run, steps=2, leave=1000, every=100_000)
    await_line(live, "1")
    done = holdfast(one_host, "save", run, "--timeout", "0.2", code=1)
    assert "within 0.2 s" in done.stderr

    waiting = one_host.start("-c", INTERRUPTIBLE, "save", run, "--json", stem="commands")
    _await_request(run)
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=240)
    assert waiting.returncode == 130
    assert out == ""
    assert "Traceback" not in err

    waiting = one_host.start("-m", "holdfast", "save", run, stem="commands")
    _await_request(run)
    live.kill()
    _, err = waiting.communicate(timeout=240)
    assert waiting.returncode == 1
    assert "its trainers ended before they reached step 2" in err


def _await_request(run: Path) -> None:
    """Waits for one more `save` to have reached the agent."""
    seen = _requests(run)
    wait_until(lambda: _requests(run) > seen)
    # It is in the events before its answer is written.
    time.sleep(0.1)


def _requests(run: Path) -> int:
    return len(events(run, "save_requested"))
