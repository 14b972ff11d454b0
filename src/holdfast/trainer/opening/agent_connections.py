"""The connections of a trainer with its agent: one for each thread that calls it."""

from __future__ import annotations

import threading
from pathlib import Path

from holdfast.errors import AgentUnavailableError
from holdfast.host.wire.client import AgentClient

CLOSED = "the manager is closed"


class AgentConnections:
    """The connections of one session. Any thread may call it."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._all: list[AgentClient] = []
        self._has_ended = False

    def of_thread(self, folder: Path, generation: int) -> AgentClient:
        """Return the connection of the calling thread.

        Args:
            folder: The folder of the agent.
            generation: How many agents were joined before; a connection to one of these is closed.

        Raises:
            AgentUnavailableError: All connections were ended.
        """
        if self._has_ended:
            raise AgentUnavailableError(CLOSED)
        current: tuple[int, AgentClient] | None = getattr(self._of_thread, "known", None)
        if current is None or current[0] != generation:
            if current is not None and current[1] in self._all:
                current[1].close()
                self._all.remove(current[1])
            current = generation, self.add(AgentClient(folder))
            self._of_thread.known = current
        return current[1]

    def add(self, client: AgentClient) -> AgentClient:
        """Add a connection, which `end` ends too; return it."""
        self._all.append(client)
        return client

    def descriptors(self) -> list[int]:
        """Return the descriptors of the open ones."""
        return [fd for client in [*self._all] if (fd := client.fileno()) is not None]

    def end(self) -> None:
        """End all of them; none is opened any more."""
        self._has_ended = True
        for client in [*self._all]:
            client.end()
