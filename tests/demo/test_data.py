import numpy as np
from numpy.typing import NDArray

from holdfast.demo.data import BatchShape, batch_iterator

_SHAPE = BatchShape(windows=4, context=16)


def _corpus(size_bytes: int = 20_000) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)


def test_a_batch_holds_windows_of_the_corpus() -> None:
    corpus = _corpus()
    batch = next(batch_iterator(corpus, _SHAPE, seed=1))
    assert batch.shape == (4, 17)
    assert batch.dtype == np.uint8
    for window in batch:
        assert window.tobytes() in corpus.tobytes()


def test_a_new_iterator_goes_on_where_a_saved_position_was() -> None:
    first = batch_iterator(_corpus(), _SHAPE, seed=1)
    for _ in range(7):
        next(first)
    position = first.get_state()
    expected = [next(first) for _ in range(20)]
    second = batch_iterator(_corpus(), _SHAPE, seed=1)
    second.set_state(position)
    for batch in expected:
        assert np.array_equal(batch, next(second))


def test_a_position_holds_across_the_end_of_an_epoch() -> None:
    corpus = _corpus(34 * 4 * 3)  # Three batches in an epoch.
    first = batch_iterator(corpus, _SHAPE, seed=1)
    batches = [next(first) for _ in range(2)]
    position = first.get_state()
    batches += [next(first) for _ in range(6)]
    assert not np.array_equal(batches[0], batches[3])
    second = batch_iterator(corpus, _SHAPE, seed=1)
    second.set_state(position)
    assert all(np.array_equal(batch, next(second)) for batch in batches[2:])


def test_the_seed_decides_the_order() -> None:
    one, same, other = (next(batch_iterator(_corpus(), _SHAPE, seed=seed)) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
