"""Choose the host whose launcher decides for the ranks of all hosts.

Pure: inputs are the votes of the other hosts' launchers, and which of them are silent. Each
launcher follows exactly one, itself included, and votes for it. Invariants:

- Of two launchers at most one is followed by a quorum of the hosts.
- A launcher that a quorum follows stays the leader as long as it can be heard, so that a host which
  comes back disturbs nothing.
- Launchers that hear each other follow the same one, once their votes have arrived.

See docs/decisions/0071.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The vote of a launcher.

    Attributes:
        follows: The host that it follows.
        has_quorum: It leads, and a quorum of the hosts has joined it.
        generation: The newest generation that it knows of.
    """

    follows: int
    has_quorum: bool
    generation: int = 0


@dataclass(slots=True)
class Leadership:
    """The choice of one host. Owned by its launcher's thread.

    Attributes:
        own: This host.
        follows: The host that it follows.
    """

    own: int
    follows: int = field(init=False)
    _votes: dict[int, Vote] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.follows = self.own

    def heard(self, host: int, vote: Vote) -> None:
        """Take the vote of another host."""
        self._votes[host] = vote

    def lost(self, host: int) -> None:
        """Forget a host that is silent."""
        self._votes.pop(host, None)

    def choose(self, *, has_quorum: bool) -> int:
        """Choose again, and return the host to follow.

        Args:
            has_quorum: Whether this host leads, and a quorum has joined it.
        """
        leaders = {host: vote for host, vote in self._votes.items() if vote.follows == host}
        strong = [host for host, vote in leaders.items() if vote.has_quorum]
        if self.follows == self.own and has_quorum:
            return self.own
        if self.follows not in strong:
            # Without one with a quorum, all gather at the first.
            self.follows = min(strong) if strong else min([self.own, *leaders])
        return self.follows
