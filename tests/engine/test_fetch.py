"""Fetching a part from a peer's RAM: complete and right, or nothing visible and a free slot."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings

from holdfast.clock import SystemClock
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.engine.transfer import fetch
from holdfast.engine.transfer.fetch import fetch_part
from holdfast.errors import (
    CheckpointDamagedError,
    ObjectNotFoundError,
    OutOfSpaceError,
    StorageError,
)
from holdfast.format.digests import BLOCK_SIZE_BYTES
from holdfast.format.names import CHECKPOINTS, image_key, part_key
from holdfast.format.records import PartRecord
from holdfast.format.sealed import seal
from holdfast.peers.address import PeerAddress
from holdfast.peers.connection import PeerBounds
from holdfast.peers.store import PeerStore
from holdfast.store.ram import RamStore
from holdfast.store.slots import SlotPool
from tests.engine.making import Made, checkpoints, flip_bit, memory_folder, random_array
from tests.engine.stores import ram
from tests.peers import QUICK, line_to, reaching, serving, serving_process

MIB = 1 << 20


def _made() -> Made:
    """An image of several requests: chunks of no, few and many blocks."""
    made = Made()
    made.add(("big",), random_array((37 * MIB + 5,), "uint8", 1))
    made.add(("empty",), random_array((0, 3), "float32", 2))
    made.add(("small",), random_array((7,), "int8", 3))
    made.add(("middle",), random_array((5 * MIB,), "uint8", 4))
    return made


class Pair:
    """A peer that has a part in `theirs`, and this host's RAM in `own`."""

    def __init__(self, root: Path, made: Made) -> None:
        self.made = made
        self.theirs, self.own = ram(root / "theirs"), ram(root / "own")
        (self.part,) = made.write(self.theirs)
        self.image = root / "theirs" / image_key(made.id, 0, 1)

    def pull(self, peer: PeerStore) -> int:
        return fetch_part(peer, self.own, self.part, PartLayouts(self.made.spec.arrays))

    def pull_into(self, peer: PeerStore, data: bytes | bytearray) -> int:
        """Fetch into a slot in which a rank of this host has put `data`."""
        with contextlib.closing(self.own.begin(len(data))) as filling:
            filling.write(0, memoryview(data))
        return fetch_part(
            peer, self.own, self.part, PartLayouts(self.made.spec.arrays), is_filled=True
        )

    @property
    def slot_count(self) -> int:
        return len(list((self.own.root / "slots").glob("*")))

    def assert_same(self) -> None:
        for stored in self.theirs.list(CHECKPOINTS):
            assert self.own.get(stored.key) == self.theirs.get(stored.key)

    def assert_nothing_shows(self) -> None:
        assert list(self.own.list(CHECKPOINTS)) == []
        pool = SlotPool(self.own.root, None, SystemClock())
        # What was begun is free again, for the next one.
        assert len(pool.free_slots()) == len(list((self.own.root / "slots").glob("*")))

    def close(self) -> None:
        self.theirs.close()
        self.own.close()


@pytest.fixture
def pair(root: Path) -> Iterator[Pair]:
    with contextlib.closing(Pair(root, _made())) as made:
        yield made


@pytest.fixture
def address(pair: Pair) -> Iterator[PeerAddress]:
    with serving(pair.theirs.root) as server:
        yield server.address


def test_a_part_is_pulled_byte_for_byte(pair: Pair, address: PeerAddress) -> None:
    with reaching(address) as peer:
        for _ in range(2):
            pair.pull(peer)
            pair.assert_same()
            for stored in list(pair.own.list(CHECKPOINTS)):
                pair.own.delete(stored.key)
    # The second one went into the first one's slot.
    assert len(SlotPool(pair.own.root, None, SystemClock()).free_slots()) == 1


def test_of_a_part_that_was_copied_here_only_the_record_is_pulled(
    pair: Pair, address: PeerAddress
) -> None:
    with reaching(address) as peer:
        assert pair.pull_into(peer, pair.image.read_bytes()) == 0
    pair.assert_same()
    assert pair.slot_count == 1


def test_of_a_part_that_was_half_copied_here_the_rest_is_pulled(
    pair: Pair, address: PeerAddress
) -> None:
    data = pair.image.read_bytes()
    half = len(data) // 2
    with reaching(address) as peer:
        pulled_bytes = pair.pull_into(peer, data[:half] + bytes(len(data) - half))
    assert 0 < pulled_bytes - (len(data) - half) <= BLOCK_SIZE_BYTES
    pair.assert_same()


@pytest.mark.parametrize("place", [0.0, 0.5, 0.9999])
def test_a_block_that_was_copied_wrong_is_pulled_and_no_other(
    pair: Pair, address: PeerAddress, place: float
) -> None:
    data = bytearray(pair.image.read_bytes())
    data[int(len(data) * place)] ^= 1
    with reaching(address) as peer:
        assert 0 < pair.pull_into(peer, data) <= BLOCK_SIZE_BYTES
    pair.assert_same()


@settings(max_examples=10, deadline=None)
@given(made=checkpoints())
def test_whatever_an_image_holds_it_is_pulled(made: Made) -> None:
    with memory_folder() as folder:
        theirs, own = ram(Path(folder, "theirs")), ram(Path(folder, "own"))
        parts = made.write(theirs)
        with serving(theirs.root) as server, reaching(server.address) as peer:
            for part in parts:
                fetch_part(peer, own, part, PartLayouts(made.spec.arrays))
        for stored in theirs.list(CHECKPOINTS):
            assert own.get(stored.key) == theirs.get(stored.key)
        theirs.close()
        own.close()


@pytest.mark.parametrize("place", [0.0, 0.3, 0.9999])
def test_a_bad_block_leaves_nothing_and_is_told_with_the_peers_name(
    pair: Pair, address: PeerAddress, place: float
) -> None:
    flip_bit(pair.image, int(pair.part.image_size_bytes * place) * 8)
    with (
        reaching(address) as peer,
        pytest.raises(CheckpointDamagedError, match=rf"{peer.name}.*have digest"),
    ):
        pair.pull(peer)
    pair.assert_nothing_shows()


def _cut(pair: Pair) -> None:
    with pair.image.open("r+b") as file:
        file.truncate(pair.part.image_size_bytes - 1)


def _remove_image(pair: Pair) -> None:
    pair.theirs.delete(image_key(pair.made.id, 0, 1))


def _remove_record(pair: Pair) -> None:
    pair.theirs.delete(part_key(pair.made.id, 0, 1))


def _flip_record(pair: Pair) -> None:
    flip_bit(pair.theirs.root / part_key(pair.made.id, 0, 1), 400)


def _other_record(pair: Pair) -> None:
    other = msgspec.structs.replace(pair.part, blocks=("0" * 32, *pair.part.blocks[1:]))
    data = seal(other)
    pair.theirs.put(part_key(pair.made.id, 0, 1), data)


SPOILT: dict[str, tuple[Callable[[Pair], None], type[Exception]]] = {
    "cut off": (_cut, StorageError),
    "no image": (_remove_image, ObjectNotFoundError),
    "no record": (_remove_record, ObjectNotFoundError),
    "a bad record": (_flip_record, CheckpointDamagedError),
    "another record": (_other_record, CheckpointDamagedError),
}


@pytest.mark.parametrize(("spoil", "kind"), SPOILT.values(), ids=SPOILT)
def test_what_is_not_the_part_leaves_nothing(
    pair: Pair, address: PeerAddress, spoil: Callable[[Pair], None], kind: type[Exception]
) -> None:
    spoil(pair)
    with reaching(address) as peer, pytest.raises(kind):
        pair.pull(peer)
    pair.assert_nothing_shows()


def test_where_there_is_no_room_nothing_is_asked_for(pair: Pair, address: PeerAddress) -> None:
    pool = SlotPool(pair.own.root, MIB, SystemClock())
    own = RamStore(pair.own.root, pool.reserve, SystemClock())
    with reaching(address) as peer, pytest.raises(OutOfSpaceError):
        fetch_part(peer, own, pair.part, PartLayouts(pair.made.spec.arrays))
    pair.assert_nothing_shows()


def test_a_cut_network_costs_one_bounded_wait_and_heals(pair: Pair, address: PeerAddress) -> None:
    bounds = PeerBounds(stall_secs=1.0, rest_secs=0.0)
    with (
        line_to(address, cut_after_bytes=20 * MIB) as (line, near),
        reaching(near, bounds) as peer,
    ):
        started = time.monotonic()
        with pytest.raises(StorageError, match=f"peer {near}"):
            pair.pull(peer)
        assert time.monotonic() - started < 15.0
        pair.assert_nothing_shows()
        line.cut_after_bytes = float("inf")
        line.is_cut.clear()
        pair.pull(peer)
        pair.assert_same()


def test_a_slow_peer_is_given_up_and_leaves_nothing(pair: Pair, address: PeerAddress) -> None:
    with line_to(address, rate_bytes=MIB) as (line, near), reaching(near, QUICK) as peer:
        started = time.monotonic()
        with pytest.raises(StorageError, match=r"slower|timed out|no request for"):
            pair.pull(peer)
        # At this line's rate, the whole would take more than 40 s.
        assert time.monotonic() - started < 20.0
        assert line.passed_bytes < pair.part.image_size_bytes // 2
    pair.assert_nothing_shows()


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_peer_that_dies_or_hangs_midway_leaves_nothing(pair: Pair, how: str) -> None:
    with (
        serving_process(pair.theirs.root) as (process, there),
        line_to(there) as (line, near),
        reaching(near, QUICK) as peer,
    ):

        def spoil(data: bytes, passed: int) -> bytes:
            if passed > 2 * MIB:
                process.kill() if how == "kill" else _stop(process.pid)
            return data

        line.spoil = spoil
        started = time.monotonic()
        with pytest.raises(StorageError, match=f"peer {near}"):
            pair.pull(peer)
        assert time.monotonic() - started < 15.0
        pair.assert_nothing_shows()


def _stop(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)


def test_the_slot_is_closed_only_after_the_last_stream_ended(
    pair: Pair, address: PeerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first error ends the fetch; bytes of other streams must not be written to a free slot."""
    monkeypatch.setattr(fetch, "SPAN_SIZE_BYTES", MIB)
    flip_bit(pair.image, 50)
    late: list[bool] = []
    inner = fetch._Fetch._fetch_span

    def watched(bringing, span) -> None:
        if span[0][0] > 0:
            time.sleep(0.2)
        inner(bringing, span)
        late.append(bringing._filling._slot.is_filling)

    monkeypatch.setattr(fetch._Fetch, "_fetch_span", watched)
    with reaching(address) as peer, pytest.raises(CheckpointDamagedError):
        pair.pull(peer)
    assert late
    assert all(late)


def test_a_record_of_this_format_is_what_is_compared(pair: Pair) -> None:
    data = pair.theirs.get(part_key(pair.made.id, 0, 1))
    assert seal(pair.part) == data
    assert isinstance(pair.part, PartRecord)
