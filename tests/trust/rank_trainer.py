"""One rank of a PyTorch training as users write it, whose state says which branches made it.

Arguments: the store's address, count, rank, directory, what to do as JSON. Prints JSON lines.

`trail` is a tensor of the job, and `data` an object of each rank: both note at each step the number
`branch` of the training that made it. A state in which they differ is a mix of two trainings.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

import holdfast
from holdfast import errors, preservation_policy, save_decision_policy

ADDRESS, COUNT, RANK, RUN = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
TODO = json.loads(sys.argv[5])
STEPS_MAX = 2000


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


class Data:
    """Each rank's place in its data, and the branches that have read it."""

    def __init__(self) -> None:
        self.branches: list[int] = []

    def next_batch(self) -> torch.Tensor:
        seed = torch.Generator().manual_seed(1000 * RANK + len(self.branches))
        self.branches.append(TODO["branch"])
        return torch.randn(4, 8, generator=seed)

    def state_dict(self) -> dict[str, object]:
        return {"rank": RANK, "branches": self.branches}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if TODO.get("refuses") == RANK:
            raise ValueError("this rank has other data")
        assert state["rank"] == RANK
        self.branches = list(state["branches"])


class Hangs:
    """A policy of the user, one of whose methods does not return, or exits once."""

    def __init__(self) -> None:
        self.has_exited = False

    def should_save(self, step: int, previous: object, *, context: object) -> bool:
        if TODO.get("hangs") == "should_save":
            hang("should_save")
        if TODO.get("hangs") == "exits" and not self.has_exited:
            self.has_exited = True
            sys.exit("enough")
        return False

    def should_preserve(self, checkpoints: Sequence[object], *, context: object) -> list[bool]:
        if TODO.get("hangs") == "should_preserve":
            hang("should_preserve")
        return [True] * len(checkpoints)


def hang(method: str) -> None:
    say(hangs=method)
    threading.Event().wait()


def stand_still(place: str) -> None:
    if TODO.get("stands") == [RANK, place]:
        say(stands=place)
        signal.pause()


def main() -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{ADDRESS}",
        world_size=COUNT,
        rank=RANK,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    data, trail = Data(), torch.zeros(STEPS_MAX, dtype=torch.int64)
    state = {"model": model, "optimizer": optimizer, "data": data, "trail": trail}
    every = save_decision_policy.FixedIntervalPolicy
    saves, keeps = every(TODO["every"]), preservation_policy.LatestN(3)
    if "hangs" in TODO:
        saves = save_decision_policy.AnySavePolicy([saves, Hangs()])
        keeps = preservation_policy.AnyPreservationPolicy([keeps, Hangs()])
    remote = TODO.get("remote")
    with holdfast.CheckpointManager(
        RUN,
        remote=holdfast.RemoteTier(remote, save_decision_policy=saves) if remote else None,
        takeover=TODO.get("takeover", False),
        save_decision_policy=saves,
        preservation_policy=keeps,
        ram=holdfast.RamTier(save_decision_policy=every(1), linger_secs=300),
    ) as manager:
        stand_still("resume")
        start, state = manager.resume(state)
        say(start=start, trail=trail[:start].tolist(), own=data.branches)
        for step in range(start, start + TODO["more"]):
            time.sleep(TODO.get("sleep", 0.0))
            optimizer.zero_grad()
            model(data.next_batch()).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            trail[step] = TODO["branch"]
            try:
                manager.save(step, state)
            except errors.SaveFailedError as error:
                say(failed=error.steps, at=step, message=str(error))
            except errors.HoldfastError as error:
                if TODO.get("hangs") != "exits":
                    raise
                say(exited=str(error), at=step)
            say(step=step)
        stand_still("finish")
        manager.finish(step, state)
    say(closed=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
