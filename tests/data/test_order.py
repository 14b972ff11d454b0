"""The order of samples: each once in each epoch, by the step alone, divided without loss."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data import Order, Sample
from holdfast.data.permutation import TABLE_MAX, Permutation
from holdfast.data.places import Places, shares_of
from holdfast.errors import InvalidArgumentError, StructureMismatchError
from holdfast.format.values import decode_value, encode_value

LENGTHS = st.one_of(st.integers(1, 70), st.integers(1, 3000))
SEEDS = st.integers(0, 2**40)


def samples_from(order: Order, start: int, stop: int) -> list[int]:
    return [int(sample) for step in range(start, stop) for sample in order.at(step).samples]


def resumed(order: Order, **changes: Any) -> Order:
    """Return an order with the state of `order`, as it comes out of a checkpoint."""
    arguments = {"length": 50, "batch": 8, "seed": 3} | changes
    other = Order(**arguments)
    other.set_state(decode_value(encode_value(order.get_state(), "data")))  # type: ignore[arg-type]
    return other


@given(st.one_of(LENGTHS, st.integers(TABLE_MAX, TABLE_MAX + 9)), SEEDS)
@settings(max_examples=40)
def test_a_permutation_has_each_number_once_and_an_inverse(length: int, key: int) -> None:
    numbers = np.arange(length)
    permutation = Permutation(length, key)
    images = permutation.image(numbers)
    assert np.array_equal(np.sort(images), numbers)
    assert np.array_equal(permutation.preimage(images), numbers)


def test_a_permutation_looks_random() -> None:
    length, keys = 10, 1500
    images = np.array([Permutation(length, key).image(np.arange(length)) for key in range(keys)])
    pairs = np.zeros((length, length))
    for first, second in zip(images[:, 0], images[:, 1], strict=True):
        pairs[first, second] += 1
    off_diagonal = pairs[~np.eye(length, dtype=bool)]
    expected = keys / off_diagonal.size
    chi_square = float(((off_diagonal - expected) ** 2 / expected).sum())
    assert chi_square < off_diagonal.size + 4 * (2 * off_diagonal.size) ** 0.5
    large = Permutation(10**12, 7).image(np.arange(20_000)) / 10**12
    assert abs(float(np.corrcoef(large[:-1], large[1:])[0, 1])) < 0.03
    assert abs(float(large.mean()) - 0.5) < 0.01


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert samples_from(Order(10, batch=5, seed=1), 0, 4) == PUBLISHED
    assert [*Order([6, 3], batch=6, seed=1, weights=[2, 1]).at(1)] == PUBLISHED_OF_TWO
    assert [sample.seed for sample in Order(10, batch=2).at(0)] == PUBLISHED_SEEDS


@given(LENGTHS, st.integers(1, 90), st.integers(1, 4), SEEDS, st.booleans())
def test_each_epoch_has_each_sample_once(
    length: int, batch: int, epochs: int, seed: int, shuffle: bool
) -> None:
    order = Order(length, batch=batch, seed=seed, shuffle=shuffle, epochs=epochs)
    assert order.steps is not None
    used = samples_from(order, 0, order.steps)
    for epoch in range(epochs):
        assert sorted(used[epoch * length : (epoch + 1) * length]) == [*range(length)]
    assert len(used) == epochs * length
    with pytest.raises(InvalidArgumentError, match="the order ends after"):
        order.at(order.steps)
    shorter = Order(length, batch=batch, seed=seed, epochs=epochs, drop_last=True)
    assert shorter.steps == epochs * length // batch


def test_epochs_and_seeds_differ() -> None:
    order = Order(1000, batch=1000, seed=1)
    orders = [order.at(0), order.at(1), Order(1000, batch=1000, seed=2).at(0)]
    assert len({tuple(of.samples) for of in orders}) == 3
    assert [of.epoch for of in orders] == [0, 1, 0]
    seeds = [seed for of in orders[:2] for seed in of.seeds.tolist()]
    assert len(set(seeds)) == 2000


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.data())
@settings(max_examples=40)
def test_each_source_is_used_by_its_weight_and_each_of_its_samples_once_in_its_epoch(
    lengths: list[int], data: st.DataObject
) -> None:
    weights = data.draw(
        st.lists(st.sampled_from([0.1, 0.25, 1, 3]), min_size=len(lengths), max_size=len(lengths))
    )
    order = Order(lengths, batch=35, seed=5, weights=weights)
    used = samples_from(order, 0, 12)
    firsts = np.cumsum([0, *lengths])
    for source, length in enumerate(lengths):
        of_source = [n for n in used if firsts[source] <= n < firsts[source + 1]]
        assert abs(len(of_source) - len(used) * weights[source] / sum(weights)) <= 1
        whole = len(of_source) // length
        for epoch in range(whole):
            part = of_source[epoch * length : (epoch + 1) * length]
            assert sorted(part) == [*range(firsts[source], firsts[source + 1])]


def test_weights_are_exact_decimals_or_rounded() -> None:
    assert shares_of([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert shares_of([3, 1]) == (3, 1)
    assert shares_of([1e-9, 1]) == (1, 10_000)
    thirds = shares_of([1 / 3, 2 / 3])
    assert thirds[1] / sum(thirds) == pytest.approx(2 / 3, abs=1e-4)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(0, 200), st.booleans())
@settings(max_examples=30)
def test_what_is_counted_before_a_place_is_what_was_there(
    lengths: list[int], place: int, shuffle: bool
) -> None:
    places = Places(lengths, shares_of(lengths), 11, shuffle=shuffle)
    used = Counter(places.samples(np.arange(place)).tolist())
    for sample in range(sum(lengths)):
        assert places.count_before(sample, place) == used[sample]


@given(st.integers(1, 64), st.integers(1, 9))
def test_the_shares_of_the_ranks_are_the_batch_in_its_order(batch: int, count: int) -> None:
    whole = Order(100, batch=batch).at(3)
    shares = [whole.of(rank, count) for rank in range(count)]
    assert [*np.concatenate([share.samples for share in shares])] == [*whole.samples]
    assert [*np.concatenate([share.seeds for share in shares])] == [*whole.seeds]
    sizes = {len(share) for share in shares}
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=5))
def test_another_batch_size_goes_on_at_the_next_sample(parts: list[tuple[int, int]]) -> None:
    used, order, start = [], Order(50, batch=parts[0][0], seed=3), 0
    for batch, steps in parts:
        order = resumed(order, batch=batch)
        order.begin(start)
        used += samples_from(order, start, start + steps)
        start += steps
    assert used == SEQUENCE[: len(used)]
    # What was used before is still known.
    assert samples_from(order, 0, start) == used


def test_a_resume_with_another_batch_size_begins_at_a_step_that_is_named() -> None:
    order = resumed(Order(50, batch=4, seed=3), batch=6)
    with pytest.raises(InvalidArgumentError, match=r"begin\(start\)"):
        order.at(0)
    assert [*order.source(range(50), 2)[2]] == SEQUENCE[8:14]


@given(st.data())
@settings(max_examples=40)
def test_dropped_samples_are_never_used_and_all_others_in_the_same_order(
    data: st.DataObject,
) -> None:
    start = data.draw(st.integers(0, 15))
    dropped = data.draw(st.sets(st.integers(0, 49), max_size=6))
    steps = data.draw(st.integers(0, 4))
    order = Order(50, batch=8, seed=3)
    order.skip(start, steps=steps, samples=dropped)
    order = resumed(order)
    every = SEQUENCE
    first = (start + steps) * 8
    expected = every[: start * 8] + [n for n in every[first:] if n not in dropped]
    assert samples_from(order, 0, 40) == expected[:320]


def test_the_seeds_of_samples_stay_where_others_are_skipped() -> None:
    order = Order(50, batch=8, seed=3)
    following = [(int(s), s.seed) for step in (6, 7) for s in order.at(step)]
    order.skip(2, steps=4)
    assert [(int(s), s.seed) for step in (2, 3) for s in order.at(step)] == following


def test_skips_add_up_and_end_where_the_epochs_end() -> None:
    order = Order(50, batch=8, seed=3, epochs=2)
    order.skip(3, steps=2)
    order.skip(3, steps=1, samples=[7])
    every = SEQUENCE[:100]
    left = every[:24] + [n for n in every[48:] if n != 7]
    assert order.steps == -(-len(left) // 8)
    assert samples_from(order, 0, order.steps) == left
    with pytest.raises(InvalidArgumentError, match="from 3 on"):
        order.skip(2, steps=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"length": 0, "batch": 1}, "positive"),
        ({"length": 5, "batch": 0}, "positive"),
        ({"length": [], "batch": 1}, "length"),
        ({"length": [3, 4], "batch": 1, "weights": [1]}, "weight"),
        ({"length": [3, 4], "batch": 1, "weights": [1, 0]}, "weight"),
        ({"length": [3, 4], "batch": 1, "epochs": 2}, "epochs"),
        ({"length": None, "batch": 1}, "shuffle"),
    ],
)
def test_a_bad_argument_is_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        Order(**arguments)


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([3, 50], r"skip samples \[50\]: expected numbers from 0 to 49"),
        ([-1], r"skip samples \[-1\]: expected numbers from 0 to 49"),
        (range(50), "skip samples: expected that one is left at least, found all 50"),
    ],
    ids=["too large", "negative", "all"],
)
def test_samples_that_cannot_be_dropped_are_refused(samples: Any, text: str) -> None:
    order = Order(50, batch=8)
    with pytest.raises(InvalidArgumentError, match=text):
        order.skip(0, samples=samples)
    assert order.get_state() == Order(50, batch=8).get_state()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda order: order.at(0).of(3, 2), "expected a rank from 0 to 1, found 3"),
        (lambda order: order.at(0).of(-1, 2), "expected a rank from 0 to 1, found -1"),
        (lambda order: order.begin(-2), "expected a step from 0 on, found -2"),
        (lambda order: order.begin(1.5), "expected a step as an int, found 1.5"),
        (lambda order: order.skip(0, steps=99), "the order ends after 13 steps"),
        (lambda order: order.skip(2, steps=1000), "the order ends after 13 steps"),
        (lambda order: order.skip(0, steps=-1), "skip -1 steps: expected a number from 0 on"),
        (lambda order: order.skip(0, samples=[1.7]), "expected the number of a sample as an int"),
    ],
)
def test_a_call_that_means_no_samples_is_refused(call: Callable[[Order], Any], text: str) -> None:
    order = Order(50, batch=8, epochs=2)
    with pytest.raises(InvalidArgumentError, match=text):
        call(order)
    assert order.get_state() == Order(50, batch=8, epochs=2).get_state()


def test_all_that_is_left_of_an_order_can_be_skipped() -> None:
    order = Order(50, batch=8, epochs=2)
    order.skip(4, steps=9, samples=np.array([7]))
    assert order.steps == 4


@pytest.mark.parametrize("change", [{"length": 51}, {"seed": 4}, {"shuffle": False}])
def test_an_order_of_other_samples_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(StructureMismatchError, match=r"restore the order of samples: expected"):
        resumed(Order(50, batch=8, seed=3), **change)


def test_orders_that_differ_between_ranks_are_refused() -> None:
    states = [Order(50, batch=8).get_state() for _ in range(3)]
    order = Order(50, batch=8)
    order.set_states(states, rank=1, count=2)
    states[1]["plan"] = [[0, 8, 8, []]]
    with pytest.raises(StructureMismatchError, match="on all ranks"):
        order.set_states(states, rank=1, count=2)


def test_a_batch_that_is_too_small_for_the_ranks_is_refused_before_the_training() -> None:
    order = Order(10, batch=4, epochs=1)
    order.batches(0, rank=0, count=2)
    with pytest.raises(InvalidArgumentError, match="drop_last"):
        order.batches(0, rank=0, count=3)
    Order(10, batch=4, epochs=1, drop_last=True).batches(0, rank=0, count=3)
    with pytest.raises(InvalidArgumentError, match="both or none"):
        order.batches(0, rank=0)
    with pytest.raises(InvalidArgumentError, match="a rank from 0 to 1, found 2"):
        order.batches(0, rank=2, count=2)


def test_a_sample_is_a_number_with_a_seed_also_in_another_process() -> None:
    sample = next(iter(Order(10, batch=1).at(0)))
    copied = pickle.loads(pickle.dumps(sample))
    assert isinstance(copied, Sample)
    assert (copied, copied.seed) == (sample, sample.seed)
    assert np.arange(10)[sample] == int(sample)


SEQUENCE = Order(50, batch=900, seed=3).at(0).samples.tolist()
"""The order of the tests that skip, as one batch."""
PUBLISHED = [2, 6, 0, 5, 7, 3, 9, 4, 1, 8, 6, 1, 0, 4, 8, 9, 3, 7, 2, 5]
PUBLISHED_OF_TWO = [4, 6, 3, 3, 8, 1]
PUBLISHED_SEEDS = [7312454760158299062, 15311552625209634736]
