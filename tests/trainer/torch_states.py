"""What a process of a job does with PyTorch alone; see `jax_states`."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def start(address: str, count: int, rank: int, heartbeat_secs: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}",
        world_size=count,
        rank=rank,
        timeout=timedelta(seconds=120),
    )
    _mesh()


def shut_down() -> None:
    # Rank 0 holds the store, which the others may still be using.
    dist.barrier()
    dist.destroy_process_group()


def await_others(step: int) -> None:
    """Waits until all ranks have come to `step`."""
    dist.barrier()


def scalar(value: float) -> Any:
    return torch.tensor(value, dtype=torch.float32)


def array(rows: np.ndarray, is_sharded: bool) -> Any:
    """A DTensor over all processes of the job, sharded by rows or replicated."""
    placements = [Shard(0) if is_sharded else Replicate()]
    shape, start = compute_local_shape_and_global_offset(rows.shape, _mesh(), placements)
    own = rows[tuple(slice(a, a + d) for a, d in zip(start, shape, strict=True))]
    whole = torch.empty(rows.shape, device="meta")
    return DTensor.from_local(
        torch.tensor(own),
        _mesh(),
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def are_equal(mine: Any, other: Any) -> bool:
    """Whether what this process holds of two tensors is the same."""
    return torch.equal(mine.to_local(), other.to_local())


@functools.cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))
