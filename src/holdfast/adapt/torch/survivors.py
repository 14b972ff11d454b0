"""The survivors of a generation as a job of their own, which saves the state that they hold.

They have no process group, only the launcher's store: nothing here is a collective.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from holdfast.adapt.contract import Outline, Pinning, Processes, Snapshot
from holdfast.adapt.torch.processes import TorchKeyValues
from holdfast.adapt.torch.state import TorchFramework
from holdfast.errors import ProcessLostError

STORE_SECS = 20.0
"""How long the store may take to answer."""


class SurvivorProcesses:
    """The processes that are left, by new ranks."""

    slice_index = None

    def __init__(self, rank: int, count: int, store: str) -> None:
        self.rank = rank
        self.count = count
        self._store = store

    def key_values(self) -> TorchKeyValues:
        host, _, port = self._store.rpartition(":")
        limit = timedelta(seconds=STORE_SECS)
        try:
            server = dist.TCPStore(host, int(port), is_master=False, timeout=limit)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ProcessLostError(
                f"join the survivors' store at {self._store}: {reason}; another rank was lost"
            ) from error
        return TorchKeyValues(dist.PrefixStore("survivors", server))


class SurvivorsFramework(TorchFramework):
    """PyTorch in a job of survivors, whose state is a snapshot that they hold already.

    Args:
        processes: The job.
        held: The state, whose ranks are those of that job.
    """

    def __init__(self, processes: SurvivorProcesses, held: Snapshot) -> None:
        super().__init__()
        self._processes = processes
        self._held = held

    def processes(self) -> Processes:
        return self._processes

    def snapshot(self, state: object) -> Snapshot:
        return self._held

    def outline(self, state: object) -> Outline:
        return self._held.outline

    def pinning(self, state: object) -> Pinning:
        return self._held.pin
