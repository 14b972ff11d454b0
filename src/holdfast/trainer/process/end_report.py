"""Report what this process does to the `holdfast run` or `holdfast prove` that has started it.

`holdfast run` names a folder of its own in `HOLDFAST_SUPERVISED`, `holdfast prove` one in
`HOLDFAST_PROOF`; a process of both reports to both. Each manager that is opened or
closed adds a file to it, and so does each exception that leaves a `with` block, or the program once
it has opened a manager, before anything else is done about it. So the supervisor finds all reports
when it sees the exit. A process that is killed reports no end. Without a variable nothing
is written.

`trainer_left` and `trainer_lost` of the run's events are no substitute: an agent writes them from a
thread of its own, and may be killed together with its trainers. See docs/decisions/0051.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import secrets
import sys
import sysconfig
import traceback
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.identity import absence_text
from holdfast.environment import PROOF_VARIABLE, SUPERVISED_VARIABLE
from holdfast.format.json_codec import decode
from holdfast.host.wire.config import AgentConfig
from holdfast.store.location import RunLocation
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.process.stack_dumps import write_stacks_on_demand
from holdfast.trainer.save.save_schedule import SaveSchedule

ERROR_CHARS_MAX = 500
CAUSES_MAX = 8
OWN_FOLDER = os.path.join(Path(__file__).parents[2], "")
"""Where Holdfast's own code is, which is no line of the program."""
FOLLOWING_KINDS = frozenset(("ProcessLostError", "DistBackendError", "DistNetworkError"))
"""Exceptions of a rank whose peers are gone."""
_FOLLOWING = re.compile(
    r"(closed|reset) by peer|connectFullMesh|heartbeat.*(timed out|timeout)|"
    r"coordination service|UNAVAILABLE:|Timed out waiting \d+ms for (send|recv)",
    re.IGNORECASE,
)

log = logging.getLogger(__name__)
Report = TypeVar("Report", bound=msgspec.Struct)


class TrainerOpened(msgspec.Struct, frozen=True, kw_only=True):
    """A manager that was opened, and its agent.

    Attributes:
        run: The run's path or URL.
        run_id: The run's id.
        host: The host, as its agent names it.
        attempt: The number of the attempt.
        rank: The trainer's rank.
        pid: Its process.
        time_secs: When, by the host's monotonic clock.
        is_alone: The job has no other process.
    """

    run: str
    run_id: str
    host: str
    attempt: int
    rank: int
    pid: int
    time_secs: float
    is_alone: bool = False


class TrainerEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one manager was closed.

    Attributes:
        run: The run's path or URL.
        rank: The trainer's rank.
        pid: Its process.
        last_step: The last step passed to `save`; None: none.
        is_preempted: A preemption was announced to the job.
        is_finished: `finish` was called for the training's last step.
        announced_secs: When the preemption was announced to this process, by the host's monotonic
            clock; None: it was not.
        lost_secs: When this process first saw that another rank had ended; None: it saw none.
        is_gone: The run was not at its path any more.
    """

    run: str
    rank: int
    pid: int
    last_step: int | None
    is_preempted: bool
    is_finished: bool
    announced_secs: float | None = None
    lost_secs: float | None = None
    is_gone: bool = False


class TrainerError(msgspec.Struct, frozen=True, kw_only=True):
    """An exception that has left a manager's `with` block, or the program.

    Attributes:
        rank: The trainer's rank.
        pid: Its process.
        last_step: The last step passed to `save`; None: none.
        time_secs: When it was raised, by the host's monotonic clock.
        text: The exception, as `Type: message`.
        place: The innermost line of the program that raised it, as `file:line`; of a library, if
            the program has none; empty: not known.
        kinds: The names of its classes, and those of the exceptions that caused it.
        errno: The error of the operating system among them; None: none.
        is_alone: The job has no other process.
    """

    rank: int
    pid: int
    last_step: int | None
    time_secs: float
    text: str
    place: str
    kinds: tuple[str, ...]
    errno: int | None = None
    is_alone: bool = False


def trainer_error(
    error: Exception,
    *,
    rank: int,
    last_step: int | None,
    time_secs: float,
    is_alone: bool = False,
) -> TrainerError:
    """Return the report of an exception."""
    lines = [line.strip() for line in str(error).splitlines()]
    # A list that a first line announces.
    shown_count = 2 if lines and lines[0].endswith(":") else 1
    chain: list[BaseException] = [error]
    while len(chain) < CAUSES_MAX and (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    kinds = [kind.__name__ for link in chain for kind in type(link).__mro__[:-2]]
    numbers = [link.errno for link in chain if isinstance(link, OSError)]
    return TrainerError(
        rank=rank,
        pid=os.getpid(),
        last_step=last_step,
        time_secs=time_secs,
        text=f"{type(error).__name__}: {' '.join(lines[:shown_count])}"[:ERROR_CHARS_MAX],
        place=place_text(error.__traceback__),
        kinds=tuple(dict.fromkeys(kinds)),
        errno=next((number for number in numbers if number is not None), None),
        is_alone=is_alone,
    )


def follows_lost_process(error: TrainerError) -> bool:
    """Return whether an exception only follows from the end of another process of the job."""
    if error.is_alone:
        return False
    return bool(FOLLOWING_KINDS.intersection(error.kinds) or _FOLLOWING.search(error.text))


def place_text(trace: TracebackType | None) -> str:
    """Return `file:line` of the innermost frame of the program in a traceback; empty: no frame."""
    frames = traceback.extract_tb(trace)
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith((*libraries, "<frozen", OWN_FOLDER))
    ]
    innermost = (own or frames)[-1:]
    return "".join(f"{frame.filename}:{frame.lineno}" for frame in innermost)


class SupervisorLink:
    """The folders of reports, and what a report says of this process.

    Owned by the training thread.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._opened: TrainerOpened | None = None
        self._steps: weakref.ref[SaveSchedule] | None = None
        self._reported_id = 0
        """No reference: the frames of an exception hold what the program wants to free."""

    def begin_manager(
        self, config: AgentConfig, session: AgentSession, steps: SaveSchedule
    ) -> TrainerOpened:
        """Follow a manager that was opened; return its report, for `report_end`."""
        self._steps, self._reported_id = weakref.ref(steps), 0
        self._opened = TrainerOpened(
            run=config.run,
            run_id=config.run_id,
            host=config.host,
            attempt=session.place.number,
            rank=session.rank,
            pid=os.getpid(),
            time_secs=SystemClock().monotonic(),
            is_alone=session.is_alone,
        )
        self._write(self._opened, "open")
        return self._opened

    def report_end(
        self,
        opened: TrainerOpened,
        *,
        last_step: int | None,
        is_preempted: bool,
        is_finished: bool,
        announced_secs: float | None,
        lost_secs: float | None,
    ) -> None:
        """Report that a manager was closed, which need not be the newest; see `TrainerEnd`."""
        is_url = RunLocation(opened.run).is_url
        end = TrainerEnd(
            run=opened.run,
            rank=opened.rank,
            pid=os.getpid(),
            last_step=last_step,
            is_preempted=is_preempted,
            is_finished=is_finished,
            announced_secs=announced_secs,
            lost_secs=lost_secs,
            is_gone=not is_url and bool(absence_text(opened.run, opened.run_id, SystemClock())),
        )
        self._write(end, "end")

    def _last_step(self) -> int | None:
        steps = self._steps() if self._steps is not None else None
        return steps.last if steps is not None and steps.last >= 0 else None

    def report_error(self, error: BaseException | None, time_secs: float) -> None:
        """Report an exception, once; those that only end the process, as `SystemExit`, are not."""
        if isinstance(error, Exception) and id(error) != self._reported_id:
            self._reported_id = id(error)
            opened = self._opened
            report = trainer_error(
                error,
                rank=opened.rank if opened is not None else 0,
                last_step=self._last_step(),
                time_secs=time_secs,
                is_alone=opened is not None and opened.is_alone,
            )
            self._write(report, "error")

    def _write(self, report: TrainerOpened | TrainerEnd | TrainerError, kind: str) -> None:
        name = f"{report.pid}-{secrets.token_hex(4)}.{kind}.json"
        for folder in self._folders:
            try:
                (folder / name).write_bytes(msgspec.json.encode(report))
            except OSError as error:
                # The folder is gone where the supervisor was killed.
                log.debug("this trainer's %s is not reported to %s: %s", kind, folder, error)


@functools.cache
def supervisor_link() -> SupervisorLink | None:
    """Return this process's link to its supervisor; None: it has none.

    From the first call on, an exception that ends the program is reported too, and the stacks of
    this process are written when the supervisor asks for them.
    """
    supervised, proof = (os.environ.get(v) for v in (SUPERVISED_VARIABLE, PROOF_VARIABLE))
    folders = [Path(supervised)] if supervised else []
    folders += [reports_folder(Path(proof))] if proof else []
    if not folders:
        return None
    link, earlier = SupervisorLink(folders), sys.excepthook

    def report_and_show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        link.report_error(error, SystemClock().monotonic())
        earlier(kind, error, trace)

    sys.excepthook = report_and_show
    try:
        write_stacks_on_demand(folders[0])
    except (OSError, ValueError, RuntimeError) as error:
        log.debug("the stacks of a hang will not be shown: %s", error)
    return link


def reports_folder(proof: Path) -> Path:
    """Return the folder of reports in that of a program's run for `holdfast prove`."""
    return proof / "reports"


def reported_openings(folder: Path) -> list[TrainerOpened]:
    """Return the managers that were opened, as reported in a folder."""
    return [*_read(folder, "open", TrainerOpened)]


def reported_ends(folder: Path) -> list[TrainerEnd]:
    """Return the ends reported in a folder, without those that were not written whole."""
    return [*_read(folder, "end", TrainerEnd)]


def reported_errors(folder: Path) -> list[TrainerError]:
    """Return the errors reported in a folder, in the order of their times."""
    return sorted(_read(folder, "error", TrainerError), key=lambda error: error.time_secs)


def _read(folder: Path, kind: str, content: type[Report]) -> Iterator[Report]:
    for path in sorted(folder.glob(f"*.{kind}.json")):
        try:
            yield decode(path.read_bytes(), content)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.debug("%s is not read: %s", path, error)
