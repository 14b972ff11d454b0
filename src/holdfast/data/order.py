"""The global order in which a training uses its samples, whatever the number of processes.

Invariants:
- The samples of a step depend on the order's arguments, its plan and the step alone. Neither ranks,
  workers nor the time at which something is read ahead have an influence.
- The plan changes only where a step begins that no checkpoint has yet: at another batch size
  (`begin`), or where samples are skipped (`skip`). It is all that a checkpoint needs.

See docs/decisions/0060.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.adapt.detect import find_framework
from holdfast.adapt.program_facts import SAMPLE_ORDERS
from holdfast.clock import SystemClock
from holdfast.data.permutation import key_of, mixed
from holdfast.data.places import Places, StreamPlaces, shares_of
from holdfast.errors import InvalidArgumentError, StructureMismatchError

log = logging.getLogger(__name__)


class Sample(int):
    """The number of a sample, with a seed for what is random about this use of it.

    Attributes:
        seed: 64 bits that belong to the place of the sample in the order: another epoch has another
            seed, another number of processes or workers has the same.
    """

    seed: int

    def __new__(cls, number: int, seed: int) -> Sample:
        sample = super().__new__(cls, number)
        sample.seed = seed
        return sample

    def __reduce__(self) -> tuple[Any, ...]:
        return Sample, (int(self), self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples of one step, of all ranks or of one.

    Attributes:
        step: The step.
        epoch: How often all samples were used before the batch begins; with several sources, how
            often as many as all of them have.
        samples: The numbers of the samples, int64. Several sources are numbered one after another,
            as `torch.utils.data.ConcatDataset` does it.
        seeds: A seed for each sample, uint64; see `Sample`.
    """

    step: int
    epoch: int
    samples: np.ndarray
    seeds: np.ndarray

    def of(self, rank: int, count: int) -> Batch:
        """Return the share of one of `count` ranks: in their order, the shares are the batch.

        Raises:
            InvalidArgumentError: `rank` is none of the ranks.
        """
        _check_rank(rank, count)
        part = slice(_bound(len(self), rank, count), _bound(len(self), rank + 1, count))
        samples, seeds = self.samples[part], self.seeds[part]
        return Batch(step=self.step, epoch=self.epoch, samples=samples, seeds=seeds)

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return map(Sample, self.samples.tolist(), self.seeds.tolist())


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a plan: from `first_step` on, batches of `batch` samples are used from `place` on.

    `dropped` are the samples that are left out, ascending.
    """

    first_step: int
    place: int
    batch: int
    dropped: tuple[int, ...] = ()


class Order:
    """A global order of samples, and what of it each step of a training uses.

    Put it into the state: it is saved in a few bytes and restored on any number of processes. All
    processes make it with the same arguments.

    Args:
        length: The number of samples; a list of numbers for several sources; None for a stream,
            which `replay` reads.
        batch: The number of samples of all ranks in one step. A resumed run may have another one.
        seed: Determines the order.
        shuffle: Whether each epoch has an order of its own.
        epochs: After how many epochs the order ends, for one source. None: never.
        weights: How often each of several sources is used, relative to the others. None: each by
            its length. A source that is used up begins again.
        drop_last: Whether a last batch that is smaller than the others is left out.

    Raises:
        InvalidArgumentError: An argument is invalid.
    """

    def __init__(
        self,
        length: int | Sequence[int] | None,
        *,
        batch: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        weights: Sequence[float] | None = None,
        drop_last: bool = False,
    ) -> None:
        lengths = _lengths(length)
        batch, seed = _integer("batch", batch), _integer("seed", seed)
        epochs = None if epochs is None else _integer("epochs", epochs)
        _check(-(2**63) <= seed < 2**63, f"expected a seed of 64 bits, found {seed}")
        _check(
            weights is None or all(_is_finite(weight) for weight in weights),
            f"expected finite weights, found {weights}",
        )
        of_sources = tuple(lengths if weights is None else weights)
        _check(
            batch > 0 and all(n > 0 for n in lengths) and (epochs is None or epochs > 0),
            f"expected positive numbers, found {length=}, {batch=}, {epochs=}",
        )
        _check(
            len(of_sources) == len(lengths) and all(weight > 0 for weight in of_sources),
            f"expected a positive weight for each of {len(lengths)} sources, found {weights}",
        )
        _check(
            epochs is None or len(lengths) == 1,
            f"expected no epochs where the length is {length}, found {epochs=}; end the training "
            "at a step",
        )
        _check(
            bool(lengths) or length is not None or not shuffle,
            "a stream cannot be shuffled; pass shuffle=False, or its length",
        )
        _check(length is None or bool(lengths), f"expected a length, found {length!r}")
        shares = shares_of(of_sources) if lengths else ()
        self._places: Places | StreamPlaces = StreamPlaces()
        if lengths:
            self._places = Places(lengths, shares, seed, shuffle=shuffle)
        self._total = sum(lengths)
        self._stop = None if epochs is None else epochs * self._total
        self._is_last_dropped = drop_last
        self._batch, self._seed = batch, seed
        self._identity = {
            "lengths": [*lengths],
            "shares": [*shares],
            "seed": seed,
            "shuffle": shuffle,
        }
        self._plan = [Segment(0, 0, batch)]
        self.is_saved = False
        """Whether it is in a state that was saved or restored."""
        SAMPLE_ORDERS.add(self)

    @property
    def steps(self) -> int | None:
        """The number of steps after which the order ends; None if it does not end."""
        if self._stop is None:
            return None
        last = self._plan[-1]
        left = self._kept_before(self._stop, last) - self._kept_before(last.place, last)
        return last.first_step + (left if self._is_last_dropped else left + last.batch - 1) // (
            last.batch
        )

    def begin(self, start: int) -> None:
        """Use the batch size of this object from `start` on, the step after the one restored.

        `batches`, `source` and `replay` call it. Nothing changes if the size is that of the plan.

        Raises:
            InvalidArgumentError: `start` is no step.
        """
        last, start = self._plan[-1], _integer("a step", start)
        _check(start >= 0, f"expected a step from 0 on, found {start}")
        if start >= last.first_step and last.batch != self._batch:
            self._go_on(Segment(start, self._place(start), self._batch, last.dropped))

    def at(self, step: int) -> Batch:
        """Return the samples of a step; `of` divides them among ranks.

        Raises:
            InvalidArgumentError: The order has no such step.
        """
        self._check_begun()
        segment = self._segment(step)
        first = self._kept_before(segment.place, segment)
        first += (step - segment.first_step) * segment.batch
        stop = first + segment.batch
        if self._stop is not None:
            stop = min(stop, self._kept_before(self._stop, segment))
            size = segment.batch if self._is_last_dropped else 1
            _check(stop - first >= size, f"step {step}: the order ends after {self.steps} steps")
        place = self._place_of_kept(first, segment)
        places = np.arange(place, self._place_of_kept(stop - 1, segment) + 1)
        samples = self._places.samples(places)
        if segment.dropped:
            kept = ~np.isin(samples, segment.dropped)
            places, samples = places[kept], samples[kept]
        seeds = mixed(places.astype(np.uint64), key_of(self._seed))
        epoch = place // self._total if self._total else 0
        return Batch(step=step, epoch=epoch, samples=samples, seeds=seeds)

    def skip(self, start: int, *, steps: int = 0, samples: Iterable[int] = ()) -> None:
        """Leave out samples from `start` on, a step that is not trained yet.

        Make loaders and sources again afterwards: they may have read ahead.

        Args:
            start: The step from which on the order changes.
            steps: How many batches are left out: `start` uses that of `start + steps`.
            samples: The numbers of samples that are never used again.

        Raises:
            InvalidArgumentError: An argument is invalid, the plan has changed after `start`, or the
                order ends within the batches that are left out.
        """
        self.begin(start)
        last, end, steps = self._plan[-1], self.steps, _integer("steps", steps)
        numbers = [_integer("the number of a sample", sample) for sample in samples]
        dropped = tuple(sorted({*last.dropped, *numbers}))
        _check(steps >= 0, f"skip {steps} steps: expected a number from 0 on")
        _check(
            start >= last.first_step,
            f"skip {steps} steps at step {start}: expected a step from {last.first_step} on, where "
            "the order changed last",
        )
        if self._total:
            others = [number for number in numbers if not 0 <= number < self._total]
            _check(
                not others,
                f"skip samples {others}: expected numbers from 0 to {self._total - 1}",
            )
            _check(
                len(dropped) < self._total,
                f"skip samples: expected that one is left at least, found all {self._total}",
            )
        _check(
            end is None or start + steps <= end,
            f"skip {steps} steps at step {start}: the order ends after {end} steps",
        )
        self._go_on(Segment(start, self._place_until_stop(start + steps), self._batch, dropped))

    def mark(self, step: int) -> Segment:
        """Return what the order uses from `step` on, for `go_on_from`; that of the end after it."""
        self._check_begun()
        segment = self._segment(step)
        return Segment(step, self._place_until_stop(step), segment.batch, segment.dropped)

    def go_on_from(self, mark: Segment, start: int) -> None:
        """Use from step `start` on what `mark` was used from, also after a restore.

        What the plan had from `start` on is replaced: the training went back to before it.
        """
        self._go_on(Segment(start, mark.place, self._batch, mark.dropped))

    def batches(self, start: int, *, rank: int | None = None, count: int | None = None) -> Batches:
        """Return this rank's batches from `start` on: lists of `Sample`, one for each step.

        It is a `batch_sampler` for PyTorch's `DataLoader`, with any number of workers.

        Args:
            start: The first step, as `resume` returns it.
            rank: This process among those that divide each batch. None: as the manager finds it.
            count: The number of these processes. None: as the manager finds it.

        Raises:
            InvalidArgumentError: A batch has too few samples for the ranks.
        """
        self.begin(start)
        return Batches(self, start, *self._ranks(rank, count))

    def source(
        self, dataset: Any, start: int, *, rank: int | None = None, count: int | None = None
    ) -> Source:
        """Return what has, at the index of each step, the list of this rank's samples of `dataset`.

        It is a source of random access for Grain (`grain.MapDataset.source(source)[start:]`), and a
        dataset for PyTorch.

        Args:
            dataset: What has the samples by their numbers: a sequence, a `datasets.Dataset`, …
            start: The first step, as `resume` returns it.
            rank: See `batches`.
            count: See `batches`.

        Raises:
            InvalidArgumentError: A batch has too few samples for the ranks.
        """
        self.begin(start)
        return Source(self, dataset, *self._ranks(rank, count))

    def replay(
        self,
        stream: Iterable[Any],
        start: int,
        *,
        rank: int | None = None,
        count: int | None = None,
        at_most: int | None = None,
    ) -> Iterator[list[Any]]:
        """Return an iterator of this rank's samples of a stream that cannot seek.

        Each rank reads the whole stream. The samples before `start` are read again, and the log
        has their number and the time that this took.

        Args:
            stream: Gives the same samples in the same order whenever it is begun.
            start: The first step, as `resume` returns it.
            rank: See `batches`.
            count: See `batches`.
            at_most: Refuse to read more samples than this again. None: no limit.

        Raises:
            InvalidArgumentError: More than `at_most` samples are before `start`; or the stream ends
                there, when it is read.
        """
        self.begin(start)
        _check(not self._identity["shuffle"], "a stream is read in its order; pass shuffle=False")
        place = self._place(start)
        _check(
            at_most is None or place <= at_most,
            f"begin the stream at step {start}: {place:,} samples would be read again, expected at "
            f"most {at_most}; use data with random access, or raise at_most",
        )
        return self._replayed(iter(stream), start, *self._ranks(rank, count))

    def _replayed(
        self, stream: Iterator[Any], start: int, rank: int, count: int
    ) -> Iterator[list[Any]]:
        clock, place = SystemClock(), self._place(start)
        began_secs = clock.monotonic()
        again = sum(1 for _ in itertools.islice(stream, place))
        _check(again == place, f"the stream has {again:,} samples, and step {start} is after them")
        if place:
            secs = clock.monotonic() - began_secs
            log.info("read %d samples of the stream again in %.1f s", place, secs)
        for step in itertools.count(start):
            if self.steps is not None and step >= self.steps:
                return
            numbers = self.at(step).samples
            ahead = list(itertools.islice(stream, int(numbers[-1]) + 1 - place))
            samples = [ahead[n - place] for n in numbers.tolist() if n - place < len(ahead)]
            is_short = len(samples) < len(numbers)
            if len(samples) < (len(numbers) if self._is_last_dropped else count):
                return
            yield samples[_bound(len(samples), rank, count) : _bound(len(samples), rank + 1, count)]
            if is_short:
                return
            place = int(numbers[-1]) + 1

    def get_state(self) -> dict[str, Any]:
        """Return the plan, with what identifies the order."""
        self.is_saved = True
        plan = [[s.first_step, s.place, s.batch, [*s.dropped]] for s in self._plan]
        return {**self._identity, "plan": plan}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Set the plan that an order of the same samples has saved.

        Raises:
            StructureMismatchError: It is an order of other samples, or has another seed.
        """
        for name, expected in self._identity.items():
            if state.get(name) != expected:
                raise StructureMismatchError(
                    f"restore the order of samples: expected {name}={expected}, found "
                    f"{state.get(name)} in the checkpoint; make the Order with the saved one; "
                    "to begin a new order, leave it out of the state that resume gets, and name "
                    "its path in partial=..."
                )
        self.is_saved = True
        self._plan = [
            Segment(first_step, place, batch, tuple(dropped))
            for first_step, place, batch, dropped in state["plan"]
        ]

    def set_states(self, states: Sequence[Mapping[str, Any]], *, rank: int, count: int) -> None:
        """Set the plan from the states of another number of processes, which are all the same."""
        if any(state != states[0] for state in states):
            raise StructureMismatchError(
                "restore the order of samples: expected one state on all ranks, found several; "
                "make the Order with the same arguments, and skip the same, on all ranks"
            )
        self.set_state(states[0])

    def __repr__(self) -> str:
        lengths = self._identity["lengths"] or None
        return f"Order({lengths}, batch={self._batch}, seed={self._seed}, steps={self.steps})"

    def _ranks(self, rank: int | None, count: int | None) -> tuple[int, int]:
        """Return rank and count, and check that every batch has a sample for every rank."""
        if rank is None or count is None:
            _check(rank is count, f"expected both or none of rank and count, found {rank}, {count}")
            processes = find_framework().processes()
            rank, count = processes.rank, processes.count
        _check_rank(rank, count)
        smallest, steps = self._batch, self.steps
        if steps is not None and steps > self._plan[-1].first_step:
            smallest = len(self.at(steps - 1))
        _check(
            smallest >= count,
            f"expected at least {count} samples in each batch, one for each rank, found {smallest}"
            + ("; pass drop_last=True" if smallest < self._batch else ""),
        )
        return rank, count

    def _check_begun(self) -> None:
        _check(
            self._plan[-1].batch == self._batch,
            f"the checkpoint's batches have {self._plan[-1].batch} samples, those of this order "
            f"{self._batch}; call begin(start) first, with the step that resume returned",
        )

    def _go_on(self, segment: Segment) -> None:
        self._plan = [s for s in self._plan if s.first_step < segment.first_step]
        self._plan.append(segment)

    def _segment(self, step: int) -> Segment:
        _check(step >= 0, f"expected a step from 0 on, found {step}")
        return self._plan[bisect.bisect_right(self._plan, step, key=lambda s: s.first_step) - 1]

    def _place(self, step: int) -> int:
        """Return the place at which a step begins."""
        segment = self._segment(step)
        first = self._kept_before(segment.place, segment)
        return self._place_of_kept(first + (step - segment.first_step) * segment.batch, segment)

    def _place_until_stop(self, step: int) -> int:
        """Return the place at which a step begins; that of the end after the last, smaller one."""
        place = self._place(step)
        return place if self._stop is None else min(place, self._stop)

    def _kept_before(self, place: int, segment: Segment) -> int:
        """Return the number of places before `place` whose samples are not dropped."""
        return place - sum(self._places.count_before(s, place) for s in segment.dropped)

    def _place_of_kept(self, number: int, segment: Segment) -> int:
        """Return the place that has `number` such places before it, and is one itself."""
        if not segment.dropped:
            return number
        stop = 2 * (number + 1 + len(segment.dropped))
        while self._kept_before(stop, segment) <= number:
            stop *= 2
        return bisect.bisect_right(
            range(stop), number, lo=number, key=lambda p: self._kept_before(p + 1, segment)
        )


class Batches:
    """The batches of one rank; see `Order.batches`. Each iteration begins at the first step."""

    def __init__(self, order: Order, start: int, rank: int, count: int) -> None:
        self._order, self._start, self._rank, self._count = order, start, rank, count

    def __iter__(self) -> Iterator[list[Sample]]:
        steps = self._order.steps
        for step in itertools.count(self._start) if steps is None else range(self._start, steps):
            yield [*self._order.at(step).of(self._rank, self._count)]

    def __len__(self) -> int:
        if self._order.steps is None:
            raise TypeError("the order does not end; it has a length with epochs=...")
        return max(0, self._order.steps - self._start)


class Source:
    """The samples of one rank by the step; see `Order.source`."""

    def __init__(self, order: Order, dataset: Any, rank: int, count: int) -> None:
        self._order, self._dataset, self._rank, self._count = order, dataset, rank, count

    def __len__(self) -> int:
        return sys.maxsize if self._order.steps is None else self._order.steps

    def __getitem__(self, step: int) -> Any:
        if not 0 <= step < len(self):
            raise IndexError(f"step {step}: the order has {len(self)} steps")
        samples = [*self._order.at(step).of(self._rank, self._count)]
        get_many = getattr(self._dataset, "__getitems__", None)
        return get_many(samples) if get_many else [self._dataset[sample] for sample in samples]


def _check_rank(rank: int, count: int) -> None:
    _check(0 <= rank < count, f"expected a rank from 0 to {count - 1}, found {rank}")


def _bound(length: int, rank: int, count: int) -> int:
    """Return where the share of a rank begins."""
    return length * rank // count


def _integer(name: str, given: object) -> int:
    try:
        number = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        number = None
    _check(
        number is not None and not isinstance(given, bool),
        f"expected {name} as an int, found {given!r}",
    )
    assert number is not None
    return number


def _lengths(length: object) -> tuple[int, ...]:
    if length is None:
        return ()
    many = length if isinstance(length, Sequence) and not isinstance(length, str) else (length,)
    return tuple(_integer("length", number) for number in many)


def _is_finite(number: object) -> bool:
    try:
        return math.isfinite(number)  # type: ignore[arg-type]
    except TypeError:
        return False


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise InvalidArgumentError(f"order of samples: {text}")
