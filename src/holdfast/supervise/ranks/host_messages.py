"""What the launchers of a job's hosts send to each other: one line of JSON each.

The launcher that leads gives its own host the same orders, and gets the same reports from it.
"""

from __future__ import annotations

import msgspec

from holdfast.supervise.ranks.leadership import Vote
from holdfast.supervise.ranks.membership import Joined
from holdfast.trainer.process.rank_link import Order, Report


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message of both ends.

    Attributes:
        host: The host, as its place in the list of hosts.
        options: The list of hosts and the size of the job, as options; the same on all hosts.
        addresses: The addresses of the host's network interfaces.
    """

    host: int
    options: str
    addresses: tuple[str, ...]


class Voted(msgspec.Struct, frozen=True, tag=True):
    """The vote of a launcher, sent when it changes and every second."""

    vote: Vote


class Joining(msgspec.Struct, frozen=True, tag=True):
    """A host follows the leader from now on.

    Attributes:
        number: How often it has joined a leader.
    """

    number: int
    joined: Joined


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The leader has received `Joining`; orders that it sent before are outdated."""

    number: int


class Reported(msgspec.Struct, frozen=True, tag=True):
    """A process of a host has sent a report."""

    member: int
    report: Report


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A process of a host has ended."""

    member: int
    reason: str


class Ending(msgspec.Struct, frozen=True, tag=True):
    """A host has received a signal that ends the job."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """Start a process."""

    member: int


class Ordered(msgspec.Struct, frozen=True, tag=True):
    """Give an order to a process."""

    member: int
    order: Order


class Killed(msgspec.Struct, frozen=True, tag=True):
    """Kill a process."""

    member: int


class Over(msgspec.Struct, frozen=True, tag=True):
    """The job is over. The processes are released, or ended for the reason."""

    reason: str
    has_finished: bool


Message = (
    Hello
    | Voted
    | Joining
    | Welcome
    | Reported
    | Ended
    | Ending
    | Started
    | Ordered
    | Killed
    | Over
)
