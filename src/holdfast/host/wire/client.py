"""Call a run's agent: some calls wait for storage or for other hosts."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from holdfast.host.wire import protocol
from holdfast.local_agent.client import AgentSilentError, LocalAgentClient, ask_status

LONG_CALL_SECS = 3660.0
LONG_CALLS = frozenset({"attach", "delete", "judged", "sealed"})
"""Calls that wait for whole images to be written; `attach` waits for other hosts and for a lease.

The agent bounds an `attach` by `Settings.joining_secs`, which grows with the number of hosts.
"""

log = logging.getLogger(__name__)


class AgentClient(LocalAgentClient):
    """A connection to the run's agent in `folder`; used by one thread at a time."""

    def call_secs(self, name: str) -> float:
        return LONG_CALL_SECS if name in LONG_CALLS else super().call_secs(name)

    def is_alive(self, name: str) -> bool:
        status = status_of(self.folder)
        if status is not None and name == "attach" and status.waits_for:
            log.warning("open %s: still waiting: %s", status.run, status.waits_for)
        return status is not None


def status_of(folder: Path) -> protocol.AgentStatus | None:
    """Return the status of this user's agent in `folder`, or None if none answers."""
    with contextlib.suppress(AgentSilentError):
        return ask_status(folder, protocol.Empty(), protocol.AgentStatus)
    return None
