"""How the ranks agree on what they restore: each votes, through the agent, in numbered rounds."""

from __future__ import annotations

from holdfast.adapt.contract import Processes
from holdfast.agent import protocol
from holdfast.format.names import CheckpointId
from holdfast.manager.link import Link
from holdfast.manager.restoring import Rounds


class Voting:
    """One rank's votes; the training thread's. A rank that is alone decides by itself."""

    def __init__(self, link: Link, group: str, processes: Processes) -> None:
        self._link = link
        self._group = group
        self._processes = processes
        self._round = 0

    def rounds(self) -> Rounds:
        """What a restore needs to know of the ranks."""
        return Rounds(vote=self._vote, rank=self._processes.rank, count=self._processes.count)

    def _vote(self, good: bool, found: CheckpointId | None) -> tuple[bool, int]:
        if self._processes.count == 1:
            return good, found.step if found else -1
        self._round += 1
        request = protocol.Vote(
            group=self._group,
            rank=self._processes.rank,
            round=self._round,
            good=good,
            id=(found.step, found.attempt) if found else None,
        )
        verdict = self._link.call("vote", request, protocol.Verdict)
        return verdict.good, verdict.limit
