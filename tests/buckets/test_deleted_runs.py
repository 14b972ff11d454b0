"""A run whose objects are deleted under it ends as one whose directory is deleted."""

from __future__ import annotations

import time

import pytest

from holdfast import CheckpointManager
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.run import create_run, deletion_text
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.names import RUN_FILE
from holdfast.store.location import open_durable
from tests.buckets.test_opening import small
from tests.hosts import Host, is_running, wait_until


def save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, small(step), force=True)
        manager.wait_until_finished()
        time.sleep(0.1)


def test_a_deleted_prefix_ends_the_saves_by_name_and_the_agent_leaves(
    one_host: Host, url: str
) -> None:
    manager = CheckpointManager(url)
    manager.resume(small(0))
    save(manager, 1)
    agent = one_host.agent().pid
    store = open_durable(url, SystemClock())
    store.delete(*store.all_keys())
    with pytest.raises(StorageError, match=f"{url}: it was deleted") as caught:
        save(manager, *range(2, 50))
    assert "BucketStore" not in str(caught.value)
    wait_until(lambda: not is_running(agent))
    with pytest.raises(HoldfastError, match="it was deleted"):
        save(manager, 100)
    manager.close()
    wait_until(lambda: not one_host.agent_processes())
    # What was being written when it was found: nothing later.
    left = list(store.all_keys())
    assert len({key for key in left if key.startswith("checkpoints/")}) <= 2, left


def test_a_deletion_is_found_without_a_save(one_host: Host, url: str) -> None:
    store = open_durable(url, SystemClock())
    create_run(store, url, "one", SystemClock().now())
    assert deletion_text(store, url, "one") is None
    assert "replaced by run one" in str(deletion_text(store, url, "another"))
    store.delete(RUN_FILE)
    text = deletion_text(store, url, "one")
    assert text is not None
    assert f"{url}: it was deleted;" in text
    store.home.note_gone(text)
    for write in (store.put, store.put_if_absent):
        with pytest.raises(StorageError, match="it was deleted"):
            write("events/one", b"1")
    assert store.is_unused()
