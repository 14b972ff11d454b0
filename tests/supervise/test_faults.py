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
from tests.hosts import Host, events
from tests.trust.cgroups import memory_cgroup

TRAINER = Path(__file__).with_name("faulty_trainer.py")


def faulty(run: Path, **options: object) -> list[str]:
    """The command that trains and fails."""
    return [sys.executable, str(TRAINER), str(run), json.dumps({"steps": 12} | options)]


def supervise(
    host: Host, run: Path, *arguments: object, **options: object
) -> subprocess.CompletedProcess[str]:
    """Trains under `holdfast run` to its end."""
    words = map(str, ("-m", "holdfast", "run", *arguments, "--", *faulty(run, **options)))
    return subprocess.run(
        [sys.executable, *words],
        env=host.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def ends(run: Path) -> list[tuple[str, int, float | None]]:
    """The class, the exit code and the decision of each recorded end."""
    return [
        (event["cause"], event["code"], event["restart_in_secs"])
        for event in events(run, "command_ended")
    ]


def test_each_end_is_classified_and_recorded_and_progress_restarts_at_once(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    faults = [[0, 3, "SIGKILL"], [1, 5, "own NaN check"], [2, 7, "full disk"], [3, 9, "exit code"]]
    done = supervise(one_host, run, "--max-restarts", 4, faults=faults)
    assert done.returncode == 0, done.stderr
    recorded = ends(run)
    causes = [(cause, code) for cause, code, _ in recorded]
    assert causes == [("killed", 137), ("nan", 1), ("disk", 1), ("error", 3)]
    # An agent that gets no processor has not sealed what a start has saved, when that ends.
    assert {secs for *_, secs in recorded} <= {0.0, 0.5}
    assert recorded[0][2] == 0.0
    assert "exit code 137; restart 1 of 4 at once; killed: ended by SIGKILL" in done.stderr
    assert "nan: rank 0: RuntimeError: loss is NaN" in done.stderr
    assert f"({TRAINER}:" in done.stderr
    holdfast(one_host, "report", run)
    shown = answer(one_host, "report", run)["ends"]
    assert [end["cause"] for end in shown] == ["killed", "nan", "disk", "error"]
    last_end = answer(one_host, "status", run)["last_end"]
    assert (last_end["cause"], last_end["restarts"]) == ("error", 3)
    assert "exit code" not in holdfast(one_host, "status", run).stderr


def test_the_same_exception_at_the_same_step_twice_is_not_restarted(
    one_host: Host, tmp_path: Path
) -> None:
    done = supervise(
        one_host, tmp_path / "run", "--max-restarts", 9, faults=[[None, 4, "exception"]]
    )
    assert done.returncode == 1
    assert done.stderr.count("holdfast run: exit code 1;") == 2
    assert "not restarted: it failed twice alike in the step after step 3: mend the" in done.stderr
    assert "ValueError: bad batch" in done.stderr.splitlines()[-1]


def test_two_ends_without_a_new_checkpoint_are_not_restarted_and_an_own_class_has_its_budget(
    one_host: Host, tmp_path: Path
) -> None:
    done = supervise(
        one_host, tmp_path / "run", "--max-restarts", 9, faults=[[None, 4, "SIGKILL"]], every=99
    )
    assert done.returncode == 137
    # Step 0 is a new checkpoint of the first start.
    decisions = [secs for _, _, secs in ends(tmp_path / "run")]
    assert decisions == [0.0, 0.5, None]
    assert "2 attempts in a row ended without a new checkpoint" in done.stderr
    budgets = "lost=inf,error=3"
    done = supervise(
        one_host, tmp_path / "own", "--max-restarts", budgets, faults=[[0, 4, "SIGKILL"]]
    )
    assert "not restarted: --max-restarts gives no restart for `killed`" in done.stderr


def test_an_end_is_recorded_where_no_agent_lives_too(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code = (
        "import holdfast, os, numpy as np\n"
        f"m = holdfast.CheckpointManager({str(run)!r}, ram=None, framework='numpy')\n"
        "m.save(0, {'w': np.zeros(3)}); m.close(); raise ValueError('after the end')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "run", "--", *command],
        env=one_host.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    (end,) = events(run, "command_ended")
    assert (end["cause"], end["run_attempt"]) == ("error", 1)
    assert end["reason"].startswith("rank 0: ValueError: after the end")


@pytest.mark.parametrize("kind", ["lock", "interpreter lock", "loader's worker", "data"])
def test_a_hang_is_found_in_time_its_stacks_are_kept_and_it_goes_on(
    one_host: Host, tmp_path: Path, kind: str
) -> None:
    run = tmp_path / "run"
    arguments = ["--max-restarts", "hang=1", "--hang-timeout", 6]
    done = supervise(one_host, run, *arguments, faults=[[0, 5, kind]])
    assert done.returncode == 0, done.stderr
    (end,) = events(run, "command_ended")
    assert (end["cause"], end["last_step"], end["restart_in_secs"]) == ("hang", 4, 0.0)
    gap = re.search(r"hang: no step for (\d+) s, more than 6 s, after step 4", done.stderr)
    assert gap is not None, done.stderr
    assert int(gap[1]) <= 8
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
        words = [sys.executable, "-m", "holdfast", "run", "--max-restarts", "memory=1", "--"]
        done = subprocess.run(
            ["sh", "-c", entering, "sh", *words, *command],
            env=one_host.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert group.kills() == 2
    assert done.returncode == 137
    assert "restart 1 of 1 (memory) in 0.5 s; memory: out of memory: the kernel" in done.stderr


def test_a_stopped_process_is_named_and_not_killed(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("run", "--max-restarts", "3", "--hang-timeout", "3", "--")
    command = faulty(run, faults=[[0, 5, "stopped"]])
    process = one_host.start("-m", "holdfast", *words, *command)
    assert process.stderr is not None
    while "it is no hang" not in (line := process.stderr.readline()):
        assert line
    (trainer,) = one_host.agent().trainers
    os.kill(trainer.pid, signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, "restart" in err) == (0, False)


def test_slow_steps_and_slow_saves_are_no_hang(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = supervise(one_host, run, "--hang-timeout", 4, steps=5, sleep=2)
    assert (done.returncode, "hang:" in done.stderr) == (0, False), done.stderr


def test_the_rank_that_keeps_others_in_a_collective_is_named_and_the_job_goes_on(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    program = Path(__file__).with_name("collective_trainer.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *torchrun, str(program), str(run), "5"]
    options = ["--max-restarts", "hang=1", "--hang-timeout", "10"]
    process = one_host.start("-m", "holdfast", "run", *options, "--", *command)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    assert out.count("w 24.0") == 2
    assert "after step 4; behind: rank 1 (step 4); stacks: " in err
    (end,) = events(run, "command_ended")
    assert (end["cause"], end["last_step"]) == ("hang", 4)
    assert "all_reduce" in Path(end["stacks"]).read_text()
