"""Replicas of data parallelism that differ are found; those that are equal are never reported.

The ranks, the store and the state are in this process; plans, digests and comparisons are real.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.adapt.contract import ArrayOutline, Outline, Snapshot
from holdfast.engine.planning.replica_blocks import ReplicaBlock, ReplicaWindow, ReplicaWindows
from holdfast.errors import HoldfastError, InvalidArgumentError, ObjectNotFoundError
from holdfast.format.digests import BLOCK_SIZE_BYTES, block_ranges, digest
from holdfast.format.grid import Placement, chunk_count
from holdfast.format.layout import Chunk
from holdfast.format.names import AttemptId, CheckpointId, part_key
from holdfast.format.records import PartRecord
from holdfast.format.sealed import seal
from holdfast.observe.events.schema import ReplicasDiffer
from holdfast.observe.replica_differences import last_difference
from holdfast.policy.vouching import VouchedStep
from holdfast.store.contract import ReadableStore, Store
from holdfast.trainer.options import ReplicaCheck
from holdfast.trainer.planning import Planner, Taking
from holdfast.trainer.replica_votes import ReplicaBallot, ReplicaVotes, together
from holdfast.trainer.save.replica_checks import BlockDigests, ReplicaChecks, digests_of

ATTEMPT = AttemptId(1, "9f2c41ab")
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
ARRAYS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "params/w": ((40, 30), (10, 30)),
    "params/b": ((30,), (30,)),
    "mu/w": ((40, 30), (10, 30)),
    "nu/w": ((40, 30), (40, 30)),
    "rng": ((2,), (2,)),
}


@dataclass
class OneRank:
    """One rank: its own copy of the state, its planner and its checks."""

    rank: int
    state: dict[str, np.ndarray]
    planner: Planner
    checks: ReplicaChecks


class FakeSnapshot:
    """The state of one rank, as far as a plan and digests need it."""

    values = process_values = ()

    def __init__(self, state: dict[str, np.ndarray], outline: Outline) -> None:
        self.outline, self._arrays = outline, [*state.values()]

    def chunk_bytes(self, chunk: Chunk) -> memoryview:
        cut = tuple(slice(a, b) for a, b in zip(chunk.start, chunk.stop, strict=True))
        array = self._arrays[chunk.array_index]
        return np.ascontiguousarray(array[cut]).reshape(-1).view(np.uint8).data


class DataParallelJob:
    """Ranks that hold the same arrays, and save them together."""

    def __init__(
        self, count: int, share: float = 0.2, is_everywhere: bool = False, **options: Any
    ) -> None:
        self.records: dict[str, bytes] = {}
        self.ram: ReadableStore | None = cast(ReadableStore, self)
        self.events: list[ReplicasDiffer] = []
        self.errors: list[HoldfastError] = []
        self.step = 0
        holders = (0,) if is_everywhere else tuple(range(count))
        self.outline = Outline(
            arrays=tuple(
                ArrayOutline(
                    path=tuple(name.split("/")),
                    placement=Placement(
                        shape=shape,
                        dtype="float32",
                        chunk_shape=cells,
                        holders=(holders,) * chunk_count(shape, cells),
                    ),
                    prng_impl=None,
                    scalar=False,
                    is_everywhere=is_everywhere,
                )
                for name, (shape, cells) in ARRAYS.items()
            ),
            containers=(),
            process_values=(),
        )
        check = ReplicaCheck(share=share, **options)
        fail = self.errors.append if check.on_difference == "raise" else None
        self.ranks = [
            OneRank(
                rank,
                {name: np.ones(shape, np.float32) for name, (shape, _) in ARRAYS.items()},
                Planner("0" * 32, rank, count, compared=check),
                ReplicaChecks(
                    rank, cast(Store, self), lambda owner: self.ram, self.stamped(rank), fail
                ),
            )
            for rank in range(count)
        ]

    def stamped(self, rank: int) -> Any:
        return lambda event: self.events.append(
            msgspec.structs.replace(event, host=f"host-{rank}", time=BEGAN)
        )

    def get(self, key: str) -> bytes:
        if key not in self.records:
            raise ObjectNotFoundError(f"read {key}: there is no such object")
        return self.records[key]

    def train(self) -> None:
        """Make one deterministic step on all ranks."""
        self.step += 1
        for rank in self.ranks:
            for number, array in enumerate(rank.state.values()):
                array += np.float32(1 / (self.step + number))

    def save(self, is_durable: bool = True) -> None:
        """Save on all ranks, commit or keep in RAM, and compare."""
        checkpoint = CheckpointId(self.step, ATTEMPT)
        count = len(self.ranks)
        for one in self.ranks:
            snapshot = cast(Snapshot, FakeSnapshot(one.state, self.outline))
            taking = Taking(id=checkpoint, time=BEGAN, metrics=None)
            plan = one.planner.plan(snapshot, taking)
            window = one.planner.next_compared()
            assert window is not None
            self.records[part_key(checkpoint, one.rank, count)] = seal(
                PartRecord(
                    run_id="0" * 32,
                    step=checkpoint.step,
                    attempt=ATTEMPT,
                    rank=one.rank,
                    part_count=count,
                    image_size_bytes=plan.layout.size_bytes,
                    header_digest="0" * 32,
                    values=(),
                    blocks=tuple(
                        digest(snapshot.chunk_bytes(chunk)[start:stop])
                        for chunk in plan.layout.chunks
                        for start, stop in block_ranges(chunk.size_bytes)
                    ),
                )
            )
            digests = digests_of(snapshot, window.blocks)
            one.checks.expect(BlockDigests(checkpoint, count, window, digests))
        for one in self.ranks:
            one.checks.ended(checkpoint, is_durable=is_durable)
            one.checks.compare()
        self.records.clear()


def flipped(job: DataParallelJob, chance: random.Random) -> tuple[int, str]:
    """Flip one bit on one rank; return the rank and the array."""
    rank = chance.choice(job.ranks)
    name = chance.choice([*rank.state])
    data = rank.state[name].reshape(-1).view(np.uint8)
    data[chance.randrange(data.size)] ^= 1 << chance.randrange(8)
    return rank.rank, name


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_each_flipped_bit_is_found_within_the_saves_of_one_turn(first: int) -> None:
    for seed in range(first, first + 25):
        chance = random.Random(seed)
        share = chance.choice([0.05, 0.2, 0.5, 1.0])
        is_everywhere = chance.random() < 0.3
        job = DataParallelJob(chance.randint(2, 5), share, is_everywhere)
        for _ in range(chance.randint(0, 30)):
            job.save()
            job.step += 1
        assert job.events == []
        rank, name = flipped(job, chance)
        for _ in range(math.ceil(1 / share)):
            job.save()
            job.step += 1
        assert {array.partition("[")[0] for e in job.events for array in e.arrays} == {name}
        assert all(rank in (event.rank, event.owner) for event in job.events)
        difference = last_difference(job.events)
        assert difference is not None
        if len(job.ranks) > 2:
            assert difference.alone == rank, f"seed {seed}"
            assert f"rank {rank} " in difference.text
            assert "differs from" in difference.text
        else:
            assert difference.alone is None
            assert "which one is right is not known" in difference.text


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=pytest.mark.soak)], ids=["some", "ten thousand"]
)
def test_deterministic_training_has_no_false_alarm(count: int) -> None:
    job = DataParallelJob(3, 0.05)
    for _ in range(count):
        job.train()
        job.save()
    assert job.events == []


def test_a_difference_is_reported_with_its_place_and_raised_if_asked() -> None:
    job = DataParallelJob(3, 1.0, on_difference="raise")
    job.ranks[1].state["mu/w"][15, 7] += 1
    job.save()
    # Rank 1 owns the chunk, or one of the others does.
    assert {event.holders for event in job.events} == {(0, 1, 2)}
    assert all(event.blocks == 1 and event.arrays[0].startswith("mu/w") for event in job.events)
    assert all("mu/w" in str(error) for error in job.errors)
    assert len(job.errors) == len(job.events) > 0
    difference = last_difference(job.events)
    assert difference is not None
    assert difference.alone == 1
    assert difference.document["groups"] == ((0, 2), (1,))


def test_arrays_that_may_differ_are_not_compared() -> None:
    job = DataParallelJob(3, 1.0, may_differ=["rng", "mu"])
    for name in ("rng", "mu/w"):
        job.ranks[1].state[name] += 1
    job.save()
    assert job.events == []
    job.ranks[1].state["nu/w"] += 1
    job.save()
    assert {array for event in job.events for array in event.arrays} == {"nu/w"}


def test_a_checkpoint_without_a_commit_is_forgotten() -> None:
    job = DataParallelJob(2, 1.0)
    job.ranks[1].state["rng"] += 1
    checks = job.ranks[1].checks
    for step in range(100):
        window = ReplicaWindow(0, (), ())
        checks.expect(BlockDigests(CheckpointId(step, ATTEMPT), 2, window, ()))
    assert len(checks._pending) == 16
    checks.ended(CheckpointId(3, ATTEMPT), is_durable=True)
    checks.compare()
    assert job.events == []


@pytest.mark.parametrize("is_durable", [True, False])
def test_a_record_that_is_gone_is_not_compared(is_durable: bool) -> None:
    job = DataParallelJob(2, 1.0)
    job.save()
    one = job.ranks[1]
    job.ram = None
    one.state["rng"] += 1
    snapshot = cast(Snapshot, FakeSnapshot(one.state, job.outline))
    window = one.planner.next_compared()
    assert window is not None
    checkpoint = CheckpointId(7, ATTEMPT)
    digests = digests_of(snapshot, window.blocks)
    one.checks.expect(BlockDigests(checkpoint, 2, window, digests))
    one.checks.ended(checkpoint, is_durable=is_durable)
    one.checks.compare()
    assert job.events == []
    assert (one.checks.differs_at, one.checks.equal_until) == (None, 0)


def test_a_difference_is_found_in_checkpoints_that_are_in_ram_alone() -> None:
    job = DataParallelJob(3, 1.0)
    job.save(is_durable=False)
    assert job.events == []
    job.step = 1
    job.ranks[2].state["params/b"][3] += 1
    job.save(is_durable=False)
    assert {array.partition("[")[0] for event in job.events for array in event.arrays} == {
        "params/b"
    }
    assert {event.step for event in job.events} == {1}


def known_together(job: DataParallelJob) -> ReplicaBallot:
    ballots = [ReplicaBallot(r.checks.equal_until, r.checks.differs_at) for r in job.ranks]
    return together(ballots)


@pytest.mark.parametrize("seed", range(10))
def test_replicas_were_equal_up_to_the_step_to_which_all_ranks_go_back(seed: int) -> None:
    chance = random.Random(seed)
    share = chance.choice([0.1, 0.3, 1.0])
    job, turn = DataParallelJob(3, share), math.ceil(1 / share)
    for one in job.ranks:
        one.checks.begin(-1)
    for _ in range(turn + chance.randint(0, 30)):
        job.train()
        job.save(is_durable=chance.random() < 0.5)
        # A whole turn was compared at that step or after it.
        known = known_together(job)
        assert (job.step - turn + 1 if job.step >= turn else -1) <= known.equal_until <= job.step
        assert known.differs_at is None
    last_right = job.step
    flipped(job, chance)
    for _ in range(turn):
        job.train()
        job.save()
    known = known_together(job)
    assert known.differs_at is not None
    assert last_right < known.differs_at <= last_right + turn
    assert known.equal_until <= last_right
    for one in job.ranks:
        one.checks.begin(known.equal_until)
    assert known_together(job) == ReplicaBallot(known.equal_until, None)


def blocks_of(sizes: Sequence[int]) -> list[ReplicaBlock]:
    chunk = cast(Chunk, None)
    return [ReplicaBlock(0, None, chunk, n, 0, size) for n, size in enumerate(sizes)]


@given(
    st.lists(st.integers(1, BLOCK_SIZE_BYTES), max_size=60),
    st.floats(0.001, 1, exclude_min=True),
)
def test_the_windows_of_one_turn_have_each_block_once(sizes: list[int], share: float) -> None:
    blocks = blocks_of(sizes)
    windows, turn = ReplicaWindows(blocks, share, 1), math.ceil(1 / share)
    of_turn = [windows.window(number) for number in range(turn)]
    assert [block for window in of_turn for block in window.blocks] == blocks
    assert {window.numbers for window in of_turn} == {
        tuple(window.number for window in of_turn if window.blocks)
    }
    assert windows.window(turn) == of_turn[0]
    most = sum(sizes) / turn + max(sizes, default=0)
    assert all(sum(block.stop for block in window.blocks) <= most + 1 for window in of_turn)


@pytest.mark.parametrize(
    "options",
    [
        {"share": 0},
        {"share": 1.5},
        {"on_difference": "stop"},
        {"may_differ": "rng"},
        {"vote_steps": 0},
    ],
)
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        ReplicaCheck(**options)


def test_a_difference_that_only_the_end_finds_is_raised() -> None:
    for way in ("warn", "raise"):
        job = DataParallelJob(2, 1.0, on_difference=way)
        flipped(job, random.Random(0))
        job.save()
        (checks,) = [one.checks for one in job.ranks if one.checks.last_error is not None]
        checks.check_end(checks.last_error)
        with nullcontext() if way == "warn" else pytest.raises(HoldfastError, match="replicas"):
            checks.check_end(None)


def test_a_difference_after_the_last_vote_is_raised_at_the_end() -> None:
    job = DataParallelJob(2, 1.0)
    votes = [
        ReplicaVotes(cast(Any, None), cast(Any, None), one.checks, 100, VouchedStep(3))
        for one in job.ranks
    ]
    job.save()
    for vote in votes:
        vote.check_end()
    flipped(job, random.Random(0))
    job.save()
    (vote,) = [vote for vote in votes if vote._checks.differs_at is not None]
    with pytest.raises(HoldfastError, match="equal until step 3"):
        vote.check_end()
    vote.differs_at = 0
    vote.check_end()
