"""Start an agent, detached and in its own session, and wait until it answers."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast import waits
from holdfast.clock import Clock
from holdfast.errors import AgentUnavailableError
from holdfast.local_agent.client import AgentSilentError, answers
from holdfast.local_agent.detached_process import ALREADY_RUNNING
from holdfast.local_agent.place import is_locked

START_SECS = 60.0
LOG_SECS = 10.0
"""After this time a longer wait is logged."""
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


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentStart:
    """An agent that was found or is starting; `process` is None where this process started none."""

    folder: Path
    reason: str | None
    process: subprocess.Popen[bytes] | None


def await_agent(
    name: str,
    start: AgentStart,
    again: Callable[[], AgentStart],
    log_path: Path,
    clock: Clock,
    patience_secs: float = START_SECS,
) -> AgentStart:
    """Wait until an agent answers; start another one where it ended before.

    Args:
        name: what it is, for messages: `the agent of runs/a`.
        start: of the agent that is there or starting.
        again: starts another one.
        log_path: the agent's log, for messages.
        clock: the time.
        patience_secs: how long one that has its place may take until it answers.

    Returns:
        The start of the agent that answers. The process of each start was waited for.

    Raises:
        AgentUnavailableError: none answers, or one that runs does not.
    """
    began_secs, ended_count, is_logged = clock.monotonic(), 0, False
    while ended_count < ENDED_COUNT_MAX:
        waited_secs = clock.monotonic() - began_secs
        if waited_secs >= START_SECS and not (
            waited_secs < patience_secs and is_locked(start.folder)
        ):
            break
        if waited_secs >= LOG_SECS and patience_secs > START_SECS and not is_logged:
            is_logged = True
            log.warning(
                "%s has not answered for %d s: it reads the run, whose service may refuse requests "
                "for a while; it is waited for up to %d min; see %s",
                *(name, LOG_SECS, round(patience_secs / 60), log_path),
            )
        try:
            has_answered = answers(start.folder)
        except AgentSilentError as error:
            reap(start.process)
            raise AgentUnavailableError(f"use {name}: {error}") from error
        if has_answered:
            reap(start.process)
            return start
        code = start.process.poll() if start.process is not None else ALREADY_RUNNING
        if code == ALREADY_RUNNING:
            # One on its way out held the lock or took the folder along, or one was just started.
            clock.sleep(LEAVING_POLL_SECS)
            start = again()
        elif code is not None and not is_locked(start.folder):
            # It ended before it answered, with its place or without it.
            ended_count += 1
            if ended_count < ENDED_COUNT_MAX:
                start = again()
        # Each look at the lock takes it for a moment, in which an agent that starts finds it taken.
        waits.sleep(clock, POLL_SECS if waited_secs < START_SECS else LEAVING_POLL_SECS)
    reap(start.process)
    raise AgentUnavailableError(
        f"start {name} in {start.folder}: none answered within {waited_secs:.0f} s ({ended_count} "
        f"ended before they did; the last one: {_end_text(start.process)}): "
        f"{last_line(start.folder)}; see {log_path}"
    )


def _end_text(process: subprocess.Popen[bytes] | None) -> str:
    """Return how the started process ended."""
    code = process.returncode if process is not None else ALREADY_RUNNING
    if code == ALREADY_RUNNING:
        return "another agent has its place, and starts or exits"
    return f"exit code {code}"


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


def spawn(folder: Path, module: str, argument: str) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENT` in a session of its own; its errors go into the folder.

    Raises:
        FileNotFoundError: an exiting agent removed the folder.
        AgentUnavailableError: the process cannot be started.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(folder / STDERR, flags, 0o600), "ab") as stderr:
        try:
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
        except OSError as error:
            raise AgentUnavailableError(
                f"start an agent: {sys.executable} cannot be started: {error.strerror} (errno "
                f"{error.errno}); check that this user may run it, and the limits of its processes"
            ) from error


def _environment() -> dict[str, str]:
    """Return the trainer's environment with absolute paths.

    The agent runs in another working directory.
    """
    variables = dict(os.environ)
    for name in PATH_VARIABLES:
        if variables.get(name):
            variables[name] = os.path.abspath(variables[name])
    paths = [os.path.abspath(p) for p in variables.get("PYTHONPATH", "").split(os.pathsep) if p]
    return variables | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def last_line(folder: Path) -> str:
    """Return the last line that an agent in `folder` wrote to standard error."""
    try:
        lines = (folder / STDERR).read_text(errors="replace").strip().splitlines()
    except OSError:
        return "no output"
    return lines[-1] if lines else "no output"
