import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.cli.command_line import (
    INTERRUPTIBLE,
    answer,
    await_line,
    holdfast,
    kill_all,
    start_training,
    train,
    training,
)
from tests.hosts import Host, await_events, events, is_running, stop, wait_until
from tests.manifests import manifest_path

FAILING = "import os, sys; n = os.environ['HOLDFAST_RESTART_COUNT']; print(n); sys.exit({0})"
WAITING = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.{0}, lambda *_: sys.exit({1}))\n"
    "print(os.getpid(), flush=True)\n"
    "for _ in range(1200): time.sleep(0.05)\n"
)
"""Waits a minute for a signal. One that comes just before a sleep is seen only after it."""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "expected"),
    [("pass", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_exit_code_is_the_commands(one_host: Host, code: str, expected: int) -> None:
    holdfast(one_host, "run", "--", *python(code), code=expected)


def test_its_output_and_arguments_are_the_commands_own(one_host: Host) -> None:
    code = "import sys; print(sys.argv[1:])"
    done = holdfast(one_host, "run", *python(code), "--json", "--", "-x")
    assert done.stdout == "['--json', '--', '-x']\n"
    assert done.stderr == ""


def test_a_command_that_is_not_there_is_127(one_host: Host, tmp_path: Path) -> None:
    done = holdfast(one_host, "run", "--max-restarts", "5", "--", "no-such-command", code=127)
    assert done.stderr == "error: run no-such-command: command not found\n"
    assert "Permission denied" in holdfast(one_host, "run", tmp_path, code=126).stderr
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter")
    script.chmod(0o755)
    done = holdfast(one_host, "run", "--", script, code=127)
    assert done.stderr == f"error: run {script}: the interpreter of its first line is not there\n"


def test_a_command_that_fails_is_restarted_as_often_as_asked(one_host: Host) -> None:
    always = python(FAILING.format("5"))
    done = holdfast(one_host, "run", "--max-restarts", "2", "--", *always, code=5)
    assert done.stdout.split() == ["0", "1", "2"]
    assert done.stderr.count("exit code 5; restart") == 2
    once = python(FAILING.format("n == '0'"))
    done = holdfast(one_host, "run", "--max-restarts", "5", "--", *once)
    assert done.stdout.split() == ["0", "1"]


def test_a_restart_finds_nothing_of_the_first_start_alive(one_host: Host, tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys\n"
        "if os.environ['HOLDFAST_RESTART_COUNT'] == '0':\n"
        "    left = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)\n"
        "    print(left.pid, flush=True)\n"
        "    os._exit(1)\n"
    )
    done = holdfast(one_host, "run", "--max-restarts", "1", "--", *python(code))
    assert not is_running(int(done.stdout))


def test_a_restart_finds_no_trainer_alive_whose_launcher_was_killed(
    one_host: Host, tmp_path: Path
) -> None:
    # As torchrun does: each of its workers has a session of its own.
    code = (
        "import os, subprocess, time\n"
        "if os.environ['HOLDFAST_RESTART_COUNT'] == '0':\n"
        f"    lines = open({str(tmp_path / 'lines')!r}, 'w+')\n"
        f"    worker = subprocess.Popen({training(tmp_path / 'run', steps=10**6, sleep=0.02)},\n"
        "        start_new_session=True, stdout=lines, stderr=lines)\n"
        "    while '\\n3\\n' not in open(lines.name).read(): time.sleep(0.01)\n"
        "    print(worker.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = holdfast(one_host, "run", "--max-restarts", "1", "--", *python(code))
    worker = int(done.stdout)
    try:
        assert not is_running(worker)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_signals_are_passed_on(one_host: Host, name: str) -> None:
    command = ["run", "--max-restarts", "3", "--", *python(WAITING.format(name, 0))]
    process = one_host.start("-c", INTERRUPTIBLE, *command, stem="commands")
    await_line(process, "")
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (0, "")


def test_a_command_that_was_told_to_end_is_not_restarted(one_host: Host) -> None:
    for code, number, expected in [
        (WAITING.format("SIGTERM", 9), signal.SIGTERM, 9),
        ("import time; print(1, flush=True); time.sleep(60)", signal.SIGTERM, 143),
        ("import time; print(1, flush=True); time.sleep(60)", signal.SIGUSR1, 138),
    ]:
        command = ["run", "--max-restarts", "3", "--", *python(code)]
        process = one_host.start("-m", "holdfast", *command, stem="commands")
        await_line(process, "")
        process.send_signal(number)
        _, err = process.communicate(timeout=240)
        assert (process.returncode, err) == (expected, "")


def test_a_finished_training_is_0_and_a_preempted_one_the_code_that_was_asked_for(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = ["run", "--preempted-code", "75", "--max-restarts", "2", "--"]
    endless = training(run, steps=10**6, sleep=0.02, every=10**6, ram_every=10**6, finish=1)
    # The notice reaches `holdfast run`, and then the trainer alone, as from another host.
    for is_forwarded in (True, False):
        process = one_host.start("-m", "holdfast", *command, *endless, stem="commands")
        await_line(process, "open 0")
        last = int(await_line(process, ""))
        (trainer,) = answer(one_host, "status", run)["agents"][0]["trainers"]
        os.kill(process.pid if is_forwarded else trainer["pid"], signal.SIGTERM)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 75, err
        # Its last step is durable, although none was due.
        newest = answer(one_host, "ls", run)["checkpoints"][-1]
        assert newest["step"] >= last
        assert newest["state"] == "committed"
    steps = newest["step"] + 3
    holdfast(one_host, *command, *training(run, steps=steps, every=10**6, finish=1))
    assert answer(one_host, "ls", run)["latest_step"] == steps - 1


def test_a_command_without_holdfast_that_a_notice_ended_was_preempted_and_a_ctrl_c_is_no_notice(
    one_host: Host,
) -> None:
    sleeping = "import time; print(1, flush=True); time.sleep(60)"
    for number, expected in [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]:
        command = ["run", "--preempted-code", "75", "--", *python(sleeping)]
        process = one_host.start("-c", INTERRUPTIBLE, *command, stem="commands")
        await_line(process, "")
        process.send_signal(number)
        process.communicate(timeout=240)
        assert process.returncode == expected


def test_a_signal_between_two_starts_ends_it(one_host: Host) -> None:
    command = ["run", "--max-restarts", "9", "--", *python(FAILING.format("5"))]
    process = one_host.start("-m", "holdfast", *command, stem="commands")
    assert process.stderr is not None
    while "restart 3 of 9" not in process.stderr.readline():
        pass
    process.terminate()
    _, err = process.communicate(timeout=240)
    assert process.returncode == 5
    assert err.endswith("holdfast run: exit code 5; not restarted: SIGTERM received\n")


def test_a_signal_reaches_all_that_the_command_started(one_host: Host) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    process = one_host.start("-m", "holdfast", "run", "--", *python(code), stem="commands")
    pid = int(await_line(process, ""))
    process.terminate()
    process.communicate(timeout=240)
    wait_until(lambda: not is_running(pid))


def test_a_killed_trainer_goes_on_and_the_agent_is_there_before_it(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # It trains until it is ended: on a busy machine the status below takes seconds.
    command = training(run, steps=10**6, sleep=0.02, every=10**6, ram_every=1)
    process = one_host.start(
        *("-m", "holdfast", "run", "--max-restarts", "1", "--directory", run, "--", *command),
        stem="commands",
    )
    wait_until(lambda: any(event["step"] >= 3 for event in events(run, "sealed")))
    (trainer,) = answer(one_host, "status", run)["agents"][0]["trainers"]
    os.kill(trainer["pid"], signal.SIGKILL)
    await_line(process, "open 1")
    resumed_at = int(await_line(process, ""))
    assert resumed_at > 3
    process.terminate()
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "exit code 137; restart 1 of 1" in err
    # The agent was started by `run`, before the trainer, and there was only that one.
    starts = await_events(run, "agent_started", "attempt_started", count=3)
    started, first_attempt = starts[:2]
    assert (started["event"], first_attempt["event"]) == ("agent_started", "attempt_started")
    assert len(events(run, "agent_started")) == 1
    # All is durable when it returns; its agent leaves some time later.
    newest = max(event["step"] for event in events(run, "sealed"))
    assert answer(one_host, "ls", run)["latest_step"] >= newest


def test_a_training_whose_directory_was_moved_is_not_begun_anew(
    one_host: Host, tmp_path: Path
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    command = training(run, steps=10**6, sleep=0.02, every=10**6, ram_every=1)
    process = one_host.start(
        *("-m", "holdfast", "run", "--max-restarts", "3", "--", *command), stem="commands"
    )
    wait_until(lambda: any(event["step"] >= 3 for event in events(run, "sealed")))
    (trainer,) = answer(one_host, "status", run)["agents"][0]["trainers"]
    # Its agent has not found it yet.
    run.rename(moved)
    os.kill(trainer["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 137, err
    assert f"not restarted: the run at {run} was moved to {moved}, so that" in err
    assert not run.exists()
    assert answer(one_host, "ls", moved)["latest_step"] >= 3


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "left to itself"])
def test_a_training_whose_directory_was_removed_is_not_begun_anew(
    one_host: Host, tmp_path: Path, is_killed: bool
) -> None:
    run = tmp_path / "run"
    command = training(run, steps=10**6, sleep=0.02, every=10**6, ram_every=1)
    process = one_host.start(
        *("-m", "holdfast", "run", "--max-restarts", "3", "--", *command), stem="commands"
    )
    wait_until(lambda: any(event["step"] >= 3 for event in events(run, "sealed")))
    (trainer,) = answer(one_host, "status", run)["agents"][0]["trainers"]
    while run.exists():
        shutil.rmtree(run, ignore_errors=True)
    if is_killed:
        os.kill(trainer["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == (137 if is_killed else 1), err
    assert f"not restarted: the run at {run} is not there any more" in err
    assert re.search(rf"error: the run at {run} is not there any more .* keeps steps? \d", err)
    assert not run.exists()


def test_what_ram_has_of_a_run_stays_although_another_run_is_at_its_place(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = training(run, steps=10**6, sleep=0.02, every=10**6, ram_every=1)
    process = one_host.start("-m", "holdfast", "run", "--", *command, stem="commands")
    wait_until(lambda: any(event["step"] >= 3 for event in events(run, "sealed")))
    (agent,) = answer(one_host, "status", run)["agents"]
    process.send_signal(signal.SIGSTOP)
    while run.exists():
        shutil.rmtree(run, ignore_errors=True)
    wait_until(lambda: not is_running(agent["pid"]))
    train(one_host, run, steps=2)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1, err
    assert re.search(rf"error: the run at {run} is another one .* keeps steps? \d", err)
    left = answer(one_host, "status")["left_behind"]
    assert [(tier["run_id"], tier["ram_bytes"] > 0) for tier in left] == [(agent["run_id"], True)]


def test_a_start_beside_the_one_that_it_replaces_waits_for_its_end_and_uses_up_no_restart(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = start_training(one_host, run, steps=10**6, sleep=0.02, every=10**6, ram_every=1)
    await_line(first, "open")
    command = training(run, steps=10**6, sleep=0.02, every=10**6, ram_every=1)
    second = one_host.start(
        *("-m", "holdfast", "run", "--max-restarts", "1", "--", *command), stem="commands"
    )
    assert second.stderr is not None
    said = ""
    while said.count("restart, not counted while another start has the run") < 2:
        line = second.stderr.readline()
        assert line, said
        said += line
    os.kill(first.pid, signal.SIGKILL)
    await_line(second, "open")
    second.terminate()
    _, err = second.communicate(timeout=240)
    assert second.returncode == 0, err
    assert "RunBusyError" in said
    # It was no end of the training that had the run.
    ends = await_events(run, "command_ended", count=1)
    assert [event["cause"] for event in ends] == ["preempted"]


def test_what_stands_in_ram_alone_is_durable_when_it_returns(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # So large that it takes the agent a while; one step stands in RAM alone when the trainer ends.
    # RAM skips what comes while a save is under way.
    count = 10**6
    command = training(
        run, steps=count, every=count, ram_every=1, leave_sealed=1, megabytes=200, sleep=0.01
    )
    holdfast(one_host, "run", "--", *command)
    newest = max(event["step"] for event in events(run, "sealed"))
    assert newest >= 1
    assert manifest_path(run, newest).exists()


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("closes_other", [False, True])
def test_an_accepted_save_that_ended_with_its_trainer_is_an_error_unless_it_was_made_again(
    one_host: Host, tmp_path: Path, goes_on: bool, closes_other: bool
) -> None:
    run, may_save = tmp_path / "run", tmp_path / "may save"
    # The agent is stopped, so that the save waits for its slot when the program leaves.
    other = f"other = holdfast.CheckpointManager({str(tmp_path / 'other')!r})\n"
    code = (
        "import os, time, numpy, holdfast\n"
        f"{other if closes_other else ''}"
        f"manager = holdfast.CheckpointManager({str(run)!r})\n"
        "print(os.getpid(), flush=True)\n"
        f"while not os.path.exists({str(may_save)!r}): time.sleep(0.01)\n"
        "manager.save(0, {'w': numpy.zeros(10)}, force=True)\n"
        f"{'other.close()' if closes_other else ''}\n"
        "os._exit(0)\n"
    )
    command = python(code)
    if goes_on:
        then = training(run, steps=3, finish=2)
        command = ["sh", "-c", f"{shlex.join(command)}; {shlex.join(then)}"]
    process = one_host.start("-m", "holdfast", "run", "--", *command, stem="commands")
    trainer = int(await_line(process, ""))
    (agent,) = [status.pid for status in one_host.agents() if status.run == str(run)]
    stop(agent)
    may_save.touch()
    wait_until(lambda: not is_running(trainer))
    os.kill(agent, signal.SIGCONT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == (0 if goes_on else 1), err
    told = f"step 0 (attempt 1) of {run} is lost: rank 0 ended without closing"
    assert (told in err) != goes_on


def test_what_a_killed_agent_left_is_made_durable_too(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = training(run, steps=3, every=9, ram_every=1, leave=600)
    process = one_host.start(
        "-m", "holdfast", "run", "--directory", run, "--", *command, stem="commands"
    )
    kill_all(one_host, process)
    assert process.returncode == 137
    newest = answer(one_host, "ls", run)["checkpoints"][-1]
    assert (newest["step"], newest["state"]) == (2, "committed")


@pytest.mark.parametrize(
    "linger",
    [
        pytest.param(0, id="agent leaves"),
        pytest.param(600, id="agent stays", marks=pytest.mark.soak),
    ],
)
def test_a_failed_checkpoint_is_never_exit_code_0(
    one_host: Host, tmp_path: Path, linger: int
) -> None:
    run = tmp_path / "run"
    command = training(run, steps=1, break_storage="writing", leave=0.5, linger=linger)
    # What storage refuses is tried three times, two seconds apart.
    done = holdfast(one_host, "run", "--drain-secs", "15", "--", *command, code=1)
    assert "error: step 0 (attempt 1)" in done.stderr
    assert "durable: write" in done.stderr


def test_storage_that_is_lost_altogether_is_never_exit_code_0(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = training(run, steps=1, break_storage="listing", leave=0.5)
    done = holdfast(one_host, "run", "--drain-secs", "1", "--", *command, code=1)
    assert "error: " in done.stderr
    assert str(run) in done.stderr


@pytest.mark.usefixtures("quick_tries")
def test_a_failure_that_the_trainer_was_told_of_is_its_exit_code(
    one_host: Host, tmp_path: Path
) -> None:
    command = training(tmp_path / "run", steps=1, break_storage="writing")
    process = one_host.start(
        "-m", "holdfast", "run", "--drain-secs", "0", "--", *command, stem="commands"
    )
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "SaveFailedError" in err


def test_a_second_signal_ends_the_wait(one_host: Host, tmp_path: Path) -> None:
    command = training(tmp_path / "run", steps=1, break_storage="writing", leave=0.5)
    process = one_host.start("-m", "holdfast", "run", "--", *command, stem="commands")
    assert process.stderr is not None
    while "waiting: step 0" not in (line := process.stderr.readline()):
        assert line
    process.terminate()
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "is not durable" in err
