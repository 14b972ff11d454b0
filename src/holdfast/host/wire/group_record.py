"""Define the record of a host's trainers, which an agent leaves to the next one in a file.

A trainer is identified by its process: the kernel reports the pid of each connection, and notifies
the agent when that process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

from holdfast.format.json_codec import decode
from holdfast.format.names import NO_ATTEMPT, AttemptId, CheckpointId
from holdfast.host.wire.control_block import SEAT_COUNT
from holdfast.store.files.whole_file import replace_file

log = logging.getLogger(__name__)


class TrainerProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer process; `started` distinguishes it from a later process with the same pid."""

    rank: Annotated[int, msgspec.Meta(ge=0)]
    seat: Annotated[int, msgspec.Meta(ge=0, lt=SEAT_COUNT)]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    started: float

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return process_start(self.pid) == self.started


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the group's file: the trainers here, and the coordination's latest state.

    The file stays while no trainer is alive.

    Attributes:
        run: the run's directory.
        members: the trainers that run or ran here.
        addresses: where the agents of other hosts are reached.
        domain: this host's failure domain.
        ended_attempt: the newest attempt of which a trainer here has ended.
    """

    group: str
    attempt: AttemptId
    count: int
    run: str = ""
    members: tuple[TrainerProcess, ...] = ()
    is_broken: bool = False
    leader: str = ""
    successors: tuple[str, ...] = ()
    origin: CheckpointId | None = None
    addresses: dict[str, str] = {}
    domain: str = ""
    copies: Annotated[int, msgspec.Meta(ge=1)] = 2
    heartbeat_secs: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 1.0
    ended_attempt: AttemptId = NO_ATTEMPT


def process_start(pid: int) -> float | None:
    """Return the start time of the process with that id; None if there is none, or a zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def write_record(path: Path, record: GroupRecord | None) -> None:
    """Write the record to its file; None removes the file.

    If there is no room, the file is removed, so that it never holds an older record: the next agent
    learns of the trainers when they reattach.
    """
    try:
        if record is not None:
            # Whole or not at all: the agent may be killed at any time.
            replace_file(path, msgspec.json.encode(record))
            return
    except OSError as error:
        log.warning("cannot write %s: %s", path, error)
    with contextlib.suppress(OSError):
        path.unlink()


def read_record(path: Path) -> GroupRecord | None:
    """Return the record that a previous agent left; None if there is none that can be read."""
    try:
        return decode(path.read_bytes(), GroupRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.warning("ignored %s, which is no record of a group: %s", path, error)
        return None
