"""One rank of a Megatron-style training that saves whole files: `FOLDER RANK COUNT LAST KILL`.

Every rank saves into its own `mp_rank_XX` folder of the iteration, and `latest_checkpointed_…` is
written last, when all files of the iteration are complete. It trains up to LAST; after the save of
iteration KILL it is killed. It prints a digest of the rank's own state.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.interop import mindio as mindio_acp

FOLDER, RANK, COUNT, LAST, KILL = Path(sys.argv[1]), *map(int, sys.argv[2:])
TRACKER = FOLDER / "latest_checkpointed_iteration.txt"
EVERY = 3


def iteration_folder(iteration: int) -> Path:
    return FOLDER / f"iter_{iteration:07d}"


def path_of(iteration: int) -> Path:
    return iteration_folder(iteration) / f"mp_rank_{RANK:02d}" / "model_optim_rng.pt"


def write_tracker(result: int, iteration: int) -> None:
    if result == 0:
        TRACKER.write_text(str(iteration))


def is_tracked(iteration: int) -> bool:
    return TRACKER.exists() and TRACKER.read_text() == str(iteration)


def save(iteration: int, model: Any, optimizer: Any) -> None:
    state = {
        "args": argparse.Namespace(rank=RANK),
        "iteration": iteration,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }
    path_of(iteration).parent.mkdir(parents=True, exist_ok=True)
    while iteration == KILL and not is_tracked(iteration - EVERY):
        time.sleep(0.01)
    assert mindio_acp.save(state, path_of(iteration)) == 1
    dist.barrier()
    if iteration == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 0:
        check = {str(iteration_folder(iteration)): COUNT}
        assert mindio_acp.register_checker(write_tracker, check, iteration, 60) == 1


def load(model: Any, optimizer: Any) -> int:
    if not TRACKER.exists():
        return 0
    iteration = int(TRACKER.read_text())
    assert mindio_acp.preload(path_of(iteration)) == 0
    state = mindio_acp.load(path_of(iteration), map_location="cpu", weights_only=False)
    assert state["args"].rank == RANK
    assert state["iteration"] == iteration
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return iteration


def main() -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{FOLDER}/ranks-{KILL}-{LAST}", rank=RANK, world_size=COUNT
    )
    assert mindio_acp.initialize({"memfs.data_block_pool_capacity_in_gb": "1"}) == 0
    torch.manual_seed(RANK)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = load(model, optimizer)
    for iteration in range(start + 1, LAST + 1):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        dist.all_reduce(loss.detach())
        loss.backward()
        optimizer.step()
        if iteration % EVERY == 0:
            save(iteration, model, optimizer)
    assert mindio_acp.flush() == 0
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    print("ENDED", start, digest.hexdigest())
    dist.destroy_process_group()


main()
