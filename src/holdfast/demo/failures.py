"""Choose the failures of the demo and their steps from a seed, and carry them out.

A failure is due when its step is finished. It is carried out a fraction of a step later, so that it
can hit the computation, a save or neither. Signals are sent to single processes, by their ids.
"""

from __future__ import annotations

import enum
import os
import random
import shutil
import signal
from dataclasses import dataclass

from holdfast.clock import Clock
from holdfast.demo.agents import agent_of, kill_agent
from holdfast.errors import InvalidArgumentError

STEPS_MIN = 20
"""The fewest steps for which the failures are at distinct steps."""


class DemoFailureKind(enum.Enum):
    """What a failure does, as the demo names it."""

    KILL = "trainer SIGKILL"
    TERMINATE = "trainer SIGTERM"
    KILL_AGENT = "agent SIGKILL"
    LOSE_HOST = "host lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One planned failure.

    Attributes:
        kind: What it does.
        step: It is due when this step is finished.
        phase: The fraction of the next step that passes before it is carried out, in [0, 1).
        host: The index of the host that it hits.
    """

    kind: DemoFailureKind
    step: int
    phase: float
    host: int = 0


def choose_failures(
    seed: int, steps: int, *, kill_agent: bool, hosts: int = 1
) -> tuple[Failure, ...]:
    """Return the failures of a run of `steps` steps, by step. Equal seeds give equal failures.

    The first one is between 1/4 and 1/2 of the run, the second one between 3/5 and 4/5. With one
    host, its trainer receives SIGKILL and later SIGTERM; with several, one host is lost and later
    another. With `kill_agent` an agent is killed between 1/10 and 9/10, away from these two.

    Raises:
        InvalidArgumentError: There are fewer than `STEPS_MIN` steps.
    """
    if steps < STEPS_MIN:
        raise InvalidArgumentError(
            f"choose failures: expected at least {STEPS_MIN} steps, found {steps}"
        )
    chance = random.Random(seed)
    chosen = [
        (DemoFailureKind.KILL, chance.randrange(steps // 4, steps // 2), 0),
        (DemoFailureKind.TERMINATE, chance.randrange(steps * 3 // 5, steps * 4 // 5), 0),
    ]
    if hosts > 1:
        lost = chance.sample(range(hosts), 2)
        chosen = [
            (DemoFailureKind.LOSE_HOST, step, host)
            for (_, step, _), host in zip(chosen, lost, strict=True)
        ]
    if kill_agent:
        apart = max(1, steps // 30)
        step = chance.choice(
            [
                step
                for step in range(steps // 10, steps * 9 // 10)
                if all(abs(step - other) > apart for _, other, _ in chosen)
            ]
        )
        chosen.append((DemoFailureKind.KILL_AGENT, step, chance.randrange(hosts)))
    failures = [
        Failure(kind=kind, step=step, phase=chance.random(), host=host)
        for kind, step, host in chosen
    ]
    return tuple(sorted(failures, key=lambda failure: failure.step))


def strike(kind: DemoFailureKind, trainer_pid: int, run: str, host: str, clock: Clock) -> None:
    """Carry out a failure on the host of that name.

    Raises:
        AgentUnavailableError: The host's agent cannot be found or does not end.
    """
    match kind:
        case DemoFailureKind.KILL:
            os.kill(trainer_pid, signal.SIGKILL)
        case DemoFailureKind.TERMINATE:
            os.kill(trainer_pid, signal.SIGTERM)
        case DemoFailureKind.KILL_AGENT:
            kill_agent(agent_of(run, host, clock), clock)
        case DemoFailureKind.LOSE_HOST:
            agent = agent_of(run, host, clock)
            # The trainer first, because a live trainer would start another agent.
            os.kill(trainer_pid, signal.SIGKILL)
            kill_agent(agent, clock)
            shutil.rmtree(agent.folder, ignore_errors=True)
