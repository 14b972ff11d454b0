"""Two users and root train on one host with one RAM folder: each sees and stops its own runs."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trust.who_may_users import OWNER, STRANGER, Users, users, why_not

ROOT_USER = 0
TRAIN = """
import sys, time
import numpy as np
import holdfast

manager = holdfast.CheckpointManager(sys.argv[1])
manager.resume({"w": np.zeros(10)})
manager.save(0, {"w": np.ones(10)}, force=True)
manager.wait_until_finished()
print("ready", flush=True)
time.sleep(600)
"""
COMMAND = "import sys; from holdfast.cli.main import main; sys.exit(main(sys.argv[1:]))"


@contextlib.contextmanager
def training(everyone: Users, uid: int) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A run of that user, in training."""
    run = everyone.make_folder(everyone.place / f"runs-{uid}", uid, 0o755) / "run"
    with everyone.popen(uid, "-c", TRAIN, run) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()
            yield run, process
        finally:
            process.kill()


def holdfast(everyone: Users, uid: int, *arguments: object) -> str:
    """What a command of that user prints."""
    with everyone.popen(uid, "-c", COMMAND, *arguments, COLUMNS="300") as process:
        out, err = process.communicate(timeout=240)
    return out + err


@pytest.mark.soak
def test_commands_touch_and_report_only_the_users_own_runs() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with users() as everyone, contextlib.ExitStack() as stack:
        everyone.ram.mkdir()
        everyone.ram.chmod(0o1777)
        uids = (OWNER, STRANGER, ROOT_USER)
        runs = {uid: stack.enter_context(training(everyone, uid)) for uid in uids}
        for uid, (run, _) in runs.items():
            others = [other for other, _ in runs.values() if other != run]
            said = holdfast(everyone, uid, "status")
            assert str(run) in said
            assert not any(str(other) in said for other in others)
            for command in (["clean", "--yes"], ["stop", "--all"]):
                said = holdfast(everyone, uid, *command)
                assert not any(str(other) in said for other in others)
            name = "root" if uid == ROOT_USER else uid
            for other in others:
                for command in ("status", "stats", "stop"):
                    said = holdfast(everyone, uid, command, other)
                    assert f"that user {name} has started" in said, said
        _, process = runs[STRANGER]
        process.kill()
        process.wait()
        for uid in (OWNER, ROOT_USER):
            assert "nothing to remove" in holdfast(everyone, uid, "clean", "--yes")
        assert str(runs[STRANGER][0]) in holdfast(everyone, STRANGER, "status")
        assert all(runs[uid][1].poll() is None for uid in (OWNER, ROOT_USER))
