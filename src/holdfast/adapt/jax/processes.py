"""The processes of a JAX job, and the key-value service of `jax.distributed` that they share.

The service runs in rank 0's process. No call here is a collective, and none waits for another
process: JAX's blocking calls leave a request in the service for each wait that timed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax

from holdfast.adapt.jax.internals import coordination_client
from holdfast.errors import InvalidArgumentError, ProcessLostError

# The prefixes of the service's error messages.
_NOT_FOUND = "NOT_FOUND"
_ALREADY_EXISTS = "ALREADY_EXISTS"


class JaxProcesses:
    """JAX's rank and process count; one process if `jax.distributed` was not started."""

    def __init__(self) -> None:
        self.rank = jax.process_index()
        self.count = jax.process_count()

    @property
    def slice_index(self) -> int | None:
        return slice_of(jax.devices(), jax.local_devices())

    def key_values(self) -> JaxKeyValues:
        client = coordination_client()
        if client is None:
            raise InvalidArgumentError(
                f"find the other processes: this job has {self.count}, and jax.distributed, by "
                "which they find each other, is not started; call jax.distributed.initialize() "
                "first, and jax.distributed.shutdown() last"
            )
        return JaxKeyValues(client)


class JaxKeyValues:
    """JAX's key-value service; see `holdfast.adapt.contract.KeyValues`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put_if_absent(self, key: str, value: str) -> bool:
        try:
            self._client.key_value_set(key, value)
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith(_ALREADY_EXISTS):
                return False
            _raise_lost(f"put {key}", error)
        return True

    def get(self, key: str) -> str | None:
        try:
            return str(self._client.key_value_try_get(key))
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith(_NOT_FOUND):
                return None
            _raise_lost(f"get {key}", error)

    def get_many(self, folder: str, names: Sequence[str]) -> dict[str, str]:
        # One request, however many names: nothing else is put into a folder.
        start, keys = f"{folder}/", set(names)
        try:
            entries = self._client.key_value_dir_get(start)
        except jax.errors.JaxRuntimeError as error:
            _raise_lost(f"list {folder}", error)
        values = {key.removeprefix(start): value for key, value in entries}
        return {name: value for name, value in values.items() if name in keys}

    def delete(self, folder: str, names: Sequence[str]) -> None:
        # One request, as for `get_many`. A single name may be beside a folder.
        key = f"{folder}/{names[0]}" if len(names) == 1 else f"{folder}/"
        try:
            self._client.key_value_delete(key)
        except jax.errors.JaxRuntimeError as error:
            _raise_lost(f"delete {key}", error)


def slice_of(devices: Sequence[object], own: Sequence[object]) -> int | None:
    """Return the slice of all of `own`, if `devices` are in several slices; else None."""
    all_slices, own_slices = (
        {getattr(device, "slice_index", None) for device in some} for some in (devices, own)
    )
    return own_slices.pop() if len(all_slices) > 1 and len(own_slices) == 1 else None


def _raise_lost(action: str, error: Exception) -> NoReturn:
    raise ProcessLostError(
        f"{action} in jax.distributed's key-value service: {str(error).splitlines()[0]}. Rank 0's "
        "process holds it; see its log, stop this process and restart the job"
    ) from error
