"""Keep a standby process that has imported the program's modules, and start attempts as its forks.

The standby process (`startup/sitecustomize.py`) is the command itself, stopped before its first
line. Its forks become children of this process, which is their subreaper: `holdfast run` waits for
them, and signals their group, as for a process that it has started.

Invariants:
- The standby process is started only after the program has shown, in a cold start, that the
  command runs nothing before it stops: the process that Python's startup named is the command's.
- A fork trains only if `fork` has returned its process.
- Whatever fails here costs a cold start and one line, never an attempt.

See docs/decisions/0056.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.clock import Clock
from holdfast.environment import STANDBY_VARIABLE
from holdfast.quantities import size_text
from holdfast.supervise.attempt_imports import AttemptImports
from holdfast.supervise.command import Child, spawn
from holdfast.supervise.own_folder import own_folder
from holdfast.supervise.python_program import PythonProgram
from holdfast.supervise.standby_process import Answer, StandbyError, StandbyProcess
from holdfast.trainer.process.imports import ImportRecord

STARTUP = Path(__file__).parent / "startup"
IMPORT_SECS = 1800.0
"""How long the standby process may import."""
CHECK_SECS = 2.0
"""How often to look for changed files."""
RENEWALS_MAX = 3
"""How often it is renewed because attempts import other modules than the one before."""
IMPLICIT = {"TORCH_WARM_POOL": "0"}
"""Set while modules are imported: Inductor would start a pool of processes, which has threads."""
_PR_SET_CHILD_SUBREAPER = 36  # From Linux's <linux/prctl.h>.
_libc = ctypes.CDLL(None, use_errno=True)


class Standby:
    """Start the command, after its first attempt as a fork of a standby process.

    Args:
        command: The command.
        program: What it runs.
        preload: Modules to import besides those of the last attempt.
        cache: The folder of this program's files, in which its imports are kept for the next
            `holdfast run`.
        clock: The clock.
        note: Shows one line to the user.
    """

    def __init__(
        self,
        command: Sequence[str],
        program: PythonProgram,
        preload: Sequence[str],
        cache: Path,
        clock: Clock,
        note: Callable[[str], None],
    ) -> None:
        self._command = command
        self._search_path = program.search_path()
        self._preload = list(preload)
        self._clock = clock
        self._note = note
        self._held = contextlib.ExitStack()
        self._folder = self._held.enter_context(own_folder())
        self._imports = AttemptImports(self._folder, cache)
        self._environment: dict[str, str] = {}
        self._own: dict[str, str | None] = dict(IMPLICIT)
        self._process: StandbyProcess | None = None
        """The one that is ready."""
        self._next: StandbyProcess | None = None
        """One that still imports, and replaces it."""
        self._is_due = True
        """Whether another one is needed."""
        self._begun_secs = self._checked_secs = 0.0
        self._renewals = 0
        self._reason = "no attempt has reached its second step"
        """Why no standby process is ready."""
        self._is_over = False

    @property
    def has_trained(self) -> bool:
        """Whether the present attempt has reached its second step."""
        return self._imports.has_trained

    def __enter__(self) -> Standby:
        if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            self._give_up("this process cannot become a subreaper")
        return self

    def __exit__(self, *error: object) -> None:
        self._end_process()
        self._end_next()
        self._held.close()

    def start(self, environment: Mapping[str, str]) -> Child:
        paths = filter(None, (str(STARTUP), environment.get("PYTHONPATH")))
        own = {STANDBY_VARIABLE: str(self._folder), "PYTHONPATH": os.pathsep.join(paths)}
        self._environment = {**environment, **own}
        child = self._fork()
        if child is None:
            if self._imports.has_attempts and not self._is_over:
                self._note(f"holdfast run: cold start: {self._reason}")
            child = Child(spawn(self._command, self._environment))
        self._imports.add_attempt(child.pid)
        return child

    def attend(self, child: Child) -> None:
        if not self.has_trained:
            self._learn(child.pid)
        record = self._imports.record
        try:
            if self._is_due and record is not None and not self._is_over:
                self._begin_next(record)
            if self._process is not None:
                self._watch(self._process)
            if self._next is not None:
                self._await_answer(self._next)
        except StandbyError as error:
            self._give_up(str(error))

    def prepare(self) -> bool:
        """Go on with the imports of a process that is not ready: a cold start would begin anew."""
        process = self._next
        if process is None or self._process is not None:
            return False
        process.hurry()
        try:
            self._await_answer(process)
        except StandbyError as error:
            self._give_up(str(error))
        return self._next is process

    def _fork(self) -> Child | None:
        try:
            if self._process is not None:
                self._end_if_changed(self._process)
            if self._process is not None:
                return self._process.fork(self._environment)
        except StandbyError as error:
            self._give_up(str(error))
        return None

    def _learn(self, pid: int) -> None:
        """Read what the attempt `pid` has imported, once it has reached its second step."""
        record = self._imports.read(pid)
        if record is None:
            if self._imports.has_foreign:
                self._give_up("the command starts the trainers as processes of their own")
            return
        process = self._next or self._process
        if process is not None and self._renewals < RENEWALS_MAX and not process.covers(record):
            self._renewals += 1
            self._end_next()
            self._is_due = True

    def _begin_next(self, record: ImportRecord) -> None:
        """Start a process. The one before serves until this one is ready."""
        if not self._imports.has_begun:
            if self.has_trained:
                self._give_up(f"the command's Python did not import {STARTUP}/sitecustomize.py")
            return
        self._is_due = False
        record = msgspec.structs.replace(record, modules=[*record.modules, *self._preload])
        self._begun_secs = self._clock.monotonic()
        if self._process is None:
            self._reason = "the standby process still imports"
        self._next = StandbyProcess(
            self._command, self._environment, self._search_path, record, self._own
        )

    def _watch(self, process: StandbyProcess) -> None:
        process.poll()
        if self._clock.monotonic() > self._checked_secs + CHECK_SECS:
            self._checked_secs = self._clock.monotonic()
            self._end_if_changed(process)

    def _await_answer(self, process: StandbyProcess) -> None:
        answer = process.poll()
        if answer is None:
            if self._clock.monotonic() > self._begun_secs + IMPORT_SECS:
                self._give_up(f"it still imports after {IMPORT_SECS:.0f} s")
        elif answer.problem is not None:
            self._give_up(answer.problem)
        elif answer.own and self._renewals < RENEWALS_MAX:
            self._renewals += 1
            self._own |= answer.own
            self._end_next()
            self._is_due = True
        else:
            self._take_next(process, answer)

    def _take_next(self, process: StandbyProcess, answer: Answer) -> None:
        self._end_process()
        self._process, self._next = process, None
        missing = sorted({*self._preload} & {*answer.failed})
        if missing:
            self._note(f"holdfast run: standby: {', '.join(missing)} cannot be imported")
        secs = self._clock.monotonic() - self._begun_secs
        share, private = process.memory_bytes()
        self._note(
            f"holdfast run: standby: {len(answer.modules)} modules imported in {secs:.1f} s, "
            f"{size_text(share)} of memory, of which {size_text(private)} are not shared"
        )
        if self._own.keys() == IMPLICIT.keys():
            self._keep(process.record)

    def _keep(self, record: ImportRecord) -> None:
        """Keep the imports for the next `holdfast run` of the program."""
        try:
            self._imports.keep(record)
        except OSError as error:
            self._note(f"holdfast run: standby: cannot write {error.filename}: {error.strerror}")

    def _end_if_changed(self, process: StandbyProcess) -> None:
        path = process.changed_file()
        if path is not None:
            self._reason = f"{path} has changed"
            self._end_process()
            self._end_next()
            self._is_due = True

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def _end_next(self) -> None:
        if self._next is not None:
            self._next.end()
            self._next = None

    def _give_up(self, reason: str) -> None:
        if not self._is_over:
            self._note(f"holdfast run: no standby process: {reason}; restarts are cold starts")
        self._is_over = True
        self._end_process()
        self._end_next()
