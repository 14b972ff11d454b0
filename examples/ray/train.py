"""Train a small network with a TorchTrainer of Ray, and continue whatever happens to its nodes.

Start it with `python train.py RUN`, where Ray is (`RAY_ADDRESS`). All nodes see the directory RUN.
Each rank appends its lines to RUN.logs/RANK: where it starts, and for each step the loss and a
digest of what it has of the state. `--tune` trains two trials of Tune instead, in RUN-TRIAL.
"""

from __future__ import annotations

import argparse
import os
import time
import zlib
from pathlib import Path
from typing import TextIO

import ray
import ray.train
import ray.train.torch
import torch
from ray import tune

import holdfast
import holdfast.interop.ray
from holdfast import save_decision_policy as policies

BATCH, WIDTH = 64, 64


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> str:
    """Of the bits of this rank's state."""
    # The order of the keys is not the same after a restore.
    states = [each[key] for each in optimizer.state.values() for key in sorted(each)]
    crc = 0
    for tensor in [*model.parameters(), *states, draws.get_state()]:
        crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
    return f"{crc:08x}"


def train(config: dict, rank: int, log: TextIO) -> None:
    """Go on from the newest checkpoint until the last step."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    model = net if config["alone"] else ray.train.torch.prepare_model(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=config["lr"])
    draws = torch.Generator().manual_seed(rank)
    state = {"model": model, "optimizer": optimizer, "draws": draws}
    with holdfast.CheckpointManager(
        config["run"],
        save_decision_policy=policies.FixedIntervalPolicy(20),
        ram=holdfast.RamTier(save_decision_policy=policies.FixedIntervalPolicy(1)),
        network=holdfast.HostNetwork(interface=ray.util.get_node_ip_address()),
        # No signal can be handled here: train_loop is not on the main thread.
        process=holdfast.ProcessHooks(preemption_signals=()),
    ) as manager:
        start, state = manager.resume(state)
        sources = manager.last_restore.sources if manager.last_restore else {}
        print("start", start, os.getpid(), *sources, file=log)
        is_announced = False
        for step in range(start, config["steps"]):
            began = time.monotonic()
            batch = torch.randn(BATCH, WIDTH, generator=draws)
            optimizer.zero_grad()
            loss = (model(batch) - batch.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            print("step", step, loss.item().hex(), digest(net, optimizer, draws), file=log)
            manager.save(step, state)
            if not config["alone"]:
                holdfast.interop.ray.announce_preemption(manager)
            if manager.reached_preemption(step) and not is_announced:
                # It is durable on all ranks; Ray starts the trainer again at the node's deadline.
                is_announced = True
                print("preempted", step, file=log)
            time.sleep(max(0.0, began + config["step_secs"] - time.monotonic()))
        manager.finish(config["steps"] - 1, state)
    print("finished", config["steps"] - 1, file=log)


def train_loop(config: dict) -> None:
    """Train as one worker of a TorchTrainer."""
    rank = ray.train.get_context().get_world_rank()
    with open(f"{config['run']}.logs/{rank}", "a", buffering=1) as log:
        train(config, rank, log)
    step = config["steps"] - 1
    with holdfast.interop.ray.checkpoint_of(config["run"], step) as checkpoint:
        ray.train.report({"step": step}, checkpoint=checkpoint)


def trial(config: dict) -> None:
    """Train as a trial of Tune, in a run of its own."""
    config = config | {"run": f"{config['run']}-{tune.get_context().get_trial_id()}"}
    os.makedirs(f"{config['run']}.logs", exist_ok=True)
    with open(f"{config['run']}.logs/0", "a", buffering=1) as log:
        train(config, 0, log)
    step = config["steps"] - 1
    with holdfast.interop.ray.checkpoint_of(config["run"], step) as checkpoint:
        tune.report({"step": step, "lr": config["lr"]}, checkpoint=checkpoint)


def main() -> None:
    """Train on what Ray has, and print where the last step is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=os.path.abspath)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-secs", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()
    config = {"run": arguments.run, "steps": arguments.steps, "step_secs": arguments.step_secs}
    config |= {"lr": 1e-2, "alone": arguments.tune}
    storage, name = os.path.split(f"{arguments.run}.ray")
    Path(f"{arguments.run}.logs").mkdir(parents=True, exist_ok=True)
    ray.init(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
    if arguments.tune:
        tuner = tune.Tuner(
            trial,
            param_space=config | {"lr": tune.grid_search([1e-2, 1e-3])},
            run_config=tune.RunConfig(
                name=name,
                storage_path=storage,
                failure_config=tune.FailureConfig(max_failures=3),
            ),
        )
        results = list(tuner.fit())
    else:
        trainer = ray.train.torch.TorchTrainer(
            train_loop,
            train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=arguments.workers),
            run_config=ray.train.RunConfig(
                name=name,
                storage_path=storage,
                failure_config=ray.train.FailureConfig(max_failures=3),
            ),
        )
        results = [trainer.fit()]
    for result in results:
        last = holdfast.interop.ray.step_of(result.checkpoint)
        print("result", last.directory, last.step, flush=True)


if __name__ == "__main__":
    main()
