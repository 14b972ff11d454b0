"""Checkpoints that are built at a URL, and DCP's checkpoints there."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.building import STEP, CheckpointBuilder, NewArray, PartTask, WrittenPart
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.errors import FencedError, InvalidArgumentError, NotARunError
from holdfast.reading import Region, open_checkpoint
from holdfast.store.location import open_durable
from tests.buckets.s3_server import BUCKET

WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6)
LEFT, RIGHT = ((0, 0), (4, 3)), ((0, 3), (4, 6))
WEIGHTS = NewArray(path=("w",), shape=(4, 6), dtype="float32", writers={LEFT: 1, RIGHT: 0})


def region_bytes(path: tuple[str | int, ...], region: Region) -> memoryview:
    (top, left), (bottom, right) = region
    return np.ascontiguousarray(WEIGHT[top:bottom, left:right]).reshape(-1).view(np.uint8).data


def begun(url: str) -> tuple[CheckpointBuilder, list[WrittenPart]]:
    """Write the parts of two ranks, each as the process to which its task was sent."""
    builder = CheckpointBuilder(url, [WEIGHTS], 2)
    sent: list[PartTask] = [pickle.loads(pickle.dumps(task)) for task in builder.tasks]
    return builder, [task.write(region_bytes) for task in sent]


def commit(builder: CheckpointBuilder, parts: list[WrittenPart], count: int) -> None:
    try:
        builder.commit(parts[0], values={("count",): count})
    finally:
        builder.close()


def checkpoint_count(url: str) -> int:
    return len(list_checkpoints(open_durable(url, SystemClock())))


def test_a_checkpoint_at_a_url_is_replaced_by_the_commit_of_the_next(url: str) -> None:
    for count in (1, 2):
        commit(*begun(url), count)
        assert checkpoint_count(url) == 1
    begun(url)  # Its process is killed.
    assert holdfast.load(url, framework="numpy")["count"] == 2
    builder, parts = begun(url)
    assert holdfast.load(url, framework="numpy")["count"] == 2
    assert checkpoint_count(url) == 3
    commit(builder, parts, 3)
    state = holdfast.load(url, framework="numpy")
    np.testing.assert_array_equal(state["w"], WEIGHT)
    assert state["count"] == 3
    assert open_checkpoint(url, STEP).values == {("count",): 3}
    assert checkpoint_count(url) == 1


def test_a_failed_save_leaves_nothing_at_a_url(url: str) -> None:
    commit(*begun(url), 1)
    builder, _ = begun(url)
    builder.close()
    assert checkpoint_count(url) == 1
    assert holdfast.load(url, framework="numpy")["count"] == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_saves_at_once_the_later_one_continues(is_first: bool, url: str) -> None:
    if not is_first:
        commit(*begun(url), 1)
    earlier, later = begun(url), begun(url)
    with pytest.raises(FencedError, match=r"attempt \d has taken the run over"):
        commit(*earlier, 2)
    commit(*later, 3)
    assert holdfast.load(url, framework="numpy")["count"] == 3
    assert checkpoint_count(url) == 1


def test_the_run_of_a_manager_and_objects_of_others_are_not_replaced(url: str) -> None:
    with holdfast.CheckpointManager(f"{url}/run", ram=None) as manager:
        manager.save(3, {"w": WEIGHT})
    open_durable(f"{url}/other", SystemClock()).put("attempts/notes.txt", b"mine")
    for place in ("run", "other"):
        with pytest.raises(InvalidArgumentError, match="not overwritten; give a new URL"):
            CheckpointBuilder(f"{url}/{place}", [WEIGHTS], 1)
    with holdfast.open_run(f"{url}/run") as run:
        assert run.all_steps() == [3]


@pytest.mark.filterwarnings("ignore")  # DCP warns of every call without a process group.
def test_dcp_saves_and_loads_at_a_url(url: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch cannot be had here")
    import torch.distributed.checkpoint as dcp

    from holdfast.interop.dcp import HoldfastReader, HoldfastWriter, dcp_to_torch_save

    state = {"w": torch.rand(4, 3), "big": torch.rand(5_000_000), "epoch": 3}
    writer = HoldfastWriter(f"{url}/step-1")
    for epoch in (3, 4):
        dcp.save(copy.deepcopy(state | {"epoch": epoch}), storage_writer=writer, no_dist=True)
    saving = dcp.async_save(
        copy.deepcopy(state), checkpoint_id=f"{url}/step-2", storage_writer=writer, no_dist=True
    )
    saving.result()
    reader = HoldfastReader(f"{url}/step-1")
    for step, epoch in ((1, 4), (2, 3)):
        blank = {"w": torch.zeros(4, 3), "big": torch.zeros(5_000_000), "epoch": 0}
        dcp.load(blank, checkpoint_id=f"{url}/step-{step}", storage_reader=reader, no_dist=True)
        assert torch.equal(blank["w"], state["w"])
        assert torch.equal(blank["big"], state["big"])
        assert blank["epoch"] == epoch
    dcp_to_torch_save(f"{url}/step-2", tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt")["epoch"] == 3
    with pytest.raises(NotARunError, match="loaded by torch's FsspecReader"):
        HoldfastReader(f"{url}/step-3").read_metadata()


@pytest.mark.parametrize("place", ["memory://x/step-1", "gcs://bucket/step-1", f"s3://{BUCKET}"])
def test_urls_of_other_services_are_refused_by_name(place: str) -> None:
    pytest.importorskip("torch", reason="PyTorch cannot be had here")
    from holdfast.interop.dcp import HoldfastReader, HoldfastWriter

    for kind in (HoldfastReader, HoldfastWriter):
        assert not kind.validate_checkpoint_id(place)
        with pytest.raises(InvalidArgumentError, match=f"open {place}: expected a"):
            kind(place)
