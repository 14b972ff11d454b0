"""The trainers of one attempt: who they are, which of them live, and whose turn it is.

A trainer is known by its process: the kernel tells the agent who connected, and wakes it when that
process ends, however it ends. The group stands in a file too, so that an agent that was killed is
followed by one that knows whom to expect.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

from holdfast.agent.control_block import SEAT_COUNT
from holdfast.format.json_codec import decode
from holdfast.format.names import CheckpointId

log = logging.getLogger(__name__)


class TrainerProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer process; `started` tells it from another process that got the same pid."""

    rank: Annotated[int, msgspec.Meta(ge=0)]
    seat: Annotated[int, msgspec.Meta(ge=0, lt=SEAT_COUNT)]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    started: float

    @property
    def is_alive(self) -> bool:
        """Whether that very process still runs."""
        return process_start(self.pid) == self.started


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says: the trainers here, and what the agreement has told last.

    It stays while no trainer lives: `members` are those that live or lived here. `addresses` are
    where the agents of other hosts are reached. `domain` is this host's failure domain.
    `ended_attempt` is the newest attempt of which a trainer here has ended.
    """

    group: str
    attempt: int
    count: int
    members: tuple[TrainerProcess, ...] = ()
    is_broken: bool = False
    leader: str = ""
    successors: tuple[str, ...] = ()
    origin: tuple[int, int] | None = None
    addresses: dict[str, str] = {}
    domain: str = ""
    copies: Annotated[int, msgspec.Meta(ge=1)] = 2
    heartbeat_secs: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 1.0
    ended_attempt: int = 0


@dataclass(slots=True)
class TrainerGroup:
    """The trainers on this host that belong together; `group` is a word that rank 0 drew.

    `attempt` is 0 until it has begun. `leader` is the host of rank 0. Those that `left` said so,
    those that are `lost` did not. Notices from `cursor` on concern them.
    """

    group: str
    attempt: int
    count: int
    leader: str
    origin: CheckpointId | None = None
    members: dict[int, TrainerProcess] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    cursor: int = 0

    @property
    def is_broken(self) -> bool:
        """Whether it lost a member without a word: it cannot go on."""
        return bool(self.lost)

    @property
    def present(self) -> list[TrainerProcess]:
        """The members that are attached, by ascending rank."""
        gone = self.left | self.lost
        return [self.members[rank] for rank in sorted(self.members) if rank not in gone]


def process_start(pid: int) -> float | None:
    """When the process with that id began, or None where there is none (or only its remains)."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def write_record(path: Path, record: GroupRecord | None) -> None:
    """Puts the record into its file; None removes it.

    Without the room for it there is no file, and never an older record: an agent that follows this
    one learns of the trainers when they come back to it.
    """
    try:
        if record is not None:
            _write(path, msgspec.json.encode(record))
            return
    except OSError as error:
        log.warning("%s is not written: %s", path, error)
    with contextlib.suppress(OSError):
        path.unlink()


def _write(path: Path, data: bytes) -> None:
    unfinished = path.with_suffix(".unfinished")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(unfinished, flags, 0o600), "wb") as file:
        file.write(data)
    unfinished.rename(path)


def read_record(path: Path) -> GroupRecord | None:
    """The record that an agent before this one left, if it left one that can be read."""
    try:
        return decode(path.read_bytes(), GroupRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s is no group and is passed over: %s", path, error)
        return None
