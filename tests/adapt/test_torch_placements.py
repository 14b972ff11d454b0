"""DTensors and ShardedTensors: the chunks of every placement, computed by each rank of a mesh.

A process group that communicates nothing stands for each rank in turn.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)

import torch.distributed as dist  # noqa: E402
from torch.distributed._shard.sharded_tensor import (  # noqa: E402
    Shard as ShardOfTensor,
)
from torch.distributed._shard.sharded_tensor import (  # noqa: E402
    ShardedTensor,
    ShardMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._utils import (  # noqa: E402
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import holdfast  # noqa: E402
from holdfast.adapt.torch import tensors  # noqa: E402
from holdfast.adapt.torch.tree import tied  # noqa: E402
from holdfast.errors import InvalidArgumentError, UnsupportedLeafError  # noqa: E402
from holdfast.format.grid import chunk_count, chunk_region, region_shape  # noqa: E402
from tests.hosts import Host  # noqa: E402

FSDP_AND_TP = [_StridedShard(0, split_factor=2), Shard(0)]

# (mesh, placements, shape, the extents of the chunks)
CASES: list[tuple[tuple[int, ...], list[Any], tuple[int, ...], tuple[Any, ...]]] = [
    ((4,), [Shard(0)], (10, 3), (3, 3)),
    ((6,), [Shard(0)], (10, 3), (2, 3)),
    ((6,), [Shard(0)], (4, 3), (1, 3)),
    ((4,), [Shard(1)], (10, 3), (10, 1)),
    ((4,), [Replicate()], (10, 3), (10, 3)),
    ((2,), [Replicate()], (), ()),
    ((2,), [Shard(0)], (0, 3), (0, 3)),
    ((2, 2), [Replicate(), Shard(0)], (10, 3), (5, 3)),
    ((2, 2), [Shard(0), Shard(1)], (10, 3), (5, 2)),
    ((2, 2), [Shard(0), Shard(0)], (10, 3), ((3, 2, 3, 2), 3)),
    ((2, 2), FSDP_AND_TP, (10, 3), ((3, 2, 3, 2), 3)),
    ((3, 2), FSDP_AND_TP, (7,), ((2, 2, 1, 1, 1),)),
    ((4, 2), FSDP_AND_TP, (3,), (1,)),
    ((2, 2, 2), [Replicate(), *FSDP_AND_TP], (10, 3), ((3, 2, 3, 2), 3)),
    ((2, 2, 2), [Shard(1), *FSDP_AND_TP], (10, 5), ((3, 2, 3, 2), 3)),
]


@contextlib.contextmanager
def rank_of(rank: int, count: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed(mesh: tuple[int, ...], placements: list[Any], shape: tuple[int, ...]) -> Any:
    made = init_device_mesh("cpu", mesh)
    local, _ = compute_local_shape_and_global_offset(shape, made, placements)
    stride = torch.empty(shape).stride()
    return DTensor.from_local(
        torch.zeros(local),
        made,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


@pytest.mark.parametrize(("mesh", "placements", "shape", "chunk_shape"), CASES)
def test_all_ranks_find_the_same_chunks_and_each_holds_its_own(
    mesh: tuple[int, ...],
    placements: list[Any],
    shape: tuple[int, ...],
    chunk_shape: tuple[Any, ...],
) -> None:
    found, held = [], {}
    for rank in range(math.prod(mesh)):
        with rank_of(rank, math.prod(mesh)):
            tensor = distributed(mesh, placements, shape)
            found.append(tensors.outline_of(tensor, ("x",)).placement)
            held[rank] = tensors.region_held(tensor)
            assert tensors.local(tensor).shape == region_shape(held[rank])
    assert {placed.chunk_shape for placed in found} == {chunk_shape}
    assert len({placed.holders for placed in found}) == 1
    chunks = [chunk_region(shape, chunk_shape, i) for i in range(chunk_count(shape, chunk_shape))]
    for rank, region in held.items():
        own = [i for i, chunk in enumerate(chunks) if chunk == region]
        has_elements = math.prod(region_shape(region)) > 0
        assert len(own) == has_elements or not math.prod(shape)
        assert all(rank in found[0].holders[i] for i in own)


def test_slices_of_one_mesh_hold_copies_and_all_ranks_find_them() -> None:
    found = []
    for rank in range(4):
        with rank_of(rank, 4):
            whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
            tensor = DTensor.from_local(torch.zeros(2, 3), whole["data"], [Shard(0)])
            found.append(tensors.outline_of(tensor, ("x",)).placement)
            assert tensors.region_held(tensor) == ((rank // 2 * 2, 0), (rank // 2 * 2 + 2, 3))
    assert {placed.holders for placed in found} == {((0, 1), (2, 3))}


def test_a_tensor_over_more_ranks_than_the_job_has_is_refused_by_path(
    one_host: Host, tmp_path: Path
) -> None:
    with rank_of(0, 4):
        tensor = distributed((4,), [Shard(0)], (8,))
        holdfast.save(tmp_path / "saved", {"a": {"b": torch.arange(8.0)}})
        with pytest.raises(InvalidArgumentError, match=r"save a/b: .*a CheckpointManager"):
            holdfast.save(tmp_path / "part", {"a": {"b": tensor}})
    # The group has ended, and the manager works for this process alone.
    with holdfast.CheckpointManager(tmp_path / "run", framework="torch") as manager:
        with pytest.raises(UnsupportedLeafError, match=r"save a/b: .*has 1, .* of rank 3"):
            manager.save(0, {"a": {"b": tensor}}, force=True)
        assert manager.save(0, {"a": {"b": torch.arange(8.0)}}, force=True)
        manager.wait_until_finished()
        with pytest.raises(UnsupportedLeafError, match=r"restore a/b: .*has 1, .* of rank 3"):
            manager.restore(like={"a": {"b": tensor}})
    # A reader belongs to no job: each rank may read its own shards.
    found = holdfast.load(tmp_path / "saved", like={"a": {"b": tensor}}, framework="torch")
    assert torch.equal(found["a"]["b"].to_local(), torch.arange(2.0))


def test_tied_copies_of_several_processes_are_saved_by_one_with_all_their_names(
    tmp_path: Path,
) -> None:
    with rank_of(1, 2):
        tensor = distributed((2,), [Replicate()], (4,))
        holdfast.save(tmp_path / "saved", {"a": tensor, "b": tensor})
    assert holdfast.load(tmp_path / "saved", framework="numpy").keys() == {"a", "b"}


def test_pending_sums_are_refused_by_path() -> None:
    with rank_of(0, 2):
        tensor = distributed((2,), [Partial()], (4,))
        with pytest.raises(UnsupportedLeafError, match=r"save a/b: .*pending sums"):
            tensors.outline_of(tensor, ("a", "b"))


def test_tied_tensors_are_found_by_ranks_without_elements_too() -> None:
    for rank in range(3):
        with rank_of(rank, 3):
            one, other = (distributed((3,), [Shard(0)], (2, 4)) for _ in range(2))
            assert tied([one, other, one.detach()]) == [None, None, 0]


@pytest.mark.filterwarnings("ignore:Please use DTensor")
@pytest.mark.parametrize("rank", range(3))
def test_the_parts_of_a_sharded_tensor_are_chunks(rank: int) -> None:
    places = [ShardMetadata([4 * r, 0], [4, 3], f"rank:{r}/cpu") for r in range(2)]
    with rank_of(rank, 3):
        of_all = ShardedTensorMetadata(
            places, torch.Size([8, 3]), TensorProperties(dtype=torch.float32)
        )
        own = [ShardOfTensor(torch.zeros(4, 3), places[rank])] if rank < 2 else []
        tensor = ShardedTensor._init_from_local_shards_and_global_metadata(own, of_all)
        placed = tensors.outline_of(tensor, ("x",)).placement
        assert (placed.chunk_shape, placed.holders) == ((4, 3), ((0,), (1,)))
        assert tied([tensor, tensor]) == ([None, 0] if own else [None, None])
        region = tensors.region_held(tensor)
        assert region == (((4 * rank, 0), (4 * rank + 4, 3)) if own else ((0, 0), (0, 0)))
        if own:
            filled = torch.arange(12.0).reshape(4, 3)
            tensors.fill(tensor, {region: filled.numpy()})
            assert torch.equal(own[0].tensor, filled)
