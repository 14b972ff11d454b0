"""The failures of the demo: which ones at which steps, chosen by a seed, and how they are dealt.

A failure is due when the step that it names is finished, and strikes a part of a step later, so
that it may hit computing, saving or neither. Signals go to one process, by its id.
"""

from __future__ import annotations

import enum
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import AgentUnavailableError, InvalidArgumentError

STEPS_MIN = 20
"""The fewest steps among which failures can be told apart."""

_CLI_SECS_MAX = 30.0


class Kind(enum.Enum):
    """What a failure does, in the words of the report."""

    KILL = "trainer SIGKILL"
    TERMINATE = "trainer SIGTERM"
    KILL_AGENT = "agent SIGKILL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One planned failure.

    Attributes:
        kind: what it does.
        step: it is due when this step is finished.
        phase: the part of the next step that passes before it strikes, in [0, 1).
    """

    kind: Kind
    step: int
    phase: float


def choose_failures(seed: int, steps: int, *, kill_agent: bool) -> tuple[Failure, ...]:
    """The failures of a run of `steps` steps, by step. The same seed chooses the same ones.

    The SIGKILL comes between a quarter and a half of the run, the SIGTERM between 3/5 and 4/5; the
    agent is killed anywhere between 1/10 and 9/10, apart from these two.

    Raises:
        InvalidArgumentError: there are fewer than `STEPS_MIN` steps.
    """
    if steps < STEPS_MIN:
        raise InvalidArgumentError(
            f"choosing failures: expected at least {STEPS_MIN} steps, found {steps}"
        )
    chance = random.Random(seed)
    chosen = {
        Kind.KILL: chance.randrange(steps // 4, steps // 2),
        Kind.TERMINATE: chance.randrange(steps * 3 // 5, steps * 4 // 5),
    }
    if kill_agent:
        apart = max(1, steps // 30)
        chosen[Kind.KILL_AGENT] = chance.choice(
            [
                step
                for step in range(steps // 10, steps * 9 // 10)
                if all(abs(step - other) > apart for other in chosen.values())
            ]
        )
    failures = [
        Failure(kind=kind, step=step, phase=chance.random()) for kind, step in chosen.items()
    ]
    return tuple(sorted(failures, key=lambda failure: failure.step))


def strike(kind: Kind, trainer_pid: int, run: Path) -> int:
    """Sends the signal of a failure; returns the id of the process that it went to.

    Raises:
        AgentUnavailableError: the agent shall be killed, and the run has none.
    """
    match kind:
        case Kind.KILL:
            target, number = trainer_pid, signal.SIGKILL
        case Kind.TERMINATE:
            target, number = trainer_pid, signal.SIGTERM
        case Kind.KILL_AGENT:
            target, number = agent_pid(run), signal.SIGKILL
    os.kill(target, number)
    return target


def agent_pid(run: Path) -> int:
    """The id of the agent process that serves a run on this host.

    Raises:
        AgentUnavailableError: `holdfast status` names none.
    """
    answer = _holdfast("status", str(run), "--json")
    agents = json.loads(answer).get("agents", [])
    pids = [int(agent["pid"]) for agent in agents]
    if len(pids) != 1:
        raise AgentUnavailableError(
            f"asking for the agent of {run}: expected one agent, found {pids}"
        )
    return pids[0]


def stop_agents(run: Path) -> None:
    """Stops the agents of a run on this host; a run without agents is no error.

    Raises:
        AgentUnavailableError: they could not be stopped.
    """
    if run.is_dir():  # Before there is a run, there is no agent of it.
        _holdfast("stop", str(run), "--timeout", str(_CLI_SECS_MAX / 2))


def _holdfast(*arguments: str) -> str:
    command = [sys.executable, "-m", "holdfast", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CLI_SECS_MAX, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise AgentUnavailableError(
            f"`holdfast {' '.join(arguments)}`: no end after {_CLI_SECS_MAX:.0f} s"
        ) from error
    if done.returncode != 0:
        raise AgentUnavailableError(
            f"`holdfast {' '.join(arguments)}`: exit code {done.returncode}, "
            f"it says: {(done.stderr or done.stdout).strip()[-500:]}"
        )
    return done.stdout
