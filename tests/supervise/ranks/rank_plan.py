"""Jobs whose ranks are lost: their plans, which are the argument of `rank_rig`, and outcomes."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests.hosts import Host

RIG = Path(__file__).parent / "rank_rig.py"
JOB_SECS = 800.0

WIDTH = 16


class Fault(msgspec.Struct, frozen=True):
    """What happens once to a rank of a generation, at a moment of a step.

    Generation 0 stands for any; step -1 is before the first step of a generation.
    """

    generation: int
    rank: int
    step: int
    moment: str
    action: str = "kill"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A job and what happens to it."""

    directory: str
    steps: int
    kind: str = "plain"
    ranks: int = 4
    """The ranks on all hosts."""
    spares: int = 1
    addresses: tuple[tuple[str, int], ...] = ()
    """The launchers of the job's hosts; empty: one host."""
    spare_hosts: int = 0
    pause_secs: float = 0.0
    """How long each step takes at least."""
    ranks_min: int = 4
    leave_secs: float = 60.0
    interval: int = 3
    keep_last: bool = False
    width: int = WIDTH
    is_on_gpu: bool = False
    """Whether all ranks compute on one GPU, by NCCL over sockets."""
    notes_aborts: bool = True
    """Whether what an abort has torn is known to be so, as it should."""
    faults: tuple[Fault, ...] = ()


@dataclass
class Outcome:
    """What a job has printed, and its exit code."""

    code: int
    lines: list[dict[str, Any]]
    notes: str

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    @property
    def digests(self) -> set[str]:
        """The states that the training ended with; one, if all ranks agree."""
        return {line["digest"] for line in self.of("survived")}


def run_job(at: Host, **plan: Any) -> Outcome:
    """Run a job to its end."""
    text = msgspec.json.encode(Plan(**plan)).decode()
    stem = "" if plan.get("is_on_gpu") else "torch"
    return outcome_of(at.start(RIG, text, stem=stem, GLOO_SOCKET_IFNAME="lo"))


def outcome_of(process: subprocess.Popen[str]) -> Outcome:
    """Wait for the processes of one host."""
    out, err = process.communicate(timeout=JOB_SECS)
    return Outcome(process.returncode, [json.loads(line) for line in out.splitlines()], err)
