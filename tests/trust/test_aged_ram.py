"""Empty RAM by age, as cleaners of folders for temporary files do, under a living agent.

systemd-tmpfiles skips what is locked. Others (tmpreaper, `find -delete`) do not: then the agent
leaves files behind that no trainer finds, or checkpoints without their images. The training goes on
in each case, each lost save is reported once, and nothing false is restored.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.host.wire.agent_directory import WORDS
from holdfast.local_agent.place import SOCKET
from tests.hosts import Host, host, is_running, wait_until
from tests.trust.failing_rig import Trainer, check_restorable, committed, told, trainer
from tests.trust.figures import tell

SECS = 40.0
SEED = 7
FROZEN = np.arange(200_000.0)


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host of the test's own, for this process as well."""
    with host() as own:
        monkeypatch.setenv("HOLDFAST_RAM", str(own.folder))
        monkeypatch.setenv("HOLDFAST_HOST", own.name)
        yield own


def clean(folder: Path, configuration: Path) -> None:
    """Let systemd-tmpfiles remove everything below the folder, whatever its age."""
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("systemd-tmpfiles is not installed (Debian package systemd)")
    configuration.write_text(f"d {folder} 0700 - - 0\n")
    subprocess.run(["systemd-tmpfiles", "--clean", configuration], check=True, timeout=240)


def tree(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.exists()}


def state_of(step: int) -> dict:
    return {"frozen": FROZEN, "w": np.full(1000, float(step))}


def check_resumed(run: Path, step: int) -> None:
    with holdfast.CheckpointManager(run) as manager:
        start, state = manager.resume(state_of(-1))
        assert start == step + 1
        assert (state["w"] == step).all()
        assert (state["frozen"] == FROZEN).all()


def test_systemds_cleaner_skips_the_folder_of_an_agent_that_lives(
    one_host: Host, tmp_path: Path
) -> None:
    run, configuration = tmp_path / "run", tmp_path / "clean.conf"
    with holdfast.CheckpointManager(run) as manager:
        manager.save(0, state_of(0), force=True)
        manager.wait_until_finished()
        pid = one_host.agent().pid
        wait_until(lambda: not one_host.agent().pending)
        before = tree(one_host.folder)
        unlocked = one_host.folder / "other" / "file"
        unlocked.parent.mkdir()
        unlocked.touch()
        clean(one_host.folder, configuration)
        assert not unlocked.exists(), "the cleaner cleans"
        assert before <= tree(one_host.folder)
        assert manager.save(1, state_of(1), force=True)
        manager.wait_until_finished()
        assert one_host.agent().pid == pid
    check_resumed(run, 1)


@pytest.mark.parametrize("name", [SOCKET, WORDS])
def test_an_agent_that_trainers_cannot_find_any_more_makes_room_for_another(
    one_host: Host, tmp_path: Path, name: str
) -> None:
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run) as manager:
        manager.save(0, state_of(0), force=True)
        manager.wait_until_finished()
        pid = one_host.agent().pid
        (path,) = one_host.folder.glob(f"*/{name}")
        path.unlink()
        wait_until(lambda: not is_running(pid))
        assert manager.save(1, state_of(1), force=True)
        manager.wait_until_finished()
        assert one_host.agent().pid != pid
        assert list(one_host.folder.glob("*/ram/checkpoints/*1.1-*")), "RAM is used again"
    check_resumed(run, 1)


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_old_files_of_checkpoints_that_later_ones_refer_to_cost_no_later_one(
    one_host: Host, tmp_path: Path, suffix: str
) -> None:
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run) as manager:
        for step in range(4):
            manager.save(step, state_of(step), force=True)
            manager.wait_until_finished()
        for path in one_host.folder.glob(f"*/ram/**/*.{suffix}"):
            path.unlink()
        for slot in one_host.folder.glob("*/ram/slots/*"):
            slot.unlink()
        for step in range(4, 7):
            manager.save(step, state_of(step), force=True)
            manager.wait_until_finished()
    check_resumed(run, 6)


def age(folder: Path, secs: float, chance: random.Random) -> int:
    """Remove each file that was not changed for so long, with an even chance; return how many."""
    count = 0
    for path in sorted(tree(folder)):
        try:
            if not path.is_dir() and time.time() - path.stat().st_mtime > secs:
                if chance.random() < 0.5:
                    path.unlink()
                    count += 1
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        except FileNotFoundError:
            continue
    return count


def check_goes_on(training: Trainer, run: Path) -> None:
    first = training.now()
    training.go_on(20)
    training.await_commit(run, training.await_commit(run, first))


@pytest.mark.soak
@pytest.mark.parametrize("secs", [0.2, 1.0, 3.0])
def test_a_cleaner_that_knows_no_locks_ends_no_training(
    one_host: Host, tmp_path: Path, secs: float
) -> None:
    run, chance, removed_count = tmp_path / "run", random.Random(SEED), 0
    with trainer(one_host, run, tmp_path / "until", pause=0.05) as training:
        training.await_commit(run, -1)
        deadline = time.monotonic() + SECS
        while time.monotonic() < deadline:
            removed_count += age(one_host.folder, secs, chance)
            training.go_on(5)
        check_goes_on(training, run)
        assert training.end() == 0, training.told()
        steps = [step for step, _ in training.failures()]
        assert len(set(steps)) == len(steps)
        assert not set(steps) & set(told(run, "committed")), "it was made all the same"
        agent_count = "".join(training.errors).count("starting another")
    assert removed_count
    assert check_restorable(run) == committed(run)
    one_host.kill_agents()
    with trainer(one_host, run, tmp_path / "until") as training:
        assert training.await_line("start")["right"]
        training.go_on(20)
        assert training.end() == 0
    tell(
        f"RAM emptied by age, files older than {secs:g} s",
        "the training goes on, nothing false is restored",
        f"{removed_count} files removed in {SECS:g} s, {agent_count} agents followed another; "
        f"{len(steps)} saves reported as failed",
    )
