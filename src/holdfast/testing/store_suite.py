"""The suite that every store passes: `holdfast.store.contract` as tests.

    class TestMyStore(StoreSuite):
        @pytest.fixture
        def opener(self, tmp_path):
            return functools.partial(open_my_store, tmp_path)

Assumes an empty store for each test. Tests that race run a bounded number of rounds; the one that
takes random steps has its seed in its name. The bytes of objects are tested by
`holdfast.testing.store_bytes`, which this suite includes.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from holdfast.errors import InvalidArgumentError, ObjectNotFoundError, StorageError
from holdfast.store.contract import Store, StoredObject
from holdfast.store.disk import FIRST_SIZE_BYTES
from holdfast.testing import store_processes
from holdfast.testing.block_source import BlockSource, SourceFailedError, fail
from holdfast.testing.store_bytes import StoreBytesSuite, content, read_all

THREAD_COUNT = 8

BAD_KEYS = [
    *("", "/", "a/", "/a", "a//b", "//a"),
    *(".", "..", "./a", "../a", "a/..", "a/../b", "a/../../b", "a/."),
    *(".a", "a/.b", "a/.b/c", "\0", "a\0b"),
]


class StoreSuite(StoreBytesSuite):
    """The suite: subclass it, name the class `Test…`, and override `opener`."""

    race_rounds: ClassVar[int] = 200
    """How often two threads put and delete beside each other; fewer where a request takes long."""
    walk_steps: ClassVar[int] = 100
    """How many random steps a walk takes; each reads all that is stored."""

    # Names: put, list and delete.

    def test_an_object_that_was_never_put_is_not_found(self, store: Store) -> None:
        for key in ("a", "a/b"):
            with pytest.raises(ObjectNotFoundError):
                store.get(self.key(key))
            with pytest.raises(ObjectNotFoundError), store.open(self.key(key)):
                pass
        assert list(store.list("a")) == []

    def test_of_many_objects_each_is_returned_or_its_error(self, store: Store) -> None:
        keys = [self.key(f"a/{number}") for number in range(40)]
        for number, key in enumerate(keys):
            if number % 3:
                store.put(key, b"%d" % number)
        answers = store.get_many(keys[::-1])[::-1]
        for number, (key, data) in enumerate(zip(keys, answers, strict=True)):
            if number % 3:
                assert data == store.get(key) == b"%d" % number
            else:
                assert isinstance(data, ObjectNotFoundError)
        assert not store.get_many([])

    def test_what_was_put_is_seen_by_whoever_opens_the_place_anew(
        self, store: Store, opener: Callable[[], Store]
    ) -> None:
        key = self.key("a/b")
        store.put(key, b"hello")
        assert opener().get(key) == b"hello"
        assert list(opener().list("a")) == [StoredObject(key, 5)]
        store.delete(key)
        with pytest.raises(ObjectNotFoundError):
            opener().get(key)

    def test_an_object_in_memory_takes_further_keys_and_no_other_does(self, store: Store) -> None:
        key, further = self.key("a/b"), self.key("c/d")
        store.put(key, b"hello")
        assert (store.link is not None) == store.is_in_memory
        if store.link is None:
            return
        store.link(key, further)
        store.delete(key)
        assert store.get(further) == b"hello"
        with pytest.raises(ObjectNotFoundError):
            store.link(key, self.key("e/f"))
        store.put(key, b"other")
        with pytest.raises(StorageError):
            store.link(key, further)
        assert store.get(further) == b"hello"

    def test_delete_is_idempotent(self, store: Store) -> None:
        key = self.key("a/b")
        store.delete(key)
        store.put(key, b"x")
        for _ in range(3):
            store.delete(key)
            assert list(store.list("a")) == []
        store.put(key, b"y")
        assert store.get(key) == b"y"

    def test_several_are_deleted_in_one_call(self, store: Store) -> None:
        keys = [self.key(k) for k in ("a/b/1", "a/b/2", "a/3", "a/never", "never/4")]
        others = [self.key(k) for k in ("a/b/5", "a/6")]
        for key in (*keys[:3], *others):
            store.put(key, b"x")
        for _ in range(2):
            store.delete(*keys)
            assert [stored.key for stored in store.list("a")] == sorted(others)
        store.delete()

    def test_a_bad_key_among_several_deletes_none(self, store: Store) -> None:
        key = self.key("a/b")
        store.put(key, b"x")
        with pytest.raises(InvalidArgumentError):
            store.delete(key, "../b")
        assert store.get(key) == b"x"

    def test_delete_removes_nothing_else(self, store: Store) -> None:
        others = [self.key(k) for k in ("a/b/d", "a/bc", "a/b.c", "b", "ab/c")]
        for key in others:
            store.put(key, b"x")
        for _ in range(2):
            store.put(self.key("a/b/c"), b"x")
            store.delete(self.key("a/b/c"))
            store.delete(self.key("a/b/never"))
        assert [store.get(key) for key in others] == [b"x"] * len(others)

    def test_a_prefix_is_no_object(self, store: Store) -> None:
        key = self.key("a/b/c")
        store.put(key, b"x")
        for prefix in ("a", "a/b"):
            store.delete(prefix)
            with pytest.raises(ObjectNotFoundError):
                store.get(prefix)
            with pytest.raises(ObjectNotFoundError), store.open(prefix):
                pass
        assert store.get(key) == b"x"

    def test_an_object_is_no_prefix(self, store: Store) -> None:
        key = self.key("a/b")
        store.put(key, b"x")
        assert list(store.list(key)) == []
        store.delete(f"{key}/c")
        with pytest.raises(ObjectNotFoundError):
            store.get(f"{key}/c")
        assert store.get(key) == b"x"

    def test_a_listing_is_in_the_order_of_keys_with_sizes(self, store: Store) -> None:
        # A slash comes after `-` and `.`, and before digits and letters.
        names = ["b", "a-", "a.b", "a/z", "a/b/c", "a/b-", "a0", "B", "é", "~", "a/10", "a/9"]
        keys = [self.key(f"p/{name}") for name in names]
        for size, key in enumerate(keys):
            store.put(key, bytes(size))
        listed = list(store.list("p"))
        assert [stored.key for stored in listed] == sorted(keys)
        assert {s.key: s.size_bytes for s in listed} == {k: i for i, k in enumerate(keys)}

    def test_a_listing_holds_just_what_begins_with_the_prefix_and_a_slash(
        self, store: Store
    ) -> None:
        for key in ("a/1", "a/b/2", "ab/3", "a.b/4", "b/a/5"):
            store.put(self.key(key), b"x")
        assert [s.key for s in store.list("a")] == [self.key("a/1"), self.key("a/b/2")]
        assert [s.key for s in store.list("a/b")] == [self.key("a/b/2")]
        assert list(store.list("c")) == []

    def test_a_listing_may_begin_after_any_text_and_end_before_it(self, store: Store) -> None:
        keys = [self.key(f"a/{name}") for name in ("b/c", "b/d", "b0/e", "f", "g/h", "i")]
        for size, key in enumerate(keys):
            store.put(key, bytes(size))
        texts = [self.key("a/0"), self.key("a/a~"), self.key("a/b/~"), self.key("a/z"), *keys]
        for after in texts:
            expected = [StoredObject(k, i) for i, k in enumerate(keys) if k > after]
            assert store.list_some("a", after=after) == expected, after
            expected = [StoredObject(k, i) for i, k in enumerate(keys) if k < after]
            assert store.list_some("a", before=after) == expected, after

    def test_a_listing_may_end_after_some_objects(self, store: Store) -> None:
        keys = [self.key(f"a/{number}") for number in range(5)]
        for key in keys:
            store.put(key, b"x")
        for count in range(7):
            listing = store.list_some("a", count_max=count)
            assert [s.key for s in listing] == keys[:count]
        listing = store.list_some("a", after=keys[1], count_max=2)
        assert [s.key for s in listing] == keys[2:4]
        assert store.list_some("c", count_max=3) == []

    def test_objects_may_be_deleted_while_they_are_listed(self, store: Store) -> None:
        keys = [self.key(f"a/{i % 3}/{i}") for i in range(12)]
        for key in keys:
            store.put(key, b"x")
        seen = []
        for stored in store.list("a"):
            seen.append(stored.key)
            store.delete(stored.key)
        assert seen == sorted(keys)
        assert list(store.list("a")) == []

    def test_a_key_that_could_leave_the_place_or_hide_in_it_is_refused(self, store: Store) -> None:
        def opened(key: str) -> None:
            with store.open(key):
                pass

        calls: dict[str, Callable[[str], object]] = {
            "put": lambda key: store.put(key, b"x"),
            "put_if_absent": lambda key: store.put_if_absent(key, b"x"),
            "get": store.get,
            "open": opened,
            "list": lambda key: list(store.list(key)),
            "delete": store.delete,
            "discard_unfinished": store.discard_unfinished,
        }
        accepted = []
        for key in BAD_KEYS:
            for name, call in calls.items():
                with contextlib.suppress(InvalidArgumentError):
                    call(key)
                    accepted.append((name, key))
        assert accepted == []

    # Put if absent: the first one wins.

    def test_put_if_absent_writes_only_where_there_is_nothing(self, store: Store) -> None:
        assert store.put_if_absent("a/b", b"first")
        assert not store.put_if_absent("a/b", b"second, and longer")
        assert store.get("a/b") == b"first"
        store.put("a/b", b"third")
        assert not store.put_if_absent("a/b", b"fourth")
        assert store.get("a/b") == b"third"
        store.delete("a/b")
        assert store.put_if_absent("a/b", b"fifth")
        assert list(store.list("a")) == [StoredObject("a/b", 5)]

    def test_of_many_threads_exactly_one_wins(
        self, store: Store, opener: Callable[[], Store]
    ) -> None:
        stores = [opener() for _ in range(THREAD_COUNT)]
        for number in range(5):
            key = f"race/{number}"
            winners: list[int] = []
            barrier = threading.Barrier(THREAD_COUNT, timeout=60)

            def race(index: int, key: str = key, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                if stores[index].put_if_absent(key, b"%d" % index * 1000):
                    winners.append(index)  # noqa: B023 - the threads end within the round

            _in_threads(race, THREAD_COUNT)
            assert len(winners) == 1
            assert store.get(key) == b"%d" % winners[0] * 1000

    def test_of_many_processes_exactly_one_wins(
        self, store: Store, opener: Callable[[], Store]
    ) -> None:
        keys = [f"race/{number}" for number in range(40)]
        won = store_processes.race_put_if_absent(opener, keys, process_count=3)
        for index, key in enumerate(keys):
            winners = [number for number, of_process in enumerate(won) if of_process[index]]
            assert len(winners) == 1
            assert store.get(key) == b"%d" % winners[0]

    # Crashes and failures.

    def test_a_put_whose_process_is_killed_leaves_the_old_object(
        self, store: Store, opener: Callable[[], Store]
    ) -> None:
        size = 3 * FIRST_SIZE_BYTES
        kept, torn = self.key("a/kept"), self.key("a/b/torn")
        old, new = content(size, 1), content(size, 2)
        store.put(kept, old)
        for key in (kept, torn):
            store_processes.kill_midway_through_put(opener, key, new)
            assert store.get(kept) == old
            assert list(store.list("a")) == [StoredObject(kept, size)]
            with pytest.raises(ObjectNotFoundError):
                store.get(torn)
        store.discard_unfinished("a")
        assert list(store.list("a")) == [StoredObject(kept, size)]
        store.put(torn, new)
        assert (store.get(kept), store.get(torn)) == (old, new)

    def test_discarding_what_is_unfinished_leaves_whole_objects(self, store: Store) -> None:
        store.discard_unfinished("never")
        keys = [self.key(k) for k in ("a/b", "a/b.unfinished", "a/c/d", "b/e")]
        for key in keys:
            store.put(key, b"x")
        store.discard_unfinished("a")
        assert [store.get(key) for key in keys] == [b"x"] * 4

    @pytest.mark.parametrize("key", ["a/{}/x", "a/x/{}"])
    def test_a_put_or_a_delete_does_not_fail_for_a_delete_elsewhere(
        self, store: Store, opener: Callable[[], Store], key: str
    ) -> None:
        stores = [opener() for _ in range(2)]

        def put_and_delete(index: int) -> None:
            for _ in range(self.race_rounds):
                stores[index].put(key.format(index), b"x")
                stores[index].delete(key.format(index))

        _in_threads(put_and_delete, 2)
        assert list(store.list("a")) == []

    # Random operations in random order.

    @pytest.mark.parametrize("seed", range(3))
    def test_random_steps_do_what_they_do_to_a_dict(self, store: Store, seed: int) -> None:
        chance = random.Random(seed)
        keys = [self.key(k) for k in ("a/1", "a/2", "a/b/3", "a/b.c", "b/4", "b/c/d/5")]
        model: dict[str, bytes] = {}
        for _ in range(self.walk_steps):
            key = chance.choice(keys)
            data = chance.randbytes(chance.choice([0, 1, 100, 4096, 5000]))
            match chance.choice(["put", "put", "if absent", "delete", "fail", "look"]):
                case "put":
                    store.put(key, data)
                    model[key] = data
                case "if absent":
                    is_put = store.put_if_absent(key, data)
                    # An object with these bytes may count as the caller's own.
                    assert model.setdefault(key, data) == data or not is_put
                    assert is_put or key in model
                case "delete":
                    store.delete(key)
                    model.pop(key, None)
                case "fail":
                    with pytest.raises(SourceFailedError):
                        store.put(key, BlockSource([data], on_block=fail))
            _assert_same(store, model, keys)


def _assert_same(store: Store, model: dict[str, bytes], keys: Iterable[str]) -> None:
    for prefix in ("a", "a/b", "b"):
        expected = sorted(key for key in model if key.startswith(f"{prefix}/"))
        assert [s.key for s in store.list(prefix)] == expected
    for key in keys:
        if key in model:
            assert store.get(key) == read_all(store, key) == model[key]
        else:
            with pytest.raises(ObjectNotFoundError):
                store.get(key)


def _in_threads(work: Callable[[int], None], count: int) -> None:
    """Run `work(0)` to `work(count - 1)` concurrently; raise the error of one of them, if any."""
    with ThreadPoolExecutor(count) as pool:
        for job in [pool.submit(work, index) for index in range(count)]:
            job.result()
