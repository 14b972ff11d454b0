"""Watch the command for hangs, keep the stacks of one, and end what hangs."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdfast.clock import Clock
from holdfast.host.wire.protocol import AgentStatus
from holdfast.observe.run_status import BUSY_WORDS
from holdfast.supervise.agents import Agents
from holdfast.supervise.command import Child
from holdfast.supervise.hangs import Hang, HangDetector, ranks_behind
from holdfast.supervise.stacks import gather_stacks, shown_lines

TERM_SECS = 5.0
"""How long a hanging command has to end after SIGTERM."""
ASK_SECS = 2.0
"""How often other hosts are asked for their steps while no step is made here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReport:
    """A hang that was found: its reason in words, its step, and the file of stacks, if any.

    `pids` are the trainers of this host.
    """

    reason: str
    step: int | None
    stacks: str
    pids: tuple[int, ...]


class HangWatch:
    """The hangs of the starts of one command.

    Args:
        fixed_secs: The limit; None: `auto`.
        agents: The agents of the command's processes.
        clock: The clock.
        note: Shows one line to the user.
    """

    def __init__(
        self,
        fixed_secs: float | None,
        agents: Agents,
        clock: Clock,
        note: Callable[[str], None],
    ) -> None:
        self._fixed_secs = fixed_secs
        self._agents = agents
        self._clock = clock
        self._note = note
        self._longest_secs: float | None = None
        self._detector = HangDetector(fixed_secs)
        self._told: set[str] = set()
        """The states of other hosts that were told in this start."""
        self._held = set[int]()
        """The ranks that are held, and were told."""
        self._elsewhere: dict[int, int | None] = {}
        """The steps of ranks on other hosts. Those hosts may end their ranks at the same time."""
        self._asked_secs = -math.inf

    def begin(self) -> None:
        """Begin with another start of the command."""
        longest_secs = max(self._longest_secs or 0.0, self._detector.longest_secs)
        self._detector = HangDetector(self._fixed_secs, longest_secs)
        self._told.clear()
        self._held.clear()
        self._elsewhere.clear()

    def look(self, statuses: Sequence[AgentStatus], folder: Path) -> HangReport | None:
        """Return the hang that the agents' statuses show, with its stacks kept; None: none."""
        trainers = [trainer for status in statuses for trainer in status.trainers]
        if self._fixed_secs is None and self._longest_secs is None and trainers:
            self._longest_secs = self._agents.longest_gap_secs()
            self._detector.longest_secs = max(self._longest_secs, self._detector.longest_secs)
        now_secs = self._clock.monotonic()
        hang = self._detector.note(now_secs, trainers)
        held = self._detector.held_ranks(now_secs)
        for rank, pid in held.items():
            if rank not in self._held:
                self._note(
                    f"holdfast run: rank {rank}, process {pid}, {BUSY_WORDS['held']}: it is no "
                    "hang, and the others wait for it; continue it with "
                    f"`kill -CONT {pid}`, or detach the debugger"
                )
        self._held = {*held}
        for rank, secs in self._detector.slow_starts(now_secs).items():
            limit_secs = self._detector.limit_secs("starting")
            self._tell_once(
                f"no step for {secs:.0f} s since this start; rank {rank} may be compiling: it has "
                f"{limit_secs:.0f} s for its first two steps"
            )
        is_due = now_secs - self._asked_secs >= ASK_SECS and self._detector.is_waiting(now_secs)
        if hang is None and not is_due:
            return None
        steps, busy = self._agents.other_ranks(statuses)
        self._asked_secs = now_secs
        self._elsewhere |= steps
        if hang is None:
            return None
        if busy:
            self._detector.postpone(self._clock.monotonic())
            for rank, state in busy.items():
                self._tell_once(
                    f"no step for {hang.secs:.0f} s; rank {rank} on another host "
                    f"{BUSY_WORDS.get(state, state)}: the training may wait for it"
                )
            return None
        return self._report(hang, folder)

    def _tell_once(self, text: str) -> None:
        if text.partition(";")[2] not in self._told:
            self._told.add(text.partition(";")[2])
            self._note(f"holdfast run: {text}")

    def _report(self, hang: Hang, folder: Path) -> HangReport:
        """Gather the stacks, name the rank that is behind, and tell both."""
        stacks = gather_stacks(hang.ranks, folder, self._clock)
        waiting = [process.rank for process in stacks if process.is_in_collective]
        steps = self._elsewhere | hang.steps
        behind = ranks_behind(steps.items(), waiting)
        named = ", ".join(f"rank {rank} (step {steps[rank]})" for rank in behind[:8])
        reason = f"no step for {hang.secs:.0f} s, more than {hang.limit_secs:.0f} s"
        reason += f", after step {hang.step}" if hang.step is not None else ""
        for rank, section in sorted(hang.busy.items())[:8]:
            reason += f"; rank {rank} {BUSY_WORDS.get(section, section)}"
        reason += f"; behind: {named}" if named else ""
        header = f"{self._clock.now():%Y-%m-%d %H:%M:%S} UTC: {reason}"
        text = "\n\n".join([header, *(f"{own.title}\n{own.text}" for own in stacks)]) + "\n"
        name = self._agents.keep_stacks(text)
        for line in (f"holdfast run: hang: {reason}; stacks: {name}", *shown_lines(stacks)):
            self._note(line)
        pids = tuple(hang.ranks.values())
        return HangReport(reason=reason, step=hang.step, stacks=name, pids=pids)


def end_hanging(child: Child, pids: Iterable[int]) -> int:
    """End the command and all that it has started; return its exit code.

    The trainers are killed: SIGTERM announces a preemption to them, for which they would make
    another step. The rest gets SIGTERM first. A launcher may have started the trainers in process
    groups of their own.

    Args:
        child: The command.
        pids: The trainers.
    """
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(child.pid).children(recursive=True)
    for pid in pids:
        if pid == child.pid or any(process.pid == pid for process in descendants):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    code = child.end(TERM_SECS)
    for process in descendants:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return code
