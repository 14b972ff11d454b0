"""Finding the agent of a run on this host, or starting it, detached, in a session of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from holdfast.agent.client import answers
from holdfast.agent.config import AgentConfig
from holdfast.agent.location import agent_folders, make_private
from holdfast.agent.words import SEAT_COUNT
from holdfast.clock import Clock
from holdfast.errors import AgentUnavailableError
from holdfast.format.names import EVENTS

START_SECS = 60.0
POLL_SECS = 0.02
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
    folder, reason = _choose_folder(config)
    config = msgspec.structs.replace(config, folder=str(folder))
    deadline = clock.monotonic() + START_SECS
    process = _spawn(config)
    while clock.monotonic() < deadline:
        if answers(folder):
            return folder, reason
        if process.poll() is not None and not answers(folder):
            # Another one held the lock, on its way in or out, or this one could not begin.
            if process.returncode not in (0, ALREADY_RUNNING):
                break
            clock.sleep(POLL_SECS * 5)
            process = _spawn(config)
        clock.sleep(POLL_SECS)
    log = Path(config.run) / EVENTS / f"agent-{config.host}.log"
    raise AgentUnavailableError(
        f"start the agent of {config.run} in {folder}: it did not answer within {START_SECS:.0f} s "
        f"(exit code {process.returncode}): {_last_line(process)}; see {log}"
    )


# As in `agent.process`, which imports the server's libraries; a trainer needs none of them.
ALREADY_RUNNING = 17


def _choose_folder(config: AgentConfig) -> tuple[Path, str | None]:
    """The first folder that takes a few pages; the others' errors are told."""
    reasons = []
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
        except OSError as error:
            reasons.append(f"{folder.parent}: {error.strerror}")
        else:
            return folder, "; ".join(reasons) or None
    raise AgentUnavailableError(
        f"start the agent of {config.run}: no folder takes its files ({'; '.join(reasons)}); set "
        "HOLDFAST_RAM to one that does"
    )


def _spawn(config: AgentConfig) -> subprocess.Popen[bytes]:
    errors = Path(config.folder) / "stderr"
    with errors.open("ab") as stderr:
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


def _last_line(process: subprocess.Popen[bytes]) -> str:
    import json

    path = Path(json.loads(str(process.args[-1]))["folder"]) / "stderr"  # type: ignore[index]
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return "no output"
    return lines[-1] if lines else "no output"
