"""Where the files of a run are. No other module joins a path of a run.

A run is a directory. What a store keeps there is named by keys (`holdfast.format.names`); this
module names the remaining files, and where a key lies.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.format.names import EVENTS, RUN_FILE


class RunLocation:
    """The place of one run, at a path that is valid now: a directory may be moved later."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def events(self) -> Path:
        """The folder of events and of the agents' logs."""
        return self.path / EVENTS

    @property
    def record(self) -> Path:
        """The run's record, without which the directory is no run."""
        return self.path / RUN_FILE

    def agent_log(self, host: str) -> Path:
        """Return the log of the agent of `host`."""
        return self.events / f"agent-{host}.log"

    def token(self, run_id: str) -> Path:
        """Return the file with the token by which the agents of a run know each other."""
        return self.path / f"agents-{run_id}.token"
