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

from holdfast.agent.words import SEAT_COUNT
from holdfast.errors import RunBusyError

log = logging.getLogger(__name__)


class Member(msgspec.Struct, frozen=True, kw_only=True):
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
    """What the file says of a group."""

    group: str
    attempt: int
    count: int
    members: tuple[Member, ...]


@dataclass(slots=True)
class Group:
    """The trainers that belong together; `group` is a word that rank 0 drew."""

    group: str
    attempt: int
    count: int
    members: dict[int, Member] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    is_broken: bool = False

    @property
    def living(self) -> list[Member]:
        """The members that are attached and run."""
        return [m for m in self.members.values() if m.is_alive]

    @property
    def present(self) -> list[Member]:
        """The members that have not left, and whose end was not noticed: a look at no process."""
        gone = self.left | self.ended
        return [m for m in self.members.values() if m.rank not in gone]

    def record(self) -> GroupRecord:
        """What its file says."""
        return GroupRecord(
            group=self.group,
            attempt=self.attempt,
            count=self.count,
            members=tuple(self.members.values()),
        )

    def check_free_for(self, group: str, host: str, run: str) -> None:
        """Checks that a process of another group may begin an attempt.

        A group that lost a member without a word cannot go on, so it does not stand in the way.

        Raises:
            RunBusyError: this group works on the run.
        """
        living = self.living
        if group == self.group or self.is_broken or not living:
            return
        if len(living) + len(self.left) < len(self.members):
            return
        pids = ", ".join(f"rank {m.rank} is process {m.pid}" for m in living)
        raise RunBusyError(
            f"open {run}: attempt {self.attempt} is live on host {host} ({pids}); stop it first, "
            "or open with takeover=True to fence it"
        )


def process_start(pid: int) -> float | None:
    """When the process with that id began, or None where there is none (or only its remains)."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def write_group(path: Path, group: Group | None) -> None:
    """Puts the group into its file; None removes it.

    Without the room for it there is no file, and never an older group's: an agent that follows this
    one learns of the trainers when they come back to it.
    """
    try:
        if group is not None:
            _write_record(path, group)
            return
    except OSError as error:
        log.warning("%s is not written: %s", path, error)
    with contextlib.suppress(OSError):
        path.unlink()


def _write_record(path: Path, group: Group) -> None:
    unfinished = path.with_suffix(".unfinished")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(unfinished, flags, 0o600), "wb") as file:
        file.write(msgspec.json.encode(group.record()))
    unfinished.rename(path)


def read_group(path: Path) -> Group | None:
    """The group that an agent before this one left, if it left one that can be read."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=GroupRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s is no group and is passed over: %s", path, error)
        return None
    members = {member.rank: member for member in record.members}
    return Group(record.group, record.attempt, record.count, members)
