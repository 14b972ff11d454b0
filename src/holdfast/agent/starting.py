"""Finding the agent of a run on this host, or starting it, detached, in a session of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from holdfast.agent.client import answers
from holdfast.agent.config import ALREADY_RUNNING, AgentConfig
from holdfast.agent.location import agent_folders, make_private
from holdfast.agent.words import SEAT_COUNT
from holdfast.clock import Clock
from holdfast.errors import AgentUnavailableError
from holdfast.format.names import EVENTS

START_SECS = 60.0
POLL_SECS = 0.02
STDERR = "stderr"
OWN_FILES_SIZE_BYTES = 64 * 1024 + 16 * SEAT_COUNT


def find_agent(run_id: str, host: str) -> Path | None:
    """The folder of the agent that serves the run on `host`, or None."""
    return next((f for f in agent_folders(run_id, host) if answers(f)), None)


def ensure_agent(config: AgentConfig, clock: Clock) -> tuple[Path, str | None]:
    """The folder of the run's agent, which is started where none answers.

    Returns:
        The folder, and why it is not on the RAM tier's root, where it is not.

    Raises:
        AgentUnavailableError: it does not start; the message names its log.
    """
    found = find_agent(config.run_id, config.host)
    if found is not None:
        return found, None
    deadline = clock.monotonic() + START_SECS
    folder, reason, process = _start(config)
    while clock.monotonic() < deadline:
        if answers(folder):
            if process is not None:
                # It ended when the agent had its place, or found that another has it.
                process.wait()
            return folder, reason
        code = process.poll() if process is not None else ALREADY_RUNNING
        if code == ALREADY_RUNNING:
            # One on its way out held the lock or took the folder along, or one was just started.
            clock.sleep(POLL_SECS * 5)
            folder, reason, process = _start(config)
        elif code not in (None, 0):
            break
        clock.sleep(POLL_SECS)
    log = Path(config.run) / EVENTS / f"agent-{config.host}.log"
    raise AgentUnavailableError(
        f"start the agent of {config.run} in {folder}: it did not answer within {START_SECS:.0f} s "
        f"(exit code {process.returncode if process else None}): {_last_line(folder)}; see {log}"
    )


def _choose_folder(config: AgentConfig) -> tuple[Path, str | None]:
    """The first folder that takes a few pages; the others' errors are told."""
    reasons: list[str] = []
    for folder in agent_folders(config.run_id, config.host):
        try:
            make_private(folder.parent)
            make_private(folder)
            probe = folder / f"probe-{os.getpid()}"
            fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, OWN_FILES_SIZE_BYTES)
            finally:
                os.close(fd)
                probe.unlink()
        except FileNotFoundError:
            # An agent on its way out took the folder along: it is made anew.
            return folder, "; ".join(reasons) or None
        except OSError as error:
            reasons.append(f"{folder.parent}: {error.strerror}")
        else:
            return folder, "; ".join(reasons) or None
    raise AgentUnavailableError(
        f"start the agent of {config.run}: no folder takes its files ({'; '.join(reasons)}); set "
        "HOLDFAST_RAM to one that does"
    )


def _start(config: AgentConfig) -> tuple[Path, str | None, subprocess.Popen[bytes] | None]:
    folder, reason = _choose_folder(config)
    try:
        process = _spawn(msgspec.structs.replace(config, folder=str(folder)))
    except FileNotFoundError:
        process = None
    return folder, reason, process


def _spawn(config: AgentConfig) -> subprocess.Popen[bytes]:
    with (Path(config.folder) / STDERR).open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast.agent", msgspec.json.encode(config).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
            cwd="/",
            env=_environment(),
        )


def _environment() -> dict[str, str]:
    """The trainer's, with the folders on the module path absolute: the agent's own is elsewhere."""
    paths = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return os.environ | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def _last_line(folder: Path) -> str:
    try:
        lines = (folder / STDERR).read_text(errors="replace").strip().splitlines()
    except OSError:
        return "no output"
    return lines[-1] if lines else "no output"
