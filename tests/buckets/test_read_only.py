"""Credentials that may read and not write are one clear error of an opening, within seconds."""

from __future__ import annotations

import pytest

from holdfast import CheckpointManager
from holdfast.clock import SystemClock
from holdfast.errors import StorageRefusedError
from holdfast.store.location import open_durable
from tests.buckets.fault_proxy import FaultProxy, Request
from tests.buckets.test_opening import small
from tests.buckets.test_runs import run_command
from tests.hosts import Host


def read_only(request: Request) -> str | None:
    return None if request.method in ("GET", "HEAD") else "refused"


def resume(url: str) -> None:
    with CheckpointManager(url) as manager:
        manager.resume(small(0))


def test_it_names_the_put_of_a_new_run(one_host: Host, proxy: FaultProxy, proxied_url: str) -> None:
    proxy.choose = read_only
    with pytest.raises(StorageRefusedError, match=r"create \S+ in s3://.*needs s3:PutObject"):
        CheckpointManager(proxied_url)


def test_it_names_the_put_of_a_run_that_exists(
    one_host: Host, proxy: FaultProxy, proxied_url: str
) -> None:
    with CheckpointManager(proxied_url) as manager:
        manager.save(1, small(1), force=True)
    run_command("stop", proxied_url)
    proxy.choose = read_only
    proxy.requests.clear()
    with pytest.raises(StorageRefusedError, match=r"create \S+ in s3://.*needs s3:PutObject"):
        resume(proxied_url)
    # It is not repeated.
    assert sum("attempts/000000002.json" in one.path for one in proxy.requests) == 1


def test_it_names_the_put_where_the_age_of_a_lease_is_read(
    proxy: FaultProxy, proxied_url: str
) -> None:
    store = open_durable(proxied_url, SystemClock())
    store.put("leases/one", b"1")
    proxy.choose = read_only
    with pytest.raises(StorageRefusedError, match=r"put \S+ in s3://.*needs s3:PutObject"):
        store.fleeting.read_timed("leases/one")
