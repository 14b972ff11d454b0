"""The roles of one host: always a follower; also leader or starter of an attempt at times.

Invariants:
- At most one leader and one start exist on a host at a time.
- A host leads no attempt that is older than the newest one it knows.
"""

from __future__ import annotations

from holdfast.coordination.follower.follower import Follower
from holdfast.coordination.leader.leader import Leader
from holdfast.coordination.messages import Refusal
from holdfast.coordination.start.bootstrap import Bootstrap
from holdfast.coordination.turn import AgentIdentity, Turn
from holdfast.format.names import AttemptId, CheckpointId


class HostRoles:
    """The state machines of one host. `Node` drives them; other hosts' messages reach them.

    Attributes:
        follower: what every host does.
        leader: None where this host does not lead.
        bootstrap: the start that this host carries out; None where there is none.
        refused: the reason and kind of the latest refused starts, by their groups, so that hosts
            of such a start that report late get the same answer.
    """

    def __init__(self, identity: AgentIdentity) -> None:
        self.identity = identity
        self.follower = Follower(identity)
        self.leader: Leader | None = None
        # The commits that an earlier leader here has begun, in the durable and the remote tier.
        self._committing: CheckpointId | None = None
        self._committing_copy: CheckpointId | None = None
        self.bootstrap: Bootstrap | None = None
        self.refused: dict[str, tuple[str, Refusal]] = {}

    def fence(self, turn: Turn, attempt: AttemptId, reason: str) -> None:
        """Stop working for older attempts: `attempt` has begun.

        Does nothing where `attempt` is not newer than the one known here. The leader of the newer
        attempt is found by asking the hosts that led before.
        """
        if attempt > self.follower.attempt:
            self.follower.fence(turn, attempt, reason)
            self.check_leads()

    def check_leads(self) -> None:
        """Stop leading if the attempt that is led is not the newest one known here."""
        if self.leader is not None and self.leader.leadership.attempt < self.follower.attempt:
            self.step_down()

    def step_down(self) -> None:
        """Stop leading: another successor leads, or a newer attempt has begun."""
        if self.leader is not None:
            self._committing = self.leader.durability.committing
            self._committing_copy = self.leader.mirror.committing
        self.leader = None

    def lead(self, leader: Leader) -> None:
        """Lead from now on, after the commits that an earlier leader here has begun."""
        self.step_down()
        self.leader, leader.durability.committing = leader, self._committing
        leader.mirror.committing = self._committing_copy

    def commit_ended(self) -> None:
        """Note that the outcome of a commit in the durable tier has arrived."""
        self._committing = None

    def copy_commit_ended(self) -> None:
        """Note that the outcome of a commit in the remote tier has arrived."""
        self._committing_copy = None
