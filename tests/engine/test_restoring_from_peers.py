"""Restoring with peers among the sources: the nearest good copy, after a bounded wait at most."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.engine.lifecycle.catalog import list_stores
from holdfast.engine.reading.restore import RestoreTally, fill_targets
from holdfast.engine.reading.sources import find_sources, is_sound, readable
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.transfer.copy import copy_part
from holdfast.errors import CheckpointDamagedError, NewerFormatError, StorageError
from holdfast.format.names import checkpoint_folder, image_key, manifest_key, part_key
from holdfast.format.records import PartRecord
from holdfast.format.sealed import FORMAT_VERSION, seal, unseal
from holdfast.peers.connection import PeerBounds
from holdfast.store.contract import Store, StoredObject
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore
from tests.attempts import checkpoint_id
from tests.engine.making import Made, disk, flip_bit, random_array
from tests.engine.stores import ram
from tests.engine.test_restore import assert_filled, whole_targets
from tests.peers import QUICK, line_to, listening, reaching, request_on, serving

BLOCK = 8 * 1024 * 1024


def _made() -> Made:
    made = Made(part_count=2)
    made.add(("big",), random_array((2 * BLOCK + 100,), "uint8", 2), owners=((1, 1),))
    for number in range(6):
        made.add((f"w{number}",), random_array((BLOCK + 10,), "uint8", 3 + number))
    return made


def restored(made: Made, *stores: Store) -> RestoreTally:
    """Restores all of it from `stores`, and checks it."""
    listings, unlisted = list_stores(stores)
    assert readable(listings) == [made.id]
    targets = whole_targets(made)
    tally = fill_targets(find_sources(made.id, stores, listings), targets)
    assert_filled(made, targets)
    tally.passed_over.extend(unlisted)
    return tally


class Hosts:
    """Two hosts that have the checkpoint in RAM, and the durable tier."""

    def __init__(self, root: Path) -> None:
        self.made = _made()
        self.own, self.a, self.b = ram(root / "own"), ram(root / "a"), ram(root / "b")
        self.durable = disk(root / "run")
        parts = self.made.write(self.a)
        self.made.save(self.durable)
        for part in parts:
            copy_part(self.a, self.b, part, PartLayouts(self.made.spec.arrays))

    def image(self, store: RamStore | DiskStore, rank: int) -> Path:
        return store.root / image_key(self.made.id, rank, 2)

    def close(self) -> None:
        for store in (self.own, self.a, self.b):
            store.close()


@pytest.fixture
def hosts(root: Path) -> Iterator[Hosts]:
    with contextlib.closing(Hosts(root)) as made:
        yield made


def test_the_first_good_peer_serves_all(hosts: Hosts) -> None:
    with (
        serving(hosts.a.root) as a,
        serving(hosts.b.root) as b,
        reaching(a.address) as near,
        reaching(b.address) as far,
    ):
        tally = restored(hosts.made, hosts.own, near, far, hosts.durable)
    assert tally.bytes_by_tier == {"peer": sum(x.nbytes for x in hosts.made.arrays.values())}
    assert tally.passed_over == []


def test_parts_that_two_peers_hold_are_one_checkpoint(hosts: Hosts) -> None:
    """Nothing is durable, and neither has all of it."""
    hosts.a.delete(image_key(hosts.made.id, 0, 2))
    hosts.b.delete(image_key(hosts.made.id, 1, 2))
    with (
        serving(hosts.a.root) as a,
        serving(hosts.b.root) as b,
        reaching(a.address) as near,
        reaching(b.address) as far,
    ):
        tally = restored(hosts.made, hosts.own, near, far)
        assert {*tally.bytes_by_tier} == {"peer"}
        stores = [hosts.own, near, far]
        assert is_sound(hosts.made.id, stores, list_stores(stores)[0])
        assert not is_sound(hosts.made.id, stores[:2], list_stores(stores[:2])[0])


def test_a_bad_block_of_one_peer_comes_from_the_next_and_is_told(hosts: Hosts) -> None:
    flip_bit(hosts.image(hosts.a, 1), 8 * (4096 + BLOCK + 77))
    with (
        serving(hosts.a.root) as a,
        serving(hosts.b.root) as b,
        reaching(a.address) as near,
        reaching(b.address) as far,
    ):
        tally = restored(hosts.made, hosts.own, near, far, hosts.durable)
    assert {*tally.bytes_by_tier} == {"peer"}
    (reason,) = tally.passed_over
    assert reason.startswith(f"read {near.name}: {image_key(hosts.made.id, 1, 2)}: bytes [")
    assert "have digest" in reason


def test_a_peers_copy_of_a_newer_format_is_passed_over_and_told_once(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is durable; a host's agent is of a newer version."""
    for rank in range(2):
        key = part_key(hosts.made.id, rank, 2)
        record = unseal(hosts.a.get(key), PartRecord, key)
        data = seal(msgspec.structs.replace(record, format_version=FORMAT_VERSION + 1))
        hosts.a.delete(key)
        hosts.a.put(key, data)
    with (
        serving(hosts.a.root) as a,
        serving(hosts.b.root) as b,
        reaching(a.address) as near,
        reaching(b.address) as far,
    ):
        for _ in range(2):
            tally = restored(hosts.made, hosts.own, near, far)
            assert {*tally.bytes_by_tier} == {"peer"}
        stores = [hosts.own, near, far]
        found = find_sources(hosts.made.id, stores, list_stores(stores)[0])
        assert [reason.split(":")[0] for reason in found.passed_over] == [
            near.name.split(":")[0]
        ] * 2
        assert all("upgrade Holdfast" in reason for reason in found.passed_over)
        (reason,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert reason.startswith(f"{near.name} is skipped, its format is newer")
        # A newer format in the host's own memory is an error, unlike in a peer's.
        own = [hosts.a, far]
        with pytest.raises(NewerFormatError):
            find_sources(hosts.made.id, own, list_stores(own)[0])


def test_bytes_that_are_spoilt_on_the_way_are_found(hosts: Hosts) -> None:
    def spoil(data: bytes, passed: int) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if 5 * BLOCK < passed < 6 * BLOCK else data

    with (
        serving(hosts.a.root) as a,
        line_to(a.address) as (line, near_address),
        reaching(near_address) as near,
    ):
        line.spoil = spoil
        tally = restored(hosts.made, hosts.own, near, hosts.durable)
    assert {*tally.bytes_by_tier} == {"peer", "durable"}
    assert tally.passed_over
    assert all(near.name in reason for reason in tally.passed_over)


def test_a_peer_that_is_cut_off_midway_costs_one_wait_and_the_next_serves(hosts: Hosts) -> None:
    with (
        serving(hosts.a.root) as a,
        serving(hosts.b.root) as b,
        line_to(a.address, cut_after_bytes=2 * BLOCK) as (_, near_address),
        reaching(near_address) as near,
        # On a busy machine a peer that serves may pause for longer than `QUICK` allows.
        reaching(b.address, PeerBounds()) as far,
    ):
        started = time.monotonic()
        tally = restored(hosts.made, hosts.own, near, far, hosts.durable)
        took_secs = time.monotonic() - started
        # Further requests fail at once, without a wait.
        started = time.monotonic()
        with pytest.raises(StorageError, match="no request for"):
            near.get("a/b")
        assert time.monotonic() - started < QUICK.stall_secs
    assert {*tally.bytes_by_tier} == {"peer"}
    assert tally.passed_over
    assert all(near.name in reason for reason in tally.passed_over)
    # Nine chunks in four threads: their bounds one after another would be three at least.
    assert took_secs < 10.0


def test_where_no_peer_lives_the_durable_tier_serves_after_one_wait_each(hosts: Hosts) -> None:
    def say_nothing(connection) -> None:
        while request_on(connection):
            pass

    with (
        listening(say_nothing) as silent,
        serving(hosts.a.root) as a,
    ):
        gone = a.address
        a.close()
        with reaching(silent.address) as near, reaching(gone) as far:
            started = time.monotonic()
            tally = restored(hosts.made, hosts.own, near, far, hosts.durable)
            assert time.monotonic() - started < 15.0
    assert {*tally.bytes_by_tier} == {"durable"}
    assert len(tally.passed_over) == 2
    assert near.name in tally.passed_over[0]
    assert far.name in tally.passed_over[1]


class FakePeer:
    """A peer that does what a test wants when it is listed."""

    tier = "peer"
    is_in_memory = is_optional = True

    def __init__(self, name: str, answer: Callable[[], object]) -> None:
        self.name = name
        self._answer = answer

    def list(self, prefix: str) -> Iterator[StoredObject]:
        self._answer()
        return iter([StoredObject(f"{checkpoint_folder(checkpoint_id(1))}/image", 1)])


def test_peers_are_listed_side_by_side_and_told_in_their_order() -> None:
    # Each of them answers once all have a request.
    together = threading.Barrier(8, timeout=20.0)
    peers = [FakePeer(f"peer {i}", together.wait) for i in range(8)]
    listings, unlisted = list_stores(peers)  # type: ignore[arg-type]
    assert list(listings) == [peer.name for peer in peers]
    assert all(listings[peer.name] for peer in peers)
    assert unlisted == ()


def test_peers_that_are_not_asked_in_time_are_passed_over_and_told() -> None:
    asked: list[int] = []
    first = FakePeer("peer 0", lambda: time.sleep(0.5))
    others = [FakePeer(f"peer {i}", lambda i=i: asked.append(i)) for i in (1, 2)]
    listings, unlisted = list_stores([first, *others], 0.05, 1)  # type: ignore[list-item]
    assert listings["peer 0"]
    assert listings["peer 1"] == listings["peer 2"] == {}
    assert asked == []
    assert [reason.split(":")[0] for reason in unlisted] == ["list peer 1", "list peer 2"]


def test_a_durable_tier_that_cannot_be_listed_is_an_error_still(root: Path) -> None:
    (root / "run").mkdir()
    (root / "run" / "checkpoints").symlink_to(root)
    with pytest.raises(StorageError):
        list_stores([disk(root / "run")])


def test_a_manifest_at_a_peer_neither_commits_nor_hides_the_durable_one(hosts: Hosts) -> None:
    hosts.a.put(manifest_key(hosts.made.id), b"wrong")
    with serving(hosts.a.root) as a, reaching(a.address) as near:
        tally = restored(hosts.made, hosts.own, near, hosts.durable)
        assert {*tally.bytes_by_tier} == {"peer"}
        hosts.a.delete(image_key(hosts.made.id, 0, 2))
        assert readable(list_stores([near])[0]) == []


def test_where_every_copy_of_a_block_is_bad_each_is_told(hosts: Hosts) -> None:
    for store in (hosts.a, hosts.durable):
        flip_bit(hosts.image(store, 1), 8 * (4096 + 77))
    with serving(hosts.a.root) as a, reaching(a.address) as near:
        stores = [hosts.own, near, hosts.durable]
        sources = find_sources(hosts.made.id, stores, list_stores(stores)[0])
        with pytest.raises(CheckpointDamagedError, match=rf"durable.*{near.name}"):
            fill_targets(sources, whole_targets(hosts.made))
