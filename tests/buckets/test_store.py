"""The store suite, through the client of services, on a server of each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from holdfast.clock import SystemClock
from holdfast.errors import ObjectNotFoundError, StorageRefusedError
from holdfast.store.bucket.bucket import BucketStore
from holdfast.store.bucket.object_service import connect
from holdfast.store.contract import Store
from holdfast.testing.store_suite import StoreSuite
from tests.buckets.object_server import ObjectServer, Trouble, open_bucket


def open_at(bucket: str, prefix: str) -> BucketStore:
    # The smallest part that S3 allows.
    return BucketStore(connect(bucket), prefix, SystemClock(), part_size_bytes=5 << 20)


class TestServices(StoreSuite):
    """`tests/store` has the long walks and races of the same client, without servers."""

    readers_outlast_keys = False
    race_rounds = 50
    walk_steps = 30

    @pytest.fixture
    def opener(self, every_url: str) -> Callable[[], Store]:
        scheme, _, rest = every_url.partition("://")
        bucket, _, prefix = rest.partition("/")
        return functools.partial(open_at, f"{scheme}://{bucket}", f"{prefix}/")


class Careless(ObjectServer):
    """A service that ignores the condition of a creation."""

    def create(self, key: str, data: bytes) -> bool:
        super().put(key, [data])
        return True


def test_a_service_where_every_creator_wins_is_refused() -> None:
    server = Careless()
    with pytest.raises(StorageRefusedError, match="found that 4 did"):
        open_bucket(server).prepare_place()
    assert not server.objects


def test_a_service_where_one_creator_wins_is_accepted(every_url: str) -> None:
    scheme, _, rest = every_url.partition("://")
    bucket, _, prefix = rest.partition("/")
    store = open_at(f"{scheme}://{bucket}", f"{prefix}/")
    store.prepare_place()
    assert not [*store.list("leases")]
    assert store.is_unused()


def lose_answer_of_completion(request: str, key: str) -> Trouble | None:
    return Trouble(is_done=True) if request == "complete_upload" else None


def test_an_upload_whose_completion_went_unanswered_counts_by_its_size() -> None:
    server = ObjectServer(plan=lose_answer_of_completion)
    open_bucket(server).put("a", bytes(3 << 20))
    assert len(server.objects["runs/one/a"][0]) == 3 << 20
    # An object of another size is another one's.
    server.objects["runs/one/a"] = (b"short", "other")
    server.plan = lambda request, key: None
    server._complete = lambda key, upload: server._found("lost")  # type: ignore[method-assign]
    with pytest.raises(ObjectNotFoundError):
        open_bucket(server).put("a", bytes(3 << 20))


def test_missing_objects_do_not_end_a_deletion(any_url: str) -> None:
    scheme, _, rest = any_url.partition("://")
    bucket, _, prefix = rest.partition("/")
    store = open_at(f"{scheme}://{bucket}", f"{prefix}/")
    store.put("a/2", b"2")
    store.put("a/4", b"4")
    store.delete("a/1", "a/2", "a/3", "a/4")
    assert store.is_unused()
