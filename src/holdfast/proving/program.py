"""Run the user's program once for a proof, and kill and restart it at chosen steps.

A process stops before the save of a chosen step (`trainer.opening.proof`), so that a kill is at
that step whatever the machine does meanwhile. Everything else goes on: the saver, the agent, the
other processes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path

import msgspec
import psutil

from holdfast.clock import Clock, SystemClock
from holdfast.engine.lifecycle.leases import Leases
from holdfast.environment import PROOF_VARIABLE, RESTART_VARIABLE
from holdfast.errors import HoldfastError
from holdfast.format.json_codec import decode
from holdfast.host.wire.agent_directory import agent_folders
from holdfast.host.wire.agent_processes import agent_processes
from holdfast.local_agent.place import locked_place, replace_file
from holdfast.store.location import RunLocation, open_durable
from holdfast.supervise.agents import AgentOfRun
from holdfast.supervise.command import Child, Signals, Starts, kill_left, send
from holdfast.supervise.drain import drain
from holdfast.trainer.opening.proof import ORDER, STOPPED, ProofOrder, ProofStop, read_steps
from holdfast.trainer.process.end_report import (
    TrainerOpened,
    reported_ends,
    reported_openings,
    reports_folder,
)

POLL_SECS = 0.02
GRACE_SECS = 60.0
"""How long a program may go on after a signal, or after the loss of one of its processes."""
DRAIN_SECS = 600.0
LOG_LINES = 12
ATTEMPT_MAX = 10**9 - 1


class KillKind(Enum):
    """What is done to the program at a step."""

    SIGKILL = "SIGKILL of a process"
    SIGTERM = "SIGTERM"
    HOST = "loss of the host's RAM"


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill before the save of the first step that is `step` or later, in process `rank`."""

    step: int
    kind: KillKind
    rank: int = 0


class NotComparableError(HoldfastError):
    """A program cannot be judged, for example because it fails by itself: the message says why.

    The command that judges it puts its own name before the message.

    Attributes:
        output: the last lines of the program's output, if it failed.
    """

    def __init__(self, message: str, output: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.output = tuple(output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a program is run, as often as it is needed.

    Attributes:
        starts: returns what starts it, for the descriptor of the file for its output.
        root: the folder for all that it saves, which exists and is empty.
        timeout_secs: how long it may take until a new step, or its end.
        signals: the received signals, which are forwarded to it.
        clock: the time.
        note: shows one line to the user, which it begins with the command's name.
    """

    starts: Callable[[int], Starts]
    root: Path
    timeout_secs: float
    signals: Signals
    clock: Clock
    note: Callable[[str], None]


@dataclass(slots=True)
class ProgramRun:
    """One run of the program, from its start to its end.

    Attributes:
        name: its name in results.
        folder: its folder, with what it has saved.
        kills: what was done to it, each with the step at which it was done.
        ignored: the signals after which it trained on to its end, likewise.
    """

    name: str
    folder: Path
    kills: list[tuple[Kill, int]] = field(default_factory=list)
    ignored: list[tuple[Kill, int]] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.folder / "output.log"

    def last_lines(self) -> list[str]:
        """Return the last lines of its output."""
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace").rstrip().splitlines()[-LOG_LINES:]
        return []


class ProgramRunner:
    """Run the program, each time in a folder of its own.

    Args:
        execution: how.
        order: what each process has to do, without kills.
    """

    def __init__(self, execution: Execution, order: ProofOrder) -> None:
        self._execution = execution
        self._order = order
        self._agents: set[AgentOfRun] = set()

    def run(
        self,
        name: str,
        kills: Sequence[Kill] = (),
        begin: Callable[[Path], None] = lambda folder: None,
    ) -> ProgramRun:
        """Run the program to its end, with these kills in the order of their steps.

        Args:
            name: its name in results.
            kills: what is done to it.
            begin: called with its folder before it starts.

        Raises:
            NotComparableError: it failed by itself, or made no step for too long.
            CommandNotRunError: it cannot be started.
            KeyboardInterrupt: a signal has ended it and this command.
        """
        execution = self._execution
        folder = execution.root / name.replace(" ", "-")
        folder.mkdir()
        begin(folder)
        run, started = ProgramRun(name, folder), execution.clock.now()
        try:
            # The lock is that of a process that lives: without it the program ends itself.
            with locked_place(folder) as take_lock, run.log.open("ab") as log:
                take_lock()
                self._run_to_end(execution.starts(log.fileno()), run, list(kills))
            self._drain(started)
        finally:
            end_agents(folder, self._agents)
            self._agents.clear()
        return run

    def _run_to_end(self, starts: Starts, run: ProgramRun, pending: list[Kill]) -> None:
        for count in itertools.count():
            killed_before = len(run.kills) + len(run.ignored)
            code = self._run_once(starts, run, pending, count)
            if self._execution.signals.is_ending:
                raise KeyboardInterrupt
            if code is None:
                return
            if len(run.kills) + len(run.ignored) == killed_before:
                after = f" after the {run.kills[-1][0].kind.value}" if run.kills else ""
                raise NotComparableError(
                    f"{run.name}: expected a program that ends with 0, found exit code "
                    f"{code}{after}",
                    run.last_lines(),
                )

    def _drain(self, started: datetime) -> None:
        """Wait until all saves are durable."""
        problems = drain(
            self._agents,
            DRAIN_SECS,
            started,
            lambda: self._execution.signals.is_ending,
            clock=self._execution.clock,
            note=self._execution.note,
        )
        for problem in problems:
            self._execution.note(problem)

    def _put_order(self, folder: Path, pending: Sequence[Kill]) -> None:
        order = self._order
        if pending:
            kill = pending[0]
            order = msgspec.structs.replace(order, stop_step=kill.step, stop_rank=kill.rank)
        replace_file(folder / ORDER, msgspec.json.encode(order))

    def _run_once(
        self, starts: Starts, run: ProgramRun, pending: list[Kill], count: int
    ) -> int | None:
        """Start the program; return its exit code, None if it has trained to its end."""
        self._put_order(run.folder, pending)
        (run.folder / STOPPED).unlink(missing_ok=True)
        reports = reports_folder(run.folder)
        shutil.rmtree(reports, ignore_errors=True)
        reports.mkdir()
        environment = os.environ | {
            PROOF_VARIABLE: str(run.folder),
            RESTART_VARIABLE: str(count),
        }
        killed_before = len(run.kills)
        try:
            with self._execution.signals.passed_on(lambda: starts.start(environment)) as child:
                code, opened_count = self._attend(child, run, pending, reports)
        finally:
            opened = reported_openings(reports)
            for one in opened:
                self._agents.add(_agent_of(one))
        child.end_rest(self._execution.clock)
        kill_left({report.pid for report in opened}, PROOF_VARIABLE, str(run.folder))
        has_finished = any(end.is_finished for end in reported_ends(reports))
        is_killed = len(run.kills) > killed_before
        is_finished = code is None or (code == 0 and (has_finished or not is_killed))
        if is_killed and is_finished and len(opened) == opened_count:
            # It was not started again, nor by a launcher of its own.
            run.ignored.append(run.kills.pop())
        return None if is_finished else code

    def _attend(
        self, child: Child, run: ProgramRun, pending: list[Kill], reports: Path
    ) -> tuple[int | None, int]:
        """Carry out the kills at their steps until the program ends.

        Returns:
            Its exit code, None if it was ended after the last step of the proof; and how often a
            process had opened a run when it was killed last.
        """
        clock, note = self._execution.clock, self._execution.note
        stopped, until_secs, opened_count = run.folder / STOPPED, math.inf, 0
        steps, moved_secs = dict[int, int](), clock.monotonic()
        while (code := child.wait(POLL_SECS)) is None:
            now_secs = clock.monotonic()
            if until_secs < math.inf and len(reported_openings(reports)) > opened_count:
                until_secs = math.inf  # a launcher of its own has started it again
            if now_secs >= until_secs:
                note(f"{run.name}: it goes on after the signal: it is killed")
                return child.end(0), opened_count
            if steps != (steps := read_steps(run.folder)):
                moved_secs = now_secs
            if now_secs - moved_secs >= self._execution.timeout_secs:
                _kill_all(child, reported_openings(reports))
                _kill(child)
                raise NotComparableError(self._hanging_text(run, steps), run.last_lines())
            if not stopped.exists():
                continue
            stop = decode(stopped.read_bytes(), ProofStop)
            if stop.is_last:
                _kill(child)
                return None, opened_count
            kill = pending.pop(0)
            run.kills.append((kill, stop.step))
            note(f"{run.name}: {kill.kind.value} at step {stop.step}")
            opened = reported_openings(reports)
            opened_count = len(opened)
            self._put_order(run.folder, pending)
            _carry_out(kill, stop, child, run.folder, opened)
            stopped.unlink(missing_ok=True)
            until_secs, moved_secs = clock.monotonic() + GRACE_SECS, clock.monotonic()
        return code, opened_count

    def _hanging_text(self, run: ProgramRun, steps: Mapping[int, int]) -> str:
        at = ", ".join(f"rank {rank} at step {step}" for rank, step in sorted(steps.items()))
        return (
            f"{run.name}: expected a new step within {self._execution.timeout_secs:g} s, "
            f"found {at or 'none, and no manager that was passed one'}: it hangs, or needs a "
            "longer --timeout"
        )


def _kill(child: Child) -> None:
    send(child.pid, signal.SIGKILL)
    while child.wait(POLL_SECS) is None:
        pass


def _carry_out(
    kill: Kill, stop: ProofStop, child: Child, folder: Path, opened: Sequence[TrainerOpened]
) -> None:
    """Do to the program what was chosen, while one of its processes waits."""
    match kill.kind:
        case KillKind.SIGTERM:
            send(child.pid, signal.SIGTERM)
        case KillKind.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stop.pid, signal.SIGKILL)
        case KillKind.HOST:
            # Stopped agents do not write on while the processes that they would report end.
            end_agents(folder, map(_agent_of, opened), lambda: _kill_all(child, opened))
            for run, run_id in {(one.run, one.run_id) for one in opened}:
                # A host of the same name comes back, whose start need not wait for the old one's.
                durable = open_durable(run, SystemClock())
                Leases(durable.fleeting, run_id).remove_before(ATTEMPT_MAX)


def _agent_of(opened: TrainerOpened) -> AgentOfRun:
    return AgentOfRun(run=opened.run, run_id=opened.run_id, host=opened.host)


def _kill_all(child: Child, opened: Sequence[TrainerOpened]) -> None:
    send(child.pid, signal.SIGKILL)
    for one in opened:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)


def end_agents(
    folder: Path, opened: Iterable[AgentOfRun], meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Kill the agents of a program's run, and remove what they have in RAM.

    They are found by the directories of their runs: also the agent of a process that was ended
    before its opening was complete.

    Args:
        folder: the folder of the program's run.
        opened: the agents of complete openings, which may have ended.
        meanwhile: called while the agents are stopped, before they are killed.
    """
    runs = f"{RunLocation.parse(folder).text}/"
    places = {place for one in opened for place in agent_folders(one.run_id, one.host)}
    stopped = set[psutil.Process]()
    is_new = True
    # Until there is no other one: an agent that starts forks once.
    while is_new:
        is_new = False
        for process, config in agent_processes():
            if config.run.startswith(runs) and process not in stopped:
                is_new = True
                stopped.add(process)
                places.add(Path(config.folder))
                with contextlib.suppress(psutil.Error):
                    process.suspend()
    meanwhile()
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(stopped, GRACE_SECS)
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
