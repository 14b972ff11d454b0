"""Define an agent's configuration, passed on its command line as one JSON argument."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.peers.config import PeerConfig

LINGER_SECS = 600.0


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one agent.

    Attributes:
        run: the path of the run's directory, or its URL.
        folder: the agent's own folder (`host.wire.agent_directory`).
        linger_secs: how long the agent stays after its last trainer has ended, if one died.
        peers: how it serves the run's other hosts; None: it does not serve them.
    """

    run: str
    run_id: str
    host: str
    folder: str
    linger_secs: float = LINGER_SECS
    peers: PeerConfig | None = None

    def moved_to(self, run: str) -> AgentConfig:
        """Return the same configuration for a run whose directory is at `run` now."""
        if run == self.run:
            return self
        peers = self.peers
        if peers is not None and Path(peers.token_file).parent == Path(self.run):
            # The token is in the run's directory, and has moved with it.
            token_file = str(Path(run) / Path(peers.token_file).name)
            peers = msgspec.structs.replace(peers, token_file=token_file)
        return msgspec.structs.replace(self, run=run, peers=peers)
