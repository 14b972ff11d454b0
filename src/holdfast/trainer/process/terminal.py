"""Show Holdfast's log in the terminal of a program that has set up no logging.

`HOLDFAST_LOG` chooses how much: `debug`, `info` (the default), `warning` or `off`. A process with
handlers of its own sees each line once, through them. The level stays what the program chose: it
gave the root logger another level than the default, or the logger `holdfast` a level or a handler.
A handler at the root alone is no choice of the program, since importing Grain or Orbax adds one.

Rule for the lines: at `info` there is one for an opening, a restore, a preemption, a fallback, a
large change of an interval, and an agent that stays behind, and none for a save.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator

from holdfast.environment import LOG_VARIABLE
from holdfast.host.wire.protocol import Detached
from holdfast.quantities import secs_text, size_text
from holdfast.store.location import RunLocation
from holdfast.trainer.opening.agent_place import AgentPlace
from holdfast.trainer.options import RemoteTier
from holdfast.trainer.restore.restoring import RestoreReport

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "off": logging.CRITICAL + 1,
}
_NAMES = {logging.WARNING: "warning: ", logging.ERROR: "error: "}

_SOURCES = {
    "ram": "RAM",
    "peer": "other hosts' RAM",
    "durable": "durable storage",
    "remote": "the remote tier",
}
STEP_VARIABLE = "SLURM_STEP_ID"
"""Slurm sets it for the processes of a job step, and kills what they leave behind."""
STAYING_SECS = 10.0
"""An agent that leaves sooner is not worth a line."""

_log = logging.getLogger("holdfast")
_lock = threading.Lock()


class TerminalHandler(logging.Handler):
    """Writes lines to standard error while the program has no handler of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = "holdfast"
        self.level_set: int | None = None
        """The level that the logger was given because nobody had chosen one."""

    def emit(self, record: logging.LogRecord) -> None:
        if self.level_set is not None and _has_chosen_level():
            # The program has set up its logging after the manager was opened.
            if _log.level == self.level_set:
                _log.setLevel(logging.NOTSET)
            self.level_set = None
        if any(_handlers_of_program()):
            return
        line = f"{self.prefix}: {_NAMES.get(record.levelno, '')}{self.format(record)}\n"
        try:
            # Looked up for each line: a notebook or a test replaces the stream.
            sys.stderr.write(line)
            sys.stderr.flush()
        except (AttributeError, OSError, ValueError):
            # Without a terminal, or with a closed one, the line has no reader.
            return


_handler = TerminalHandler()


def set_log(is_shown: bool, rank: int, process_count: int) -> None:
    """Show the log in the terminal, as the module says, or write nothing there."""
    if is_shown:
        show_log(rank, process_count)
    else:
        hide_log()


def hide_log() -> None:
    """Write nothing to the terminal; leave the logger to the program. May be called again."""
    with _lock:
        if _handler.level_set is not None and _log.level == _handler.level_set:
            _log.setLevel(logging.NOTSET)
        _handler.level_set = None
        _log.removeHandler(_handler)
        if not _log.handlers:
            # Without any handler Python itself writes warnings to standard error.
            _log.addHandler(logging.NullHandler())


def show_log(rank: int, process_count: int) -> None:
    """Show the log in the terminal, as the module says. May be called again."""
    with _lock:
        chosen = os.environ.get(LOG_VARIABLE, "").strip().lower()
        if chosen in LEVELS:
            _log.setLevel(LEVELS[chosen])
        elif _log.level == logging.NOTSET and not _has_chosen_level():
            _handler.level_set = logging.INFO
            _log.setLevel(logging.INFO)
        _handler.prefix = "holdfast" if process_count == 1 else f"holdfast rank {rank}"
        if _handler not in _log.handlers:
            _log.addHandler(_handler)
        if chosen and chosen not in LEVELS:
            _log.warning(
                "%s is %r, expected one of %s; info is used",
                LOG_VARIABLE,
                chosen,
                ", ".join(LEVELS),
            )


def shows_lines(level: int) -> bool:
    """Return whether lines of a level are shown by this module, and not by the program."""
    is_own = _handler in _log.handlers and not any(_handlers_of_program())
    return is_own and _log.isEnabledFor(level)


def opening_text(
    directory: object, place: AgentPlace, remote: RemoteTier | None, *, has_copies: bool
) -> str:
    """Return the line about an opened run; `has_copies`: in other hosts' RAM."""
    if place.origin is not None:
        where = f"attempt {place.attempt}, its newest checkpoint is of step {place.origin.step}"
    elif place.attempt.number == 1:
        where = "a new run"
    else:
        where = f"attempt {place.attempt}, without a checkpoint so far"
    durable = "the bucket" if RunLocation(str(directory)).is_url else "disk"
    has_ram = place.ram_folder is not None
    goes_to = f"RAM ({place.folder.parent}) and {durable}" if has_ram else f"{durable}, without RAM"
    if remote is not None:
        goes_to += f", and from there to {remote.directory}"
    there = "in the bucket" if durable == "the bucket" else "on disk"
    loss = "a failure costs the steps since the last save"
    if has_ram and has_copies:
        loss = (
            "a lost process costs the steps since the last save, a lost host those since the last "
            "one that another host has"
        )
    elif has_ram:
        loss = (
            "a lost process costs the steps since the last save, a lost host those since the last "
            f"one {there}"
        )
    if remote is not None:
        loss += f", a lost disk those since the last one in {remote.directory}"
    return f"opened {directory}: {where}; checkpoints go to {goes_to}; {loss}"


def restore_text(report: RestoreReport) -> str:
    """Return what was restored, from where, and how long that took."""
    sources = [
        f"{size_text(size_bytes)} from {_SOURCES.get(tier, tier)}"
        for tier, size_bytes in report.sources.items()
    ]
    read = ", ".join([*sources, f"{report.seconds:.2f} s"])
    return f"step {report.step} of attempt {report.attempt} ({read})"


def staying_text(directory: object, left: Detached) -> str | None:
    """Return the line about an agent that stays behind; None if it does not stay for long."""
    if left.is_writing:
        until = "until its checkpoints are durable"
    elif left.copies_to:
        until = f"until the newest checkpoint is in {left.copies_to}"
    elif left.leaves_in_secs is not None and left.leaves_in_secs >= STAYING_SECS:
        until = f"for {secs_text(left.leaves_in_secs)}"
    else:
        return None
    ram = f"{size_text(left.ram_bytes)} of RAM"
    if STEP_VARIABLE in os.environ:
        return (
            f"Slurm ends the agent (process {left.pid}) with the job step, and {ram} stay for the "
            "next start on this host; `holdfast clean` frees them"
        )
    return (
        f"the agent (process {left.pid}) stays {until}, with {ram} for the next start; "
        f"`holdfast stop {directory}` ends it"
    )


def _has_chosen_level() -> bool:
    """Return whether the program decides which of Holdfast's lines are shown."""
    is_set_up = any(not isinstance(h, TerminalHandler | logging.NullHandler) for h in _log.handlers)
    return is_set_up or not _log.propagate or logging.getLogger().level != logging.WARNING


def _handlers_of_program() -> Iterator[logging.Handler]:
    """Yield the handlers that the program has set up for Holdfast's lines."""
    for logger in (_log, logging.getLogger()) if _log.propagate else (_log,):
        for handler in logger.handlers:
            if not isinstance(handler, TerminalHandler | logging.NullHandler):
                yield handler
