"""A tier of a run with two is moved, copied or restored from a backup."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from holdfast import CheckpointManager
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.run import noted_remote
from holdfast.errors import NotARunError
from holdfast.store.location import open_durable
from tests.hosts import Host
from tests.trainer.job import lose
from tests.trainer.tiers import Tiers, stopped
from tests.trainer.two_tier_trainer import state_of


@pytest.fixture
def tiers(one_host: Host, tmp_path: Path) -> Tiers:
    return Tiers(tmp_path)


def files_in(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("tier", ["fast", "remote"])
@pytest.mark.parametrize("is_moved", [False, True])
def test_a_tier_that_is_restored_from_a_backup_or_moved_is_recognised_by_the_other_one(
    tiers: Tiers, one_host: Host, tmp_path: Path, tier: str, is_moved: bool
) -> None:
    place: Path = getattr(tiers, tier)
    tiers.train(1)
    stopped(one_host, tiers.fast)
    run_id = tiers.record(tiers.fast).run_id
    if not is_moved:
        backup = shutil.copytree(place, tmp_path / "backup")
    # A second attempt.
    assert tiers.train(2) == 1
    stopped(one_host, tiers.fast)
    if is_moved:
        setattr(tiers, tier, Path(shutil.copytree(place, tmp_path / "moved")))
        shutil.rmtree(place)
    else:
        shutil.rmtree(place)
        shutil.copytree(backup, place)
    lose(one_host)
    with tiers.manager() as manager:
        first, state = manager.resume(state_of(-1))
        assert first == 3
        assert np.array_equal(state["w"], state_of(2)["w"])
        manager.save(3, state_of(3), force=True)
        manager.wait_until_finished(30, remote=True)
    assert tiers.record(tiers.fast).run_id == run_id
    assert noted_remote(open_durable(str(tiers.fast), SystemClock())) == str(tiers.remote)
    tiers.check_alike()


@pytest.mark.parametrize("is_other_copied", [False, True])
def test_a_copy_with_the_remote_tier_of_the_original_is_refused_and_not_changed(
    tiers: Tiers, one_host: Host, tmp_path: Path, is_other_copied: bool
) -> None:
    tiers.train(1)
    stopped(one_host, tiers.fast)
    original = tiers.fast
    tiers.fast = Path(shutil.copytree(tiers.fast, tmp_path / "copy"))
    if is_other_copied:
        tiers.remote = Path(shutil.copytree(tiers.remote, tmp_path / "remote-copy"))
        # Nothing is at the places of both.
        (tmp_path / "fast").rename(tmp_path / "fast-renamed")
        (tmp_path / "remote").rename(tmp_path / "remote-renamed")
    before = files_in(tiers.fast), files_in(tiers.remote)
    with pytest.raises(NotARunError, match=rf"a copy of it at .*; the original was at {original}"):
        tiers.manager()
    assert (files_in(tiers.fast), files_in(tiers.remote)) == before
    # Without it the copy is a run of its own, and stays one.
    with CheckpointManager(tiers.fast) as manager:
        assert manager.resume(state_of(-1))[0] == 1
    stopped(one_host, tiers.fast)
    with pytest.raises(NotARunError, match=r"was opened as a copy .* open an empty directory"):
        tiers.manager()


def test_a_start_that_is_refused_for_its_remote_tier_changes_no_directory(
    tiers: Tiers, one_host: Host, tmp_path: Path
) -> None:
    tiers.train(1)
    stopped(one_host, tiers.fast)
    tiers.fast = Path(shutil.copytree(tiers.fast, tmp_path / "restored"))
    shutil.rmtree(tmp_path / "fast")
    before = files_in(tiers.fast)
    shutil.move(tiers.remote, tmp_path / "away")
    with CheckpointManager(tiers.remote, ram=None):
        pass
    with pytest.raises(NotARunError, match=r"expected run .* found run"):
        tiers.manager()
    assert files_in(tiers.fast) == before
