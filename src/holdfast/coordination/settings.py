"""The times and bounds of the agreement; one value for all hosts of a run.

A heartbeat is what a host says when it has nothing new to say. All waiting is a number of
heartbeats, so that a run of a thousand hosts, which beats slower, waits longer.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN_MAX = 1 << 16
"""The most steps that a target is put above what was published."""

HELD_MAX = 64
"""The most checkpoints that one host cares for at a time."""

PRESERVED_MAX = 24
"""How many of those the RAM tier's policy may keep, so that there is room for what comes."""

SUCCESSORS_MAX = 16
"""The hosts that may lead where the leader is silent, itself among them."""

PULLS_MAX = 4
"""The parts that one host pulls at the same time."""

TRIES_MAX = 3
"""How often storage is asked for one thing before it counts as failed."""

DELETED_MAX = 64
"""The newest checkpoints that were removed on a host, which it tells every leader."""

ENDED_MAX = 16
"""The hosts on which ranks ended first, whose ranks all others are told of."""

OUTCOMES_MAX = 256
"""The checkpoints whose end a leader remembers, so that a late report does not revive them."""

LEASE_RENEW_SECS = 5.0
"""How often the host that leads an attempt renews its lease while the attempt's trainers live."""

LEASE_SECS = 30.0
"""The age at which a lease has run out: its host is taken for lost."""

LEASE_READ_SECS = 1.0
"""How often a start reads a lease that it waits for."""

HOSTS_A_HEARTBEAT = 200
"""Above that many hosts the heartbeat grows, so that the leader has as much to hear a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run may choose, and how long a heartbeat takes.

    Attributes:
        copies: in how many failure domains each part is to stand.
        heartbeat_secs: how often a host tells its leader what it told before.
        retry_secs: after how long what was not acknowledged is told again.
    """

    copies: int = 2
    heartbeat_secs: float = 1.0
    retry_secs: float = 0.25

    @property
    def silence_secs(self) -> float:
        """After that long without a word from its leader a host turns to the next one."""
        return 5 * self.heartbeat_secs

    @property
    def lost_secs(self) -> float:
        """After that long without a word a host's RAM is not counted on any more."""
        return 10 * self.heartbeat_secs

    @property
    def gather_secs(self) -> float:
        """How long a new attempt waits for the hosts that may hold something."""
        return 10 * self.heartbeat_secs

    @property
    def reporting_secs(self) -> float:
        """How long a start waits until the hosts of all its ranks have reported.

        An agent may take a minute to start, so this is longer.
        """
        return 90 * self.heartbeat_secs

    @property
    def joining_secs(self) -> float:
        """How long a host waits for the attempt of trainers that came to it.

        It is longer than all that a start waits for: reports, an answer, a lease, and storage.
        """
        return 150 * self.heartbeat_secs + LEASE_SECS

    @property
    def probe_secs(self) -> float:
        """How long a new attempt waits for a word from the agent that leads the one before."""
        return 3 * self.heartbeat_secs

    @property
    def deleting_secs(self) -> float:
        """How long whoever deletes a checkpoint waits until no host holds anything of it."""
        return 30 * self.heartbeat_secs

    @property
    def storage_retry_secs(self) -> float:
        """After how long what storage refused is tried again."""
        return 2 * self.heartbeat_secs


def heartbeat_for(host_count: int) -> float:
    """The heartbeat, in seconds, of a run of that many hosts."""
    return max(1.0, host_count / HOSTS_A_HEARTBEAT)
