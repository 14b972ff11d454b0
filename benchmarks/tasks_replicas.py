"""What a comparison of replicas costs a save: two ranks of PyTorch that hold the same tensors.

The state may change once `save` returns, so that the copies are digested before: the dearest case.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

RANKS = 2
WARM_UP = 3
WAIT_SECS = 600.0
TENSORS = 16


def replica_check(
    *, directory: str, size_gb: float, count: int, is_checked: bool
) -> dict[str, Any]:
    """Saves `count` times after those that warm up; the times of rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [
        context.Process(
            target=_train,
            args=(directory, address, rank, size_gb, count, is_checked, theirs),
            daemon=True,
        )
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        if not ours.poll(WAIT_SECS):
            raise TimeoutError(f"rank 0 has not reported within {WAIT_SECS:.0f} s")
        found: dict[str, Any] = ours.recv()
    finally:
        for process in processes:
            process.join(30.0)
            process.kill()
            process.join()
    return found


def _train(
    directory: str,
    address: str,
    rank: int,
    size_gb: float,
    count: int,
    is_checked: bool,
    pipe: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    import holdfast

    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    state = {f"w{n}": torch.ones(int(size_gb * 1e9 / 4 / TENSORS)) for n in range(TENSORS)}
    replicas = holdfast.ReplicaCheck() if is_checked else None
    blocked, durable = [], []
    with holdfast.CheckpointManager(directory, replicas=replicas) as manager:
        for step in range(WARM_UP + count):
            for tensor in state.values():
                tensor += 1
            dist.barrier()
            started = time.perf_counter()
            manager.save(step, state, force=True)
            blocked.append(time.perf_counter() - started)
            manager.wait_until_finished()
            durable.append(time.perf_counter() - started)
    if rank == 0:
        pipe.send(
            {
                "blocked_secs": statistics.median(blocked[WARM_UP:]),
                "durable_secs": statistics.median(durable[WARM_UP:]),
            }
        )
    dist.destroy_process_group()
