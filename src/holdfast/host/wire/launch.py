"""Find the agent of a run on this host, or start it, detached and in its own session."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast import waits
from holdfast.clock import Clock
from holdfast.errors import AgentUnavailableError
from holdfast.host.wire.agent_directory import LOCK, agent_folders, make_private, make_root
from holdfast.host.wire.client import AgentSilentError, answers
from holdfast.host.wire.config import ALREADY_RUNNING, AgentConfig
from holdfast.host.wire.control_block import SEAT_COUNT
from holdfast.store.file_lock import is_file_locked
from holdfast.store.location import RunLocation

START_SECS = 60.0
POLL_SECS = 0.005
LEAVING_POLL_SECS = 0.1
REAP_SECS = 10.0
ENDED_COUNT_MAX = 5
"""How many agents in a row may exit before they answer: one may be killed while it starts."""
STDERR = "stderr"
PATH_VARIABLES = (
    *("HOLDFAST_RAM", "HOLDFAST_STATE", "SSL_CERT_FILE", "SSL_CERT_DIR", "AWS_CA_BUNDLE"),
    *("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
    "AZURE_FEDERATED_TOKEN_FILE",
)
"""Variables that have the path of a file or a folder, for the agent or for a service's client."""
OWN_FILES_SIZE_BYTES = 64 * 1024 + 16 * SEAT_COUNT


def find_agent(run_id: str, host: str) -> Path | None:
    """Return the folder of the agent that serves the run on `host`; None if none answers."""
    try:
        return find_live_agent(run_id, host)
    except AgentSilentError:
        return None


def find_live_agent(run_id: str, host: str) -> Path | None:
    """Return the folder of the agent that serves the run on `host`; None if there is no agent.

    Raises:
        AgentSilentError: there is one that does not answer.
    """
    return next((f for f in agent_folders(run_id, host) if answers(f)), None)


@dataclass(frozen=True, slots=True)
class AgentStart:
    """An agent that was found or is starting; `process` is None where this process started none."""

    folder: Path
    reason: str | None
    process: subprocess.Popen[bytes] | None


def begin_start(config: AgentConfig) -> AgentStart:
    """Start the run's agent where none answers, and do not wait for it.

    `ensure_agent` has to follow: it waits for the agent, and reaps the process.

    Raises:
        AgentUnavailableError: no folder takes the agent's files.
    """
    try:
        agent = find_live_agent(config.run_id, config.host)
    except AgentSilentError as error:
        # It may only be slow: `ensure_agent` tries again.
        agent = error.folder
    return AgentStart(agent, None, None) if agent is not None else _start(config)


def ensure_agent(
    config: AgentConfig, clock: Clock, start: AgentStart | None = None
) -> tuple[Path, str | None]:
    """Return the folder of the run's agent, which is started where none answers.

    Args:
        config: the agent that is wanted.
        clock: the time.
        start: what `begin_start` returned for the same agent, where it was called before.

    Returns:
        The folder, and the reason why it is not on the RAM tier's root, or None if it is.

    Raises:
        AgentUnavailableError: the agent does not start, and the message names its log; or one that
            runs does not answer.
    """
    start = start or begin_start(config)
    deadline = clock.monotonic() + START_SECS
    ended_count = 0
    while clock.monotonic() < deadline and ended_count < ENDED_COUNT_MAX:
        try:
            has_answered = answers(start.folder)
        except AgentSilentError as error:
            reap(start.process)
            raise AgentUnavailableError(f"use the agent of {config.run}: {error}") from error
        if has_answered:
            reap(start.process)
            return start.folder, start.reason
        code = start.process.poll() if start.process is not None else ALREADY_RUNNING
        if code == ALREADY_RUNNING:
            # One on its way out held the lock or took the folder along, or one was just started.
            clock.sleep(LEAVING_POLL_SECS)
            start = _start(config)
        elif code is not None and not is_locked(start.folder):
            # It ended before it answered, with its place or without it.
            ended_count += 1
            if ended_count < ENDED_COUNT_MAX:
                start = _start(config)
        waits.sleep(clock, POLL_SECS)
    reap(start.process)
    log = RunLocation(config.run).agent_log(config.host)
    raise AgentUnavailableError(
        f"start the agent of {config.run} in {start.folder}: none answered within "
        f"{START_SECS:.0f} s ({ended_count} ended before they did; the last one: "
        f"{_end_text(start.process)}): {last_line(start.folder)}; see {log}"
    )


def _end_text(process: subprocess.Popen[bytes] | None) -> str:
    """Return how the started process ended."""
    code = process.returncode if process is not None else ALREADY_RUNNING
    if code == ALREADY_RUNNING:
        return "another agent has its place, and starts or exits"
    return f"exit code {code}"


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the folder as its agent: one that starts, answers or exits."""
    # An agent that starts at this very moment finds the lock taken and exits; it is started again.
    return is_file_locked(folder / LOCK)


def reap(process: subprocess.Popen[bytes] | None) -> None:
    """Wait for the started process; it exits once its agent, or another one, has the folder."""
    if process is None:
        return
    try:
        process.wait(REAP_SECS)
    except subprocess.TimeoutExpired:
        # It was stopped, or its disk hangs. An agent that it may have started is found by its lock.
        process.kill()
        process.wait()


def _choose_folder(config: AgentConfig) -> tuple[Path, str | None]:
    """Return the first folder with room for a few pages, and the errors of those before it."""
    reasons: list[str] = []
    for folder in agent_folders(config.run_id, config.host):
        try:
            make_root(folder.parent)
            _try_folder(folder)
        except OSError as error:
            reasons.append(f"{folder.parent}: {error.strerror}")
        else:
            return folder, "; ".join(reasons) or None
    raise AgentUnavailableError(
        f"start the agent of {config.run}: no folder has room for its files "
        f"({'; '.join(reasons)}); set HOLDFAST_RAM to one that has"
    )


def _try_folder(folder: Path) -> None:
    """Create an agent's folder in its root, and check that it has room for the agent's files."""
    for is_last in (False, False, True):
        try:
            make_private(folder)
            probe = folder / f"probe-{os.getpid()}"
            fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, OWN_FILES_SIZE_BYTES)
            finally:
                os.close(fd)
                probe.unlink()
        except FileNotFoundError:
            # An exiting agent removed the folder meanwhile.
            if is_last:
                raise
        else:
            return


def _start(config: AgentConfig) -> AgentStart:
    folder, reason = _choose_folder(config)
    try:
        placed = msgspec.structs.replace(config, folder=str(folder))
        process = spawn(folder, "holdfast.host", msgspec.json.encode(placed).decode())
    except FileNotFoundError:
        process = None
    return AgentStart(folder, reason, process)


def spawn(folder: Path, module: str, argument: str) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENT` in a session of its own; its errors go into the folder.

    Raises:
        FileNotFoundError: an exiting agent removed the folder.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(folder / STDERR, flags, 0o600), "ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", module, argument],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            # The agent outlives the trainer's session and receives none of its signals.
            start_new_session=True,
            # The trainer's working directory can be removed or unmounted while the agent runs.
            cwd="/",
            env=_environment(),
        )


def _environment() -> dict[str, str]:
    """Return the trainer's environment with absolute paths.

    The agent runs in another working directory.
    """
    path = dict(os.environ)
    for name in PATH_VARIABLES:
        if path.get(name):
            path[name] = os.path.abspath(path[name])
    paths = [os.path.abspath(p) for p in path.get("PYTHONPATH", "").split(os.pathsep) if p]
    return path | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def last_line(folder: Path) -> str:
    """Return the last line that an agent in `folder` wrote to standard error."""
    try:
        lines = (folder / STDERR).read_text(errors="replace").strip().splitlines()
    except OSError:
        return "no output"
    return lines[-1] if lines else "no output"
