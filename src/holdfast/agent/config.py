"""What an agent is told when it starts, on its command line as one JSON argument."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.peers.config import PeerConfig

LINGER_SECS = 600.0
ALREADY_RUNNING = 17
"""The exit code of an agent that found another one in its place."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One agent. `run` is the durable directory; `folder` is its own (`agent.agent_directory`).

    `peers` is how it serves the run's other hosts; None: it does not.
    """

    run: str
    run_id: str
    host: str
    folder: str
    linger_secs: float = LINGER_SECS
    peers: PeerConfig | None = None

    def moved_to(self, run: Path) -> AgentConfig:
        """Return the same, of a run whose directory is at `run` now."""
        peers = self.peers
        if peers is not None and Path(peers.token_file).parent == Path(self.run):
            token_file = str(run / Path(peers.token_file).name)
            peers = msgspec.structs.replace(peers, token_file=token_file)
        return msgspec.structs.replace(self, run=str(run), peers=peers)
