"""Report the end of a manager to the `holdfast run` that has started this process.

`holdfast run` names a folder of its own in `HOLDFAST_SUPERVISED`. Each manager that is closed adds
one file to it, before its process ends, so that the supervisor finds all reports when it sees the
exit. A process that is killed, or never closes its manager, leaves no report. Without the variable
nothing is written.

`trainer_left` and `trainer_lost` of the run's events are no substitute: an agent writes them from a
thread of its own, and may be killed together with its trainers. See docs/decisions/0051.
"""

from __future__ import annotations

import logging
import os
import secrets
import traceback
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.environment import SUPERVISED_VARIABLE
from holdfast.format.json_codec import decode

ERROR_CHARS_MAX = 500

log = logging.getLogger(__name__)


class TrainerEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one manager was closed.

    Attributes:
        run: The run's path or URL.
        rank: The trainer's rank.
        pid: Its process.
        last_step: The last step passed to `save`; None: none.
        is_preempted: A preemption was announced to the job.
        is_finished: `finish` was called for the training's last step.
        error: The exception that left the `with` block, as `Type: message`; empty: none did.
        error_place: The line that raised it, as `file:line`; empty: not known.
    """

    run: str
    rank: int
    pid: int
    last_step: int | None
    is_preempted: bool
    is_finished: bool
    error: str = ""
    error_place: str = ""


def error_text(error: BaseException) -> str:
    """Return the type and the first line of the message of an exception."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:ERROR_CHARS_MAX]


def place_text(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of an exception's traceback; empty without one."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def report_end(end: TrainerEnd) -> None:
    """Write the report, if this process has a supervisor."""
    folder = os.environ.get(SUPERVISED_VARIABLE)
    if not folder:
        return
    path = Path(folder) / f"{end.pid}-{secrets.token_hex(4)}.json"
    try:
        path.write_bytes(msgspec.json.encode(end))
    except OSError as error:
        # The folder is gone where the supervisor was killed.
        log.debug("the end of this trainer is not reported to holdfast run: %s", error)


def reported_ends(folder: Path) -> Iterator[TrainerEnd]:
    """Yield the reports in a folder, without those that a killed process has not written whole."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield decode(path.read_bytes(), TrainerEnd)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.debug("%s is not read: %s", path, error)
