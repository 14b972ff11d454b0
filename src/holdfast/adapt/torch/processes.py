"""The processes of a PyTorch job, and the store of `torch.distributed` that they share.

The store is held by rank 0's process, or under torchrun by its agent on the first host. No call
here is a collective.

A store that torchrun shares with later worker groups is warned of: docs/decisions/0058.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from holdfast import launchers, torchrun_store
from holdfast.environment import LAUNCHER_VARIABLE
from holdfast.errors import InvalidArgumentError, ProcessLostError

_PREFIX = "holdfast"
_NO_VALUE = "(no value)"
"""What `Store.compare_set` returns for a missing key if this is expected."""

log = logging.getLogger(__name__)


class TorchProcesses:
    """The rank and the size of the default process group; one process if there is none."""

    slice_index = None

    def __init__(self) -> None:
        is_started = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_started else 0
        self.count = dist.get_world_size() if is_started else 1
        # RANK and WORLD_SIZE are for init_process_group. Other launchers also start trainings that
        # are no ranks of one job.
        launcher = launchers.launched().ranked
        if not is_started and launcher is not None and launcher.is_for_torch:
            raise InvalidArgumentError(
                f"find the other processes: this one was started by {launcher.place_text}, and "
                "torch.distributed, by which they find each other, is not started; call "
                "torch.distributed.init_process_group() first, or set "
                f"{LAUNCHER_VARIABLE}=none for trainings that are independent"
            )

    def key_values(self) -> TorchKeyValues:
        if self.rank == 0 and _hangs_when_restarted():
            log.warning(
                "if a process fails, its restart may hang: %s; %s",
                torchrun_store.CAUSE,
                torchrun_store.ADVICE,
            )
        store: Any = dist.distributed_c10d._get_default_store()
        return TorchKeyValues(dist.PrefixStore(_PREFIX, store))


class TorchKeyValues:
    """A store of `torch.distributed`; see `holdfast.adapt.contract.KeyValues`."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put_if_absent(self, key: str, value: str) -> bool:
        try:
            stored_value = self._store.compare_set(key, "", value)
        except RuntimeError as error:
            _raise_lost(f"put {key}", error)
        return bool(stored_value == value.encode())

    def get(self, key: str) -> str | None:
        # `Store.get` waits for a missing key, also for one that another process removes between
        # `check` and `get`, and every other call of this process waits with it. A comparison with
        # a value that no key has returns at once, and changes nothing.
        try:
            value: bytes = self._store.compare_set(key, _NO_VALUE, _NO_VALUE)
        except RuntimeError as error:
            _raise_lost(f"get {key}", error)
        return None if value == _NO_VALUE.encode() else value.decode()

    def get_many(self, folder: str, names: Sequence[str]) -> dict[str, str]:
        values = {name: self.get(f"{folder}/{name}") for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def delete(self, folder: str, names: Sequence[str]) -> None:
        try:
            for name in names:
                self._store.delete_key(f"{folder}/{name}")
        except RuntimeError as error:
            _raise_lost(f"delete {folder}", error)


def _hangs_when_restarted() -> bool:
    is_shared = torchrun_store.is_shared(os.environ) and torchrun_store.may_restart(os.environ)
    return is_shared and "gloo" in dist.get_backend_config()


def _raise_lost(action: str, error: Exception) -> NoReturn:
    raise ProcessLostError(
        f"{action} in the store of torch.distributed: {str(error).splitlines()[0]}. Rank 0's "
        "process or torchrun on the first host holds it; see its log, stop this process and "
        "restart the job"
    ) from error
