"""Ranks that restore from a bucket read each byte once in all, and pass it on through RAM."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from holdfast.clock import SystemClock
from holdfast.engine.reading import exchange as exchanging
from holdfast.engine.reading import spans
from holdfast.engine.reading.exchange import Exchange, ExchangePlace, role_of
from holdfast.engine.reading.restore import Filling, RestoreTally
from holdfast.engine.reading.spans import GAP_MAX_BYTES, shared_ranges
from holdfast.errors import StorageError
from holdfast.format.names import EXCHANGE
from holdfast.store.contract import ReadableStore
from tests.engine.making import Made, checkpoints, disk, memory_folder, random_array, sources_of
from tests.engine.stores import WatchingStore
from tests.engine.test_restore import assert_filled, target, targets_of, whole_targets
from tests.hosts import wait_until
from tests.peers import PATIENT, reaching, serving

MIB = 1024 * 1024


class Bucket(WatchingStore):
    """A durable tier whose reads count as requests to a service."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.is_remote = True

    def bytes_read(self) -> int:
        return sum(stop - start for _, start, stop in self.reads)


def folders(root: Path, hosts: Sequence[str]) -> dict[str, Path]:
    found = {host: root / host for host in hosts}
    for folder in found.values():
        folder.mkdir(parents=True, exist_ok=True)
    return found


class Job:
    """Ranks in threads of one process, each with its place; the ram of host h is in `ram[h]`."""

    def __init__(
        self,
        root: Path,
        hosts: Sequence[str],
        peers: Callable[[str], dict[str, ReadableStore]] = lambda host: {},
    ) -> None:
        self.ram = folders(root, hosts)
        self.places = [
            ExchangePlace(rank=rank, ram_folder=self.ram[host], hosts=hosts, peers=peers(host))
            for rank, host in enumerate(hosts)
        ]
        self.exchanges = [Exchange(place, "one", SystemClock()) for place in self.places]

    def run(self, fillings: Sequence[Filling | None]) -> list[RestoreTally | None]:
        """Runs the fillings of all ranks at once; a rank without one has ended."""
        shared = shared_ranges([f.wants if f is not None else {} for f in fillings])
        tallies: list[RestoreTally | None] = [None] * len(fillings)

        def fill(rank: int) -> None:
            filling, exchange = fillings[rank], self.exchanges[rank]
            try:
                if filling is not None:
                    exchange.share(shared)
                    tallies[rank] = filling.run(exchange=exchange)
            finally:
                exchange.end()

        with ThreadPoolExecutor(len(fillings)) as pool:
            for job in [pool.submit(fill, rank) for rank in range(len(fillings))]:
                job.result()
        return tallies

    def end(self) -> None:
        for exchange in self.exchanges:
            exchange.remove_files()
        assert not [path for folder in self.ram.values() for path in folder.glob(f"{EXCHANGE}/*")]


def small(count: int = 1) -> Made:
    made = Made(part_count=2)
    for number in range(count):
        made.add((f"a{number}",), random_array((3 * MIB + number,), "uint8", number))
    made.add(("b",), random_array((40 * MIB,), "uint8", 99), owners=((1, 1),))
    return made


@contextlib.contextmanager
def served(root: Path, hosts: Sequence[str]) -> Iterator[Callable[[str], dict]]:
    """The agents' servers of all hosts; what reaches those of the others from a host."""
    with contextlib.ExitStack() as stack:
        servers = {
            host: stack.enter_context(serving(folder))
            for host, folder in folders(root, hosts).items()
        }

        def peers(own: str) -> dict[str, ReadableStore]:
            return {
                host: stack.enter_context(reaching(server.address, PATIENT))
                for host, server in servers.items()
                if host != own
            }

        yield peers


def test_four_ranks_of_a_host_read_a_replicated_state_once(root: Path) -> None:
    made = small(4)
    made.save(disk(root / "run"))
    bucket = Bucket(disk(root / "run"))
    targets = [whole_targets(made) for _ in range(4)]
    job = Job(root, ["a"] * 4)
    tallies = job.run([Filling(sources_of(made.id, bucket), of_rank) for of_rank in targets])
    for of_rank in targets:
        assert_filled(made, of_rank)
    size_bytes = sum(array.nbytes for array in made.arrays.values())
    assert bucket.bytes_read() == size_bytes
    assert all(tally.passed_over == [] for tally in tallies)
    assert sum(tally.shared_bytes for tally in tallies) == 3 * size_bytes
    # All that was passed on was taken, and its memory is free.
    assert not [*(root / "a" / EXCHANGE).rglob("*-*-*")]
    job.end()


def test_six_ranks_of_three_hosts_read_it_once_and_pass_it_on_by_their_agents(root: Path) -> None:
    made = small(4)
    made.save(disk(root / "run"))
    bucket = Bucket(disk(root / "run"))
    hosts = ["a", "b", "c", "a", "b", "c"]
    targets = [whole_targets(made) for _ in hosts]
    with served(root, hosts) as peers:
        job = Job(root, hosts, peers)
        tallies = job.run([Filling(sources_of(made.id, bucket), of_rank) for of_rank in targets])
        for of_rank in targets:
            assert_filled(made, of_rank)
        assert bucket.bytes_read() == sum(array.nbytes for array in made.arrays.values())
        assert all(tally.passed_over == [] for tally in tallies)
        left = [path for host in "abc" for path in (root / host / EXCHANGE).rglob("*-*-*")]
        assert left == []
        job.end()


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_ranks_that_want_any_regions_get_them_and_read_no_block_twice(data: st.DataObject) -> None:
    made = data.draw(checkpoints())
    count = data.draw(st.integers(1, 4))
    targets = [data.draw(targets_of(made)) for _ in range(count)]
    with memory_folder() as folder:
        root = Path(folder)
        made.save(disk(root / "run"))
        bucket = Bucket(disk(root / "run"))
        job = Job(root, ["a"] * count)
        job.run([Filling(sources_of(made.id, bucket), of_rank) for of_rank in targets])
        for of_rank in targets:
            assert_filled(made, of_rank)
        read = sorted(bucket.reads)
        assert all(
            one[0] != other[0] or one[2] <= other[1] for one, other in itertools.pairwise(read)
        )
        job.end()


def test_a_rank_reads_by_itself_what_an_ended_one_was_to_give(root: Path) -> None:
    made = small()
    made.save(disk(root / "run"))
    bucket = Bucket(disk(root / "run"))
    targets = whole_targets(made)
    job = Job(root, ["a"] * 2)
    wants = Filling(sources_of(made.id, bucket), targets).wants
    job.exchanges[1].end()
    job.exchanges[0].share(shared_ranges([wants, wants]))
    tally = Filling(sources_of(made.id, bucket), targets).run(exchange=job.exchanges[0])
    assert_filled(made, targets)
    assert tally.passed_over == [
        "exchange with rank 1: it has ended; its spans are read from the bucket"
    ]
    job.end()


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_a_rank_that_gives_nothing_is_waited_for_once(
    root: Path, hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanging, "STALL_SECS", 0.3)
    made = small(8)
    made.save(disk(root / "run"))
    bucket = Bucket(disk(root / "run"))
    targets = whole_targets(made)
    with served(root, hosts) as peers:
        job = Job(root, hosts, peers)
        filling = Filling(sources_of(made.id, bucket), targets)
        job.exchanges[0].share(shared_ranges([filling.wants, filling.wants]))
        began = time.monotonic()
        tally = filling.run(exchange=job.exchanges[0])
        assert time.monotonic() - began < 10
        assert_filled(made, targets)
        (problem,) = tally.passed_over
        assert "exchange with rank 1: it gave nothing for" in problem
        job.end()


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_a_rank_that_fails_keeps_no_other_one_waiting(root: Path, hosts: list[str]) -> None:
    made = small(8)
    made.save(disk(root / "run"))
    bucket, broken = Bucket(disk(root / "run")), Bucket(disk(root / "run"))

    def fail(offset: int) -> None:
        raise StorageError("the network is down")

    broken.before_read = fail
    targets = [whole_targets(made) for _ in range(2)]
    with served(root, hosts) as peers:
        job = Job(root, hosts, peers)
        fillings = [
            Filling(sources_of(made.id, store), of_rank)
            for store, of_rank in zip((bucket, broken), targets, strict=True)
        ]
        began = time.monotonic()
        with pytest.raises(StorageError, match="the network is down"):
            job.run(fillings)
        assert time.monotonic() - began < exchanging.STALL_SECS / 2
        assert_filled(made, targets[0])
        job.end()


def test_a_rank_of_another_host_that_ended_is_not_waited_for(root: Path) -> None:
    made = small()
    made.save(disk(root / "run"))
    bucket = Bucket(disk(root / "run"))
    targets = whole_targets(made)
    with served(root, ["a", "b"]) as peers:
        job = Job(root, ["a", "b"], peers)
        place = dataclasses.replace(job.places[0], is_lost=lambda: True)
        told = Exchange(place, "other", SystemClock())
        filling = Filling(sources_of(made.id, bucket), targets)
        told.share(shared_ranges([filling.wants, filling.wants]))
        tally = filling.run(exchange=told)
        assert_filled(made, targets)
        assert len(tally.passed_over) == 1
        told.remove_files()
        job.end()


def test_a_full_memory_makes_each_rank_read_by_itself(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanging, "memory_left_bytes", lambda: 0)
    made = small()
    made.save(disk(root / "run"))
    bucket = Bucket(disk(root / "run"))
    targets = [whole_targets(made) for _ in range(2)]
    job = Job(root, ["a"] * 2)
    tallies = job.run([Filling(sources_of(made.id, bucket), of_rank) for of_rank in targets])
    for of_rank in targets:
        assert_filled(made, of_rank)
    assert bucket.bytes_read() == 2 * sum(array.nbytes for array in made.arrays.values())
    assert any("no room in RAM" in reason for reason in tallies[0].passed_over)
    job.end()


def test_a_slow_taker_bounds_what_is_in_ram(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanging, "GIVEN_MAX_BYTES", 10 * MIB)
    monkeypatch.setattr(spans, "SPAN_SIZE_MAX_BYTES", 8 * MIB)
    made = Made()
    made.add(("a",), random_array((80 * MIB,), "uint8", 0))
    made.save(disk(root / "run"))
    bucket = Bucket(disk(root / "run"))
    job = Job(root, ["a"] * 2)
    most = 0
    taken = job.exchanges[1].take_span

    def take_late(*of_span) -> bool:
        nonlocal most
        span, *_ = of_span
        wait_until(lambda: [*(root / "a" / EXCHANGE).glob(f"*/to-1/{span.file_name}")])
        time.sleep(0.02)
        files = {}
        for path in (root / "a" / EXCHANGE).rglob("*-*-*"):
            # The other rank removes files meanwhile.
            with contextlib.suppress(FileNotFoundError):
                state = path.stat()
                files[state.st_ino] = state.st_size
        most = max(most, sum(files.values()))
        return taken(*of_span)

    monkeypatch.setattr(job.exchanges[1], "take_span", take_late)
    targets = [whole_targets(made) for _ in range(2)]
    job.run([Filling(sources_of(made.id, bucket), of_rank) for of_rank in targets])
    for of_rank in targets:
        assert_filled(made, of_rank)
    assert bucket.bytes_read() == 80 * MIB
    # Each of the two has given so much at most.
    assert 0 < most <= 2 * 10 * MIB
    job.end()


def test_a_wrong_byte_that_was_passed_on_is_read_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small()
    made.save(disk(root / "run"))
    bucket = Bucket(disk(root / "run"))
    job = Job(root, ["a"] * 2)
    take = job.exchanges[1].take_span
    lock, changed = threading.Lock(), []

    def take_changed(span, source, memory) -> bool:
        found = take(span, source, memory)
        with lock:
            if found and not changed:
                memory[0] ^= 1
                changed.append(span)
        return found

    monkeypatch.setattr(job.exchanges[1], "take_span", take_changed)
    targets = [whole_targets(made) for _ in range(2)]
    job.run([Filling(sources_of(made.id, bucket), of_rank) for of_rank in targets])
    for of_rank in targets:
        assert_filled(made, of_rank)
    assert changed
    job.end()


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=9),
    st.integers(0, 1000),
    st.data(),
)
def test_each_span_has_one_reader_and_reaches_all_that_want_it(
    hosts: list[str], number: int, data: st.DataObject
) -> None:
    ranks = sorted(data.draw(st.sets(st.integers(0, len(hosts) - 1), min_size=1)))
    roles = {rank: role_of(number, ranks, rank, hosts) for rank in ranks}
    (reader,) = [rank for rank, role in roles.items() if role.source is None]
    assert all(
        role.source is None or rank in roles[role.source].takers for rank, role in roles.items()
    )
    given = [taker for role in roles.values() for taker in role.takers]
    assert sorted([*given, reader]) == ranks
    # A host gets it once.
    crossing = [
        hosts[taker]
        for rank, role in roles.items()
        for taker in role.takers
        if hosts[taker] != hosts[rank]
    ]
    assert len(crossing) == len(set(crossing)) == len({hosts[rank] for rank in ranks}) - 1


def test_small_gaps_between_wanted_blocks_are_read_and_large_ones_are_not(root: Path) -> None:
    made = Made()
    for number in range(8):
        size = GAP_MAX_BYTES if number < 4 else 2 * GAP_MAX_BYTES
        made.add((f"a{number}",), random_array((size,), "uint8", number))
    made.save(disk(root / "run"))
    bucket = Bucket(disk(root / "run"))
    targets = [target(made, index, ((0,), made.specs[index].shape)) for index in (0, 2, 4, 6)]
    Filling(sources_of(made.id, bucket), targets).run()
    assert_filled(made, targets)
    sizes = [(stop - start) // GAP_MAX_BYTES for _, start, stop in sorted(bucket.reads)]
    # The gaps of one unit, after the first and the second, are read; that of two units is not.
    assert sizes == [6, 2]
