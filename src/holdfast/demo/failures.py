"""The failures of the demo: which ones at which steps, chosen by a seed, and how they are dealt.

A failure is due when the step that it names is finished, and strikes a part of a step later, so
that it may hit computing, saving or neither. Signals go to single processes, by their ids.
"""

from __future__ import annotations

import enum
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

from holdfast.clock import Clock
from holdfast.demo.agents import agent_of
from holdfast.errors import InvalidArgumentError

STEPS_MIN = 20
"""The fewest steps among which failures can be told apart."""


class FailureKind(enum.Enum):
    """What a failure does, in the words of the report."""

    KILL = "trainer SIGKILL"
    TERMINATE = "trainer SIGTERM"
    KILL_AGENT = "agent SIGKILL"
    LOSE_HOST = "host lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One planned failure.

    Attributes:
        kind: what it does.
        step: it is due when this step is finished.
        phase: the part of the next step that passes before it strikes, in [0, 1).
        host: the index of the host that it hits.
    """

    kind: FailureKind
    step: int
    phase: float
    host: int = 0


def choose_failures(
    seed: int, steps: int, *, kill_agent: bool, hosts: int = 1
) -> tuple[Failure, ...]:
    """The failures of a run of `steps` steps, by step. The same seed chooses the same ones.

    One comes between a quarter and a half of the run, another one between 3/5 and 4/5: on one host
    its trainer is killed, and later told to end; of several hosts one is lost, and later another.
    An agent is killed anywhere between 1/10 and 9/10, apart from these two.

    Raises:
        InvalidArgumentError: there are fewer than `STEPS_MIN` steps.
    """
    if steps < STEPS_MIN:
        raise InvalidArgumentError(
            f"choosing failures: expected at least {STEPS_MIN} steps, found {steps}"
        )
    chance = random.Random(seed)
    chosen = [
        (FailureKind.KILL, chance.randrange(steps // 4, steps // 2), 0),
        (FailureKind.TERMINATE, chance.randrange(steps * 3 // 5, steps * 4 // 5), 0),
    ]
    if hosts > 1:
        lost = chance.sample(range(hosts), 2)
        chosen = [
            (FailureKind.LOSE_HOST, step, host)
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
        chosen.append((FailureKind.KILL_AGENT, step, chance.randrange(hosts)))
    failures = [
        Failure(kind=kind, step=step, phase=chance.random(), host=host)
        for kind, step, host in chosen
    ]
    return tuple(sorted(failures, key=lambda failure: failure.step))


def strike(kind: FailureKind, trainer_pid: int, run: Path, host: str, clock: Clock) -> int:
    """Deals a failure to the host of that name; returns the id of the process that it hit first.

    Raises:
        AgentUnavailableError: its agent shall be killed, and there is none.
    """
    match kind:
        case FailureKind.KILL:
            os.kill(trainer_pid, signal.SIGKILL)
        case FailureKind.TERMINATE:
            os.kill(trainer_pid, signal.SIGTERM)
        case FailureKind.KILL_AGENT:
            agent = agent_of(run, host, clock)
            agent.kill()
            return agent.pid
        case FailureKind.LOSE_HOST:
            agent = agent_of(run, host, clock)
            # The trainer first: it would start another agent.
            os.kill(trainer_pid, signal.SIGKILL)
            agent.kill()
            agent.remove_memory()
    return trainer_pid
