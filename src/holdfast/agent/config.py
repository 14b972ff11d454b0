"""What an agent is told when it starts, on its command line as one JSON argument."""

from __future__ import annotations

import msgspec

from holdfast.agent.peer_config import PeerConfig

LINGER_SECS = 600.0
ALREADY_RUNNING = 17
"""The exit code of an agent that found another one in its place."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One agent. `run` is the durable directory; `folder` is where it lives (`agent.location`).

    `peers` is how it serves the run's other hosts; None: it does not.
    """

    run: str
    run_id: str
    host: str
    folder: str
    linger_secs: float = LINGER_SECS
    peers: PeerConfig | None = None
