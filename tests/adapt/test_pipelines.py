"""A position in a Grain pipeline is not restored into another pipeline without a word."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.adapt import pipelines
from holdfast.adapt.pipelines import LINES_MAX, pipeline_difference, pipeline_of
from holdfast.errors import StructureMismatchError

grain = pytest.importorskip("grain", reason="Grain cannot be had here", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@dataclasses.dataclass(frozen=True)
class Cropped(grain.transforms.Map):
    size: int
    table: Any = dataclasses.field(default_factory=object)

    def map(self, element: Any) -> Any:
        return element


def moved(element: Any, generator: np.random.Generator) -> Any:
    return element + generator.normal()


def doubled(element: Any) -> Any:
    return 2 * element


def is_even(element: Any) -> bool:
    return bool(element % 2 == 0)


def batches(
    length: int = 60,
    seed: int = 7,
    share: slice = slice(0, None, 2),
    size: int = 8,
    batch: int = 4,
    threads: int = 1,
    transform: Any = doubled,
) -> Any:
    samples = grain.MapDataset.source(np.arange(length)).seed(seed).shuffle()[share].repeat()
    samples = samples.map(Cropped(size)).random_map(moved, seed=5)
    reading = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    return iter(samples.to_iter_dataset(reading).map(transform).batch(batch))


def test_a_pipeline_is_described_in_words_that_every_process_gives() -> None:
    # No address, hash, path or line number has an influence.
    assert pipeline_of(batches()) == (
        "BatchDatasetIterator(batch_size=4, drop_remainder=False, batch_fn=make_batch)",
        "MapDatasetIterator(map_fn=doubled)",
        "PrefetchDatasetIterator(allow_nones=False)",
        "RandomMapMapDataset(seed=5, map_fn=moved)",
        "MapMapDataset(map_fn=Cropped(size=8))",
        "RepeatMapDataset(reseed_each_epoch=True)",
        "SliceMapDataset(start=0, stop=60, step=2)",
        "ShuffleMapDataset(seed=369571992)",
        "WithSeedMapDataset(seed=7)",
        "SourceMapDataset(length=60, source=ndarray)",
    )


def test_other_iterators_have_a_description_that_their_position_does_not_change() -> None:
    first = grain.MapDataset.range(30).to_iter_dataset()
    second = grain.MapDataset.range(40).seed(3).shuffle().to_iter_dataset().filter(is_even)
    mixed = grain.IterDataset.mix([first, second], [0.25, 0.75])
    mixed = grain.experimental.WindowShuffleIterDataset(mixed, window_size=4, seed=2)
    mapped = grain.MapDataset.mix([grain.MapDataset.range(9), grain.MapDataset.range(5)], [2, 1])
    sampler = grain.samplers.IndexSampler(num_records=24, shuffle=True, seed=3)
    loader = grain.DataLoader(data_source=range(24), sampler=sampler, worker_count=0)
    for iterator in (iter(mixed), iter(mapped.to_iter_dataset()), iter(loader), batches()):
        before = pipeline_of(iterator)
        next(iterator)
        state = iterator.get_state()
        next(iterator)
        iterator.set_state(state)
        pipelines._described.clear()
        assert before == pipeline_of(iterator)
    assert pipeline_of(Cropped(3)) is None
    assert pipeline_of(iter([1])) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"length": 61}, "SourceMapDataset(length=61, source=ndarray), found SourceMapDataset(le"),
        ({"seed": 8}, "WithSeedMapDataset(seed=8)"),
        ({"share": slice(1, None, 2)}, "expected SliceMapDataset(start=1, stop=60, step=2), found"),
        ({"size": 9}, "expected MapMapDataset(map_fn=Cropped(size=9)), found MapMapDataset(map_fn"),
        ({"batch": 5}, "expected BatchDatasetIterator(batch_size=5, drop_remainder=False, batch_f"),
        ({"transform": is_even}, "map_fn=is_even), found MapDatasetIterator(map_fn=doubled)"),
    ],
    ids=["length", "seed", "share", "transform's field", "batch", "function"],
)
def test_another_pipeline_is_named_by_what_differs(change: dict[str, Any], text: str) -> None:
    given, saved = pipeline_of(batches(**change)), pipeline_of(batches())
    assert given is not None
    assert saved is not None
    assert text in str(pipeline_difference(given, saved))


def test_threads_and_buffers_make_no_other_pipeline() -> None:
    given, saved = pipeline_of(batches(threads=3)), pipeline_of(batches())
    assert given == saved
    assert pipeline_difference(given or (), saved or ()) is None


def test_a_long_description_ends_with_a_digest() -> None:
    def many(count: int) -> tuple[str, ...]:
        parts = [grain.MapDataset.range(n + 1).to_iter_dataset() for n in range(count)]
        lines = pipeline_of(iter(grain.IterDataset.mix(parts)))
        assert lines is not None
        return lines

    assert len(many(80)) == LINES_MAX + 1
    assert many(80)[-1].startswith("and 61 more: ")
    assert many(80) == many(80) != many(81)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_restore_into_another_pipeline_is_refused_unless_partial_names_it(
    tmp_path: Path, framework: str, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = pytest.importorskip(framework, reason=f"{framework} cannot be had here")
    data = batches()
    next(data)
    holdfast.save(tmp_path / "saved", {"data": data, "w": arrays.ones(3)})
    expected = next(data)
    given = {"data": batches(batch=5), "w": arrays.zeros(3)}
    with holdfast.open_run(tmp_path / "saved") as run:
        with pytest.raises(StructureMismatchError) as raised:
            run.restore(like=given)
        text = str(raised.value)
        assert "data: expected BatchDatasetIterator(batch_size=5," in text
        assert "found BatchDatasetIterator(batch_size=4," in text
        assert not given["w"].any()
        caplog.set_level(logging.INFO, "holdfast")
        restored = run.restore(like=given, partial="data")
        assert restored["w"].all()
        assert "kept iterators of another pipeline: data: expected Batch" in caplog.text
        np.testing.assert_array_equal(next(restored["data"]), next(batches(batch=5)))
        like = {"data": batches(threads=2), "w": arrays.zeros(3)}
        np.testing.assert_array_equal(next(run.restore(like=like)["data"]), expected)
        # The saved position is there as Grain has made it, for who wants it all the same.
        (position,) = run.process_values(0)["data"]
        other = batches(batch=5)
        other.set_state(position)
