"""What a trainer, its agent and their folders hold at one moment."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.hosts import WAIT_SECS, Host, ending, wait_until
from tests.manifests import folders

TRAINER = Path(__file__).with_name("leaking_trainer.py")
KEPT_COUNT = 3


@dataclass(frozen=True, kw_only=True)
class Held:
    """One process: its open descriptors, its threads, its resident memory."""

    fds: int
    threads: int
    rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look. `trainer` is None where there is none; events grow by what happened."""

    trainer: Held | None
    agent: Held
    ram_bytes: int
    ram_files: int
    checkpoint_bytes: int
    checkpoint_files: int
    event_bytes: int
    attempt_files: int


def look(host: Host, run: Path, trainer_pid: int | None) -> Sample:
    """What is held now, once the agent has nothing to do any more."""
    wait_until(lambda: _is_at_rest(host, run))
    return Sample(
        trainer=_held(trainer_pid) if trainer_pid is not None else None,
        agent=_held(host.agent_processes()[0].pid),
        ram_bytes=_size_bytes(host.folder),
        ram_files=_count(host.folder),
        checkpoint_bytes=_size_bytes(run / "checkpoints"),
        checkpoint_files=_count(run / "checkpoints"),
        event_bytes=_size_bytes(run / "events"),
        attempt_files=_count(run / "attempts"),
    )


@contextlib.contextmanager
def standing_trainer(
    host: Host, run: Path, **options: object
) -> Iterator[tuple[subprocess.Popen[str], Iterator[dict]]]:
    """Yield a `leaking_trainer` and its lines; it waits after each until the next is requested."""
    command = [sys.executable, str(TRAINER), str(run), json.dumps(options)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)

    def lines(process: subprocess.Popen[str]) -> Iterator[dict]:
        for line in process.stdout:
            yield json.loads(line)
            process.stdin.write("\n")
            process.stdin.flush()
        code = process.wait(WAIT_SECS)
        assert code == 0, process.stderr.read()

    with ending(subprocess.Popen(command, env=host.environment, text=True, **pipes)) as process:
        yield process, lines(process)


def _held(pid: int) -> Held:
    process = psutil.Process(pid)
    return Held(
        fds=process.num_fds(),
        threads=process.num_threads(),
        rss_bytes=process.memory_info().rss,
    )


def _is_at_rest(host: Host, run: Path) -> bool:
    # An agent without a processor does not answer in time.
    answers = host.agents()
    kept = len(folders(run)) if (run / "checkpoints").is_dir() else 0
    is_idle = all(agent.pending == 0 and len(agent.held) <= 1 for agent in answers)
    return len(answers) == 1 and is_idle and kept <= KEPT_COUNT


def _files(folder: Path) -> list[os.stat_result]:
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                found.append(path.stat())
    return found


def _count(folder: Path) -> int:
    return len(_files(folder))


def _size_bytes(folder: Path) -> int:
    """A file with two names counts once."""
    return sum({state.st_ino: state.st_blocks * 512 for state in _files(folder)}.values())
