"""The newest checkpoints are found without the others, and nothing that is needed is left out."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from holdfast.engine.lifecycle import newest
from holdfast.engine.lifecycle.attempts import begin_attempt
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.newest import list_newest
from holdfast.engine.reading.view import newest_view_of, view_of
from holdfast.format.names import attempt_keys, manifest_key
from holdfast.format.timeline import on_timeline
from holdfast.store.disk import DiskStore
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import Made, begin, flip_bit, random_array
from tests.engine.test_attempts import START


def made(step: int, attempt: int = 1) -> Made:
    one = Made(id=checkpoint_id(step, attempt))
    one.add(("w",), random_array((4,), "float32", step))
    return one


def put_manifests(store: DiskStore, *ids: tuple[int, int]) -> None:
    for step, attempt in ids:
        store.put(manifest_key(checkpoint_id(step, attempt)), b"{}")


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_is_what_a_whole_listing_has(
    seed: int, durable: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newest, "PAGE_COUNT", 3)
    rng = random.Random(seed)
    origins = [None, *((rng.randrange(1, 12), n) for n in range(1, rng.randrange(1, 4)))]
    begin(durable, *origins)
    for _ in range(rng.randrange(12)):
        one = checkpoint_id(rng.randrange(1, 16), rng.randrange(1, len(origins) + 1))
        durable.put(f"checkpoints/{one}/part-00000-of-00001.json", b"{}")
        durable.put(f"checkpoints/{one}/image-00000-of-00001.safetensors", b"x")
        if rng.random() < 0.6:
            put_manifests(durable, (one.step, one.attempt.number))
    since = rng.choice([10**15, rng.randrange(16)])
    found, whole = list_newest(durable, since_step=since), list_checkpoints(durable)
    committed = [one for one, listing in whole.items() if listing.is_committed]
    timeline = on_timeline(committed, found.attempts)
    first = min(since, timeline[-1].step if timeline else 0)
    expected = {one: listing for one, listing in whole.items() if one.step >= first}
    assert found.with_objects == expected
    assert list(found.checkpoints) == sorted(found.checkpoints)
    others = found.checkpoints.keys() - expected.keys()
    assert others <= set(committed)
    view, of_all = newest_view_of([durable], durable), view_of([durable], durable)
    assert view.timeline[-1:] == of_all.timeline[-1:]


def test_steps_whose_names_are_not_in_order_are_found_too(durable: DiskStore) -> None:
    begin(durable, None)
    for step in (999_999_999, 10**9, 10**9 + 5, 2 * 10**9):
        made(step).write(durable)
    put_manifests(durable, (999_999_999, 1))
    found = list_newest(durable)
    assert [one.step for one in found.uncommitted] == [10**9, 10**9 + 5, 2 * 10**9]


def test_a_missing_or_damaged_record_or_copy_is_doubtful(durable: DiskStore) -> None:
    begin(durable, None, (1, 1), (2, 2), (3, 3))
    put_manifests(durable, (1, 1))
    assert list_newest(durable).doubtful == frozenset()
    root = durable.root
    (root / attempt_keys(1)[0]).unlink()
    (root / attempt_keys(2)[1]).unlink()
    flip_bit(root / attempt_keys(3)[0], 400)
    with (root / attempt_keys(4)[1]).open("ab") as copy:
        copy.write(b"x")
    assert list_newest(durable).doubtful == {1, 2, 3, 4}


def test_an_attempt_that_begins_after_a_whole_one_reads_nothing_of_it(durable: DiskStore) -> None:
    begin(durable, None)
    (durable.root / attempt_keys(1)[1]).unlink()
    assert begin_attempt(durable, attempt_id(2), START, is_previous_whole=True)
    assert not Path(durable.root, attempt_keys(1)[1]).exists()
    assert begin_attempt(durable, attempt_id(3), START)
    assert begin_attempt(durable, attempt_id(4), START)
