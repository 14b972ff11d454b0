"""Images in RAM get further names: a slot is in use while it has one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import InvalidArgumentError, ObjectNotFoundError, StorageError
from holdfast.store.contract import StoredObject
from holdfast.store.ram import RamStore
from holdfast.testing.store_bytes import content, read_all
from tests.store.places import open_ram

RACE_ROUNDS = 100


@pytest.fixture
def opener(in_memory: Path) -> Callable[[], RamStore]:
    return functools.partial(open_ram, in_memory / "ram")


@pytest.fixture
def store(opener: Callable[[], RamStore]) -> Iterator[RamStore]:
    found = opener()
    yield found
    found.close()


def image(key: str) -> str:
    """The key of an image, which goes into a slot."""
    return f"{key}.safetensors"


def test_a_linked_object_shows_under_both_keys_and_outlasts_either(
    store: RamStore, opener: Callable[[], RamStore]
) -> None:
    for first, second in [("a/1", "b/c/1"), ("a/2", "a/0")]:
        first, second, data = image(first), image(second), content(5000, 1)
        store.put(first, data)
        store.link(first, second)
        for opened in (store, opener()):
            assert opened.get(first) == opened.get(second) == data
            assert read_all(opened, second) == data
            assert StoredObject(second, len(data)) in opened.list(second.partition("/")[0])
        store.delete(first)
        with pytest.raises(ObjectNotFoundError):
            store.get(first)
        assert read_all(opener(), second) == data
        store.link(second, first)
        store.delete(second)
        assert [s.key for s in store.list("a")] == [first]
        assert read_all(store, first) == data
        store.delete(first)
    assert [*store.list("a"), *store.list("b")] == []


def test_what_is_put_under_one_key_of_an_object_does_not_reach_the_other(store: RamStore) -> None:
    one, other = image("a/1"), image("b/1")
    store.put(one, b"old")
    store.link(one, other)
    store.put(one, b"newer")
    assert (store.get(one), store.get(other)) == (b"newer", b"old")


def test_only_an_object_can_be_linked(store: RamStore) -> None:
    key, linked = image("a/b/c"), image("z/linked")
    store.put(key, b"x")
    for source in ("a/never", "a/b", "never/a/b", f"{key}/d"):
        with pytest.raises(ObjectNotFoundError):
            store.link(image(source), linked)
    assert list(store.list("z")) == []


def test_a_link_replaces_nothing(store: RamStore) -> None:
    one, other = image("a/1"), image("a/2")
    store.put(one, b"x")
    store.put(other, b"y")
    with pytest.raises(StorageError, match="another"):
        store.link(one, other)
    assert (store.get(one), store.get(other)) == (b"x", b"y")
    store.delete(other)
    for _ in range(3):
        store.link(one, other)
    assert store.get(other) == b"x"


def test_a_link_does_not_fail_for_a_delete_elsewhere(
    store: RamStore, opener: Callable[[], RamStore]
) -> None:
    stores = [opener() for _ in range(2)]
    source = image("s/x")
    store.put(source, b"x")
    keys = [image(k) for k in ("a/b/0/x", "a/b/1/x")]

    def link_and_delete(index: int) -> None:
        for _ in range(RACE_ROUNDS):
            stores[index].link(source, keys[index])
            stores[index].delete(keys[index])

    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(link_and_delete, index) for index in range(2)]:
            job.result()
    assert list(store.list("a")) == []
    assert store.get(source) == b"x"


@pytest.mark.parametrize("key", ["../a", "a//b", ".a", "a/../b", ""])
def test_a_key_that_could_leave_the_place_is_not_linked(store: RamStore, key: str) -> None:
    store.put(image("a"), b"x")
    for one, other in ((key, image("b")), (image("a"), key)):
        with pytest.raises(InvalidArgumentError):
            store.link(one, other)
