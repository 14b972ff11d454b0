"""The store of `torch.distributed` as the key-value service of a job."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch cannot be had here"
)
KINDS = ("TCPStore", "TCPStore without libuv", "FileStore", "HashStore")


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Makes a store of a kind of PyTorch's."""
    import torch.distributed as dist

    def made(kind: str) -> Any:
        if kind == "FileStore":
            return dist.FileStore(str(tmp_path / "store"), 1)
        if kind == "HashStore":
            return dist.HashStore()
        use_libuv = kind == "TCPStore"
        return dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv
        )

    return made


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_put_once_read_and_removed(stores: Callable[[str], Any], kind: str) -> None:
    from holdfast.adapt.torch.processes import TorchKeyValues

    entries = TorchKeyValues(stores(kind))
    assert (entries.get("f/0"), entries.get_many("f", ["0", "1"])) == (None, {})
    # A read has put nothing there.
    assert entries.put_if_absent("f/0", "ä")
    assert not entries.put_if_absent("f/0", "other")
    assert (entries.get("f/0"), entries.get_many("f", ["0", "1"])) == ("ä", {"0": "ä"})
    entries.delete("f", ["0", "1"])
    assert (entries.get("f/0"), entries.get_many("f", ["0", "1"])) == (None, {})


class RemovedAfterEachCall:
    """A store of which another process removes a key once it has answered any call."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            answer = getattr(self._store, name)(*arguments)
            self._store.delete_key(self._key)
            return answer

        return call


@pytest.mark.parametrize("many", [False, True])
def test_a_key_that_another_process_removes_meanwhile_is_not_waited_for(many: bool) -> None:
    import torch.distributed as dist

    from holdfast.adapt.torch.processes import TorchKeyValues

    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    store.set("beats/0", "alive")
    entries = TorchKeyValues(RemovedAfterEachCall(store, "beats/0"))
    if many:
        assert entries.get_many("beats", ["0"]) == {"0": "alive"}
    else:
        assert entries.get("beats/0") == "alive"
    assert entries.get("beats/0") is None
