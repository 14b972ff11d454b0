"""Commands that fail, as `holdfast run` classifies and restarts them: real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command_line import answer, holdfast
from tests.hosts import Host, await_events
from tests.trust.cgroups import memory_cgroup

TRAINER = Path(__file__).with_name("faulty_trainer.py")


def faulty(run: Path, **options: object) -> list[str]:
    """The command that trains and fails."""
    return [sys.executable, str(TRAINER), str(run), json.dumps({"steps": 12} | options)]


def supervise(
    host: Host, *arguments: object, command: list[str]
) -> subprocess.CompletedProcess[str]:
    """Runs a command under `holdfast run` to its end."""
    words = ("-m", "holdfast", "run", *arguments, "--", *command)
    process = host.start(*words, stem="commands")
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def ends(run: Path, count: int) -> list[tuple[str, int, float | None]]:
    """The class, the exit code and the decision of each recorded end, once there are so many."""
    return [
        (event["cause"], event["code"], event["restart_in_secs"])
        for event in await_events(run, "command_ended", count=count)
    ]


def test_each_end_is_classified_recorded_and_decided(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    faults = [[0, 3, "SIGKILL"], [1, 5, "own NaN check"], [2, 7, "full disk"], [3, 9, "exit code"]]
    command = faulty(run, faults=[*faults, [None, 10, "exception"]])
    budgets = "killed=1,nan=1,disk=1,error=9"
    done = supervise(one_host, "--max-restarts", budgets, command=command)
    assert done.returncode == 1
    assert ends(run, 6) == [
        ("killed", 137, 0.0),
        ("nan", 1, 0.0),
        ("disk", 1, 0.0),
        ("error", 3, 0.0),
        ("error", 1, 0.0),
        ("error", 1, None),
    ]
    killed = "exit code 137; restart 1 of 1 (killed) at once; killed: ended by SIGKILL"
    assert killed in done.stderr
    assert "nan: rank 0: RuntimeError: loss is NaN" in done.stderr
    assert f"({TRAINER}:" in done.stderr
    assert "not restarted: it failed twice alike in the step after step 9: mend the" in done.stderr
    assert "ValueError: bad batch" in done.stderr.splitlines()[-1]
    assert "6 attempts, 6 failures" in holdfast(one_host, "report", run).stdout
    shown = answer(one_host, "report", run)["ends"]
    assert [end["cause"] for end in shown] == ["killed", "nan", "disk", *["error"] * 3]
    last_end = answer(one_host, "status", run)["last_end"]
    assert (last_end["cause"], last_end["restarts"]) == ("error", 5)


def test_an_end_is_recorded_where_no_agent_lives_too(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code = (
        "import holdfast, os, numpy as np\n"
        f"m = holdfast.CheckpointManager({str(run)!r}, ram=None, framework='numpy')\n"
        "m.save(0, {'w': np.zeros(3)}); m.close(); raise ValueError('after the end')\n"
    )
    done = supervise(one_host, command=[sys.executable, "-c", code])
    assert done.returncode == 1
    (end,) = await_events(run, "command_ended", count=1)
    assert (end["cause"], end["run_attempt"]) == ("error", 1)
    assert end["reason"].startswith("rank 0: ValueError: after the end")


@pytest.mark.slow
def test_hangs_are_found_their_stacks_are_kept_and_it_goes_on(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ["--max-restarts", "hang=2", "--hang-timeout", 6]
    command = faulty(run, faults=[[0, 5, "data"], [1, 8, "interpreter lock"]])
    done = supervise(one_host, *options, command=command)
    assert done.returncode == 0, done.stderr
    found = await_events(run, "command_ended", count=2)
    for end, step in zip(found, (4, 7), strict=True):
        assert (end["cause"], end["last_step"], end["restart_in_secs"]) == ("hang", step, 0.0)
        shown = rf"hang: no step for \d+ s, more than 6 s, after step {step}"
        assert re.search(shown, done.stderr), done.stderr
        stacks = Path(end["stacks"]).read_text()
        assert "Current thread" in stacks
        assert "faulty_trainer.py" in stacks
    assert "faulty_trainer.py" in done.stderr
    assert answer(one_host, "ls", run)["latest_step"] == 11


def test_a_process_that_the_kernel_kills_for_memory_is_out_of_memory(one_host: Host) -> None:
    command = [sys.executable, "-c", "x = b'x' * (1 << 30)"]
    with memory_cgroup() as group:
        group.set_limit(300 << 20)
        entering = f'echo $$ > {group.folder}/cgroup.procs && exec "$@"'
        words = [sys.executable, "-m", "holdfast", "run", "--max-restarts", "nan=1", "--"]
        done = subprocess.run(
            ["sh", "-c", entering, "sh", *words, *command],
            env=one_host.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert group.kills() == 1
    assert done.returncode == 137
    assert "memory: out of memory: the kernel" in done.stderr


def test_a_stopped_process_is_named_and_not_killed(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("run", "--max-restarts", "3", "--hang-timeout", "3", "--")
    command = faulty(run, faults=[[0, 5, "stopped"]])
    process = one_host.start("-m", "holdfast", *words, *command, stem="commands")
    assert process.stderr is not None
    while "it is no hang" not in (line := process.stderr.readline()):
        assert line
    (trainer,) = one_host.agent().trainers
    os.kill(trainer.pid, signal.SIGCONT)
    _, err = process.communicate(timeout=240)
    assert (process.returncode, "restart" in err) == (0, False)


WORKER = """
import os, signal, sys, time
import torch
import holdfast
torch.distributed.init_process_group("gloo")
state = {"w": torch.zeros(4)}
with holdfast.CheckpointManager(sys.argv[1]) as manager:
    start, _ = manager.resume(state)
    for step in range(start, 12):
        # Without a collective, so that the other one learns of the loss by a signal alone.
        time.sleep(0.2)
        state["w"] += 1
        is_first = os.environ["HOLDFAST_RESTART_COUNT"] == "0"
        if step == 4 and os.environ["RANK"] == "1" and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        manager.save(step, state)
        if manager.reached_preemption(step):
            break
    else:
        manager.finish(11, state)
        print(float(state["w"][0]), flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.soak
def test_a_rank_that_was_killed_is_no_preemption_though_torchrun_ends_the_others_by_sigterm(
    one_host: Host, tmp_path: Path
) -> None:
    program, run = tmp_path / "worker.py", tmp_path / "run"
    program.write_text(WORKER)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--max-restarts", "killed=1", "--preempted-code", "75"]
    command = [sys.executable, *torchrun, str(program), str(run)]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = one_host.start("-m", "holdfast", "run", *options, "--", *command, **variables)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    assert out.split() == ["12.0", "12.0"]
    (end,) = await_events(run, "command_ended", count=1)
    assert end["cause"] == "killed"


@pytest.mark.soak
def test_the_rank_that_keeps_others_in_a_collective_is_named_and_the_job_goes_on(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    program = Path(__file__).with_name("collective_trainer.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *torchrun, str(program), str(run), '[[0, 1, 5, "wait"]]']
    options = ["--max-restarts", "hang=1", "--hang-timeout", "10"]
    process = one_host.start("-m", "holdfast", "run", *options, "--", *command)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    assert out.count("w 24.0") == 2
    assert "after step 4; behind: rank 1 (step 4); stacks: " in err
    (end,) = await_events(run, "command_ended", count=1)
    assert (end["cause"], end["last_step"]) == ("hang", 4)
    assert "all_reduce" in Path(end["stacks"]).read_text()
