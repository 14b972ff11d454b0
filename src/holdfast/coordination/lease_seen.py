"""A lease, as a start that cannot ask the agent of its attempt reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSeen:
    """A lease as it was read.

    Attributes:
        host, pid, user: the trainer that the lease is for, and the user of its agent.
        stamp: a value that each renewal changes.
        age_secs: the time since the last renewal, by the clock of the file system alone.
        is_storing: the trainers have ended, and their agent stores what they have left.
    """

    host: str
    pid: int
    user: str
    stamp: str
    age_secs: float
    is_storing: bool = False

    @property
    def holder(self) -> str:
        """The host, process and user that hold the lease, as text for users."""
        return f"host {self.host} (process {self.pid} of user {self.user})"
