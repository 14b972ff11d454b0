import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from holdfast.supervise.standby import STARTUP
from holdfast.supervise.standby_process import StandbyError, StandbyProcess
from holdfast.trainer.process.imports import ImportRecord
from tests.cli.command_line import answer, holdfast
from tests.hosts import Host, is_running, wait_until
from tests.supervise.standby_job import OWN, PROGRAM, Job

PYTHON = sys.executable


@pytest.mark.parametrize("kind", ["script", "-m"])
def test_a_restart_sees_what_a_cold_start_sees(one_host: Host, tmp_path: Path, kind: str) -> None:
    program: list[object] = [PROGRAM]
    if kind == "-m":
        program = ["-m", "tests.supervise.standby_program"]
        # It extends its environment once, which its modules see.
        (tmp_path / "flag").touch()
    job = Job(one_host, tmp_path, "--", PYTHON, "-u", "-Wignore", *program, tmp_path, "-m", "x")
    cold = job.seen()
    job.await_ready()
    job.end(0)
    first = job.seen()
    job.end(1, "5")
    second = job.seen()
    assert [cold["is_forked"], first["is_forked"], second["is_forked"]] == [False, True, True]
    assert (first["count"], second["count"]) == ("1", "2")
    for fork in (first, second):
        assert fork["identity"] == cold["identity"]
        assert fork["flag"] == (None if kind == "script" else "x")
    assert cold["identity"]["parent"] == job.process.pid
    assert len({cold["random"], first["random"], second["random"]}) == 3
    assert "exit code 5; restart 2" in "".join(job.errors) + job.await_error("exit code 5")
    if kind == "script":
        job.end(2, "0")
        assert job.await_end() == 0
        # The next run of the program prepares before its second step.
        (kept,) = (tmp_path / "cache").glob("holdfast/programs/*/imports.json")
        assert b"standby_own" in kept.read_bytes()
    else:
        job.process.send_signal(signal.SIGUSR1)
        assert job.await_end() == 128 + signal.SIGUSR1
    assert not any("cold start" in line for line in job.errors)


def test_what_a_killed_supervisor_leaves_goes_with_the_next_one(
    one_host: Host, tmp_path: Path
) -> None:
    one_host.variables["TMPDIR"] = str(tmp_path)
    job = Job(one_host, tmp_path, "--", PYTHON, PROGRAM, tmp_path)
    pid = job.seen()["pid"]
    job.await_ready()
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text()
    (standby,) = {int(child) for child in children.split()} - {pid}
    job.process.kill()
    wait_until(lambda: not is_running(standby))
    job.end(0)
    # Of its standby process, and of the attempt.
    left = sorted(map(str, tmp_path.glob("holdfast-*")))
    assert len(left) == 2
    shown = answer(one_host, "clean", "--dry-run")["found"]
    assert [row["folder"] for row in shown] == left
    assert {row["reason"] for row in shown} == {"left by a killed `holdfast run`"}
    # Those of one that lives stay.
    code = f"import os; print(os.listdir({str(tmp_path)!r}))"
    done = holdfast(one_host, "run", "--", PYTHON, "-c", code)
    assert done.stdout.count("holdfast-supervisor-") == 1
    assert not [*tmp_path.glob("holdfast-*")]


def test_a_changed_module_is_imported_anew(one_host: Host, tmp_path: Path) -> None:
    job = Job(one_host, tmp_path, "--", PYTHON, PROGRAM, tmp_path)
    assert job.seen()["text"] == "first"
    job.await_ready()
    job.own.write_text(OWN.replace("first", "second"))
    job.await_ready()
    job.end(0)
    changed = job.seen()
    assert (changed["text"], changed["is_forked"]) == ("second", True)
    # A change that is noticed at the restart costs a cold start.
    job.own.write_text(OWN.replace("first", "third"))
    job.end(1)
    changed = job.seen()
    job.end(2, "0")
    assert job.await_end() == 0
    is_told = any("cold start: " in line and "has changed" in line for line in job.errors)
    assert (changed["text"], changed["is_forked"]) == ("third", not is_told)


def test_a_restart_waits_for_imports_that_have_begun(one_host: Host, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "standby_own.py").write_text(f"{OWN}\nimport time; time.sleep(1)\n")
    job = Job(one_host, tmp_path, "--", PYTHON, PROGRAM, tmp_path)
    job.seen()
    job.end(0)
    assert job.seen()["is_forked"]
    job.end(1, "0")
    assert job.await_end() == 0
    assert not any("cold start" in line for line in job.errors)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(99,), name='pool', daemon=True).start()",
            "imports start 1 threads ('pool')",
        ),
        ("device = open('/dev/kmsg')", "imports open /dev/kmsg"),
        ("import os; os._exit(3)", "it has ended"),
        ("", None),
    ],
)
def test_imports_that_cannot_be_forked_are_the_standby_processs_report(
    tmp_path: Path, code: str, reason: str | None
) -> None:
    (tmp_path / "standby_own.py").write_text(code)
    record = ImportRecord(modules=["standby_own"], paths=[str(tmp_path)], changed={})
    variables = os.environ | {"HOLDFAST_STANDBY": str(tmp_path), "PYTHONPATH": str(STARTUP)}
    with contextlib.ExitStack() as ends:
        process = StandbyProcess([PYTHON, "-c", "x"], variables, "", record, {})
        ends.callback(os.waitpid, process.pid, 0)
        ends.callback(process.end)
        if reason == "it has ended":
            with pytest.raises(StandbyError, match=reason):
                wait_until(process.poll)
        else:
            wait_until(process.poll)
            assert process.answer is not None
            assert process.answer.problem == reason


def test_a_standby_process_that_was_killed_costs_a_cold_start(
    one_host: Host, tmp_path: Path
) -> None:
    job = Job(one_host, tmp_path, "--", PYTHON, PROGRAM, tmp_path)
    pid = job.seen()["pid"]
    job.await_ready()
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text()
    (standby,) = {int(child) for child in children.split()} - {pid}
    os.kill(standby, signal.SIGKILL)
    job.end(0)
    assert not job.seen()["is_forked"]
    job.end(1, "0")
    assert job.await_end() == 0
    assert sum("no standby process" in line for line in job.errors) == 1


def test_other_commands_are_started_cold_with_one_line(one_host: Host, tmp_path: Path) -> None:
    command = [PYTHON, "-I", "-c", "import sys; sys.exit(3)"]
    job = Job(one_host, tmp_path, "--no-compile-cache", "--", *command)
    assert job.await_end() == 3
    reason = "the option -I of Python ignores PYTHONPATH"
    assert [line for line in job.errors if "standby" in line] == [
        f"holdfast run: no standby process: {reason}; restarts are cold starts\n"
    ]


def test_trainers_that_the_command_starts_are_told(one_host: Host, tmp_path: Path) -> None:
    code = (
        f"import subprocess, sys; subprocess.run([sys.executable, {str(PROGRAM)!r}, *sys.argv[1:]])"
    )
    job = Job(one_host, tmp_path, "--", PYTHON, "-c", code, tmp_path)
    job.seen()
    job.await_error("the command starts the trainers as processes of their own")
    job.end(0, "0")
    assert job.await_end() == 0
