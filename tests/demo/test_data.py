from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.demo.data import Batches, BatchShape, batch_iterator, load_corpus
from holdfast.errors import StorageError

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


def test_hosts_share_the_data_and_none_sees_what_another_one_does() -> None:
    corpus = np.repeat(np.arange(12, dtype=np.uint8), 34)  # Twelve stretches.
    shape = BatchShape(windows=2, context=16)
    found = []
    for host in range(3):
        iterator = batch_iterator(corpus, shape, seed=1, host=host, hosts=3)
        found.append({int(window[0]) for _ in range(2) for window in next(iterator)})
    assert all(len(stretches) == 4 for stretches in found)
    assert set.union(*found) == set(range(12))


def test_the_digest_of_all_batches_goes_on_where_it_was_saved() -> None:
    def make() -> Batches:
        return Batches(batch_iterator(_corpus(), _SHAPE, seed=1))

    whole, first, second = make(), make(), make()
    for _ in range(7):
        whole.take()
        first.take()
    second.set_state(first.get_state())
    for _ in range(3):
        one, other = whole.take(), second.take()
        assert one[1] == other[1]
    assert whole.digest == second.digest != first.digest


def test_the_corpus_is_the_same_each_time_and_bounded() -> None:
    corpus = load_corpus()
    assert corpus.dtype == np.uint8
    assert 1 << 18 <= corpus.size <= 4 << 20
    assert np.array_equal(corpus, load_corpus())


def test_source_files_come_in_the_order_of_their_names_and_others_not_at_all(
    tmp_path: Path,
) -> None:
    piece = bytes(1 << 17)
    for name in ("b.py", "a.py", "a.txt"):
        (tmp_path / name).write_bytes(name.encode() + piece)
    assert load_corpus(tmp_path).tobytes() == b"a.py" + piece + b"b.py" + piece


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"pass")
    with pytest.raises(StorageError, match="found 4"):
        load_corpus(tmp_path)
