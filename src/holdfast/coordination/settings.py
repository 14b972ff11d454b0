"""The times and bounds of coordination; all hosts of a run use the same values.

A heartbeat is a message that repeats what was sent before. Waits between hosts are multiples of the
heartbeat: a run of a thousand hosts has a longer heartbeat and therefore waits longer.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN_MAX = 1 << 16
"""The most steps between a target and the highest published step."""

HELD_MAX = 64
"""The most checkpoints that one host tracks at a time."""

PRESERVED_MAX = 24
"""How many of those the RAM tier's policy may keep; the rest is room for new checkpoints."""

SUCCESSORS_MAX = 16
"""The hosts that may lead when the leader is silent, the leader included."""

PULLS_MAX = 4
"""The most parts that one host pulls at the same time."""

TRIES_MAX = 3
"""How often one storage request is tried before it counts as failed."""

DELETED_MAX = 64
"""The most deleted checkpoints that a host reports to its leader; it keeps the newest."""

ENDED_MAX = 16
"""The hosts whose ended ranks a leader reports to all others: the first ones that lost any."""

QUIET_MAX = 16
"""The quiet hosts that a leader reports to all others, in the order of their names."""

OUTCOMES_MAX = 256
"""The checkpoints whose outcome a leader remembers, so that a late report does not revive them."""

LEASE_RENEW_SECS = 5.0
"""How often the host that leads an attempt renews its lease while the attempt's trainers live."""

LEASE_SECS = 30.0
"""The age at which a lease has expired: its host counts as lost."""

STORING_SECS = 60.0
"""How long a start waits for an agent elsewhere that stores what its dead trainers have left."""

LEASE_READ_SECS = 1.0
"""How often a start reads the lease whose expiry it waits for."""

POLLS_PER_PAUSE = 32
"""How often the published steps are read in the time that has passed since they last changed."""

PAUSED_POLL_SECS_MAX = 1.0
"""The longest time between two of these readings."""

HOSTS_A_HEARTBEAT = 200
"""Above that many hosts the heartbeat grows, to bound a leader's messages per second."""


def step_poll_secs(training_secs: float, paused_secs: float) -> float:
    """Return when to read the published steps again.

    Args:
        training_secs: The time between two readings while steps are made.
        paused_secs: How long none was made: a compilation, an evaluation, or a trainer that stands
            still costs few readings, and its next step is seen after a small part of the pause.
    """
    return max(training_secs, min(paused_secs / POLLS_PER_PAUSE, PAUSED_POLL_SECS_MAX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of a run and its heartbeat; all other times follow from them.

    Attributes:
        copies: the number of failure domains that should hold each part.
        heartbeat_secs: how often a host repeats its last report to its leader.
        retry_secs: how long a host waits for an acknowledgement before it sends again.
    """

    copies: int = 2
    heartbeat_secs: float = 1.0
    retry_secs: float = 0.25

    @property
    def silence_secs(self) -> float:
        """How long a leader may be silent before a host follows the next successor."""
        return 5 * self.heartbeat_secs

    @property
    def quiet_secs(self) -> float:
        """How long a host may send nothing before calls that wait for its parts are notified."""
        return 3 * self.heartbeat_secs

    @property
    def lost_secs(self) -> float:
        """How long a host may be silent before its RAM counts as lost."""
        return 10 * self.heartbeat_secs

    @property
    def unprotected_secs(self) -> float:
        """How long saves may wait, while no checkpoint is protected, before that is reported."""
        return 30 * self.heartbeat_secs

    @property
    def gather_secs(self) -> float:
        """How long a new attempt waits for hosts that may hold parts."""
        return 10 * self.heartbeat_secs

    @property
    def reporting_secs(self) -> float:
        """How long a start waits for the reports of all its ranks' hosts.

        This is longer than a minute, which an agent may take to start.
        """
        return 90 * self.heartbeat_secs

    @property
    def joining_secs(self) -> float:
        """How long a host waits for the attempt of the trainers that joined it.

        This is longer than the sum of a start's waits: reports, an answer, a lease, and storage.
        """
        return 150 * self.heartbeat_secs + LEASE_SECS + STORING_SECS

    @property
    def probe_secs(self) -> float:
        """How long a start waits for an answer from the leader of the previous attempt."""
        return 3 * self.heartbeat_secs

    @property
    def deleting_secs(self) -> float:
        """How long a delete waits for the confirmation that no host holds the checkpoint."""
        return 30 * self.heartbeat_secs

    @property
    def placing_secs(self) -> float:
        """How long a leader waits between two placements of replicas, while hosts join.

        Placing them takes a time for each part. A small run does so at once.
        """
        return self.heartbeat_secs / 20 if self.heartbeat_secs > 1.0 else 0.0

    @property
    def storage_retry_secs(self) -> float:
        """How long to wait before a failed storage request is tried again."""
        return 2 * self.heartbeat_secs


def heartbeat_for(host_count: int) -> float:
    """Return the heartbeat, in seconds, of a run of `host_count` hosts."""
    return max(1.0, host_count / HOSTS_A_HEARTBEAT)
