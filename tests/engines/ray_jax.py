"""A JaxTrainer whose workers each open the run, where Ray has not started jax.distributed.

Argument: the run. Each worker writes what has become of its start to RUN.ends/RANK.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import ray
import ray.train
from ray.train.v2.jax import JaxTrainer

import holdfast
from holdfast.errors import HoldfastError

WAIT_SECS = 60.0


def train_loop(config: dict) -> None:
    import jax

    ends = Path(f"{config['run']}.ends")
    own = ends / str(ray.train.get_context().get_world_rank())
    hooks = holdfast.ProcessHooks(preemption_signals=())
    try:
        with holdfast.CheckpointManager(config["run"], process=hooks) as manager:
            manager.save(0, {"w": jax.numpy.zeros(4)}, force=True)
            began = time.monotonic()
            # The other one starts meanwhile.
            while len(list(ends.iterdir())) < 1 and time.monotonic() < began + WAIT_SECS:
                time.sleep(0.1)
        own.write_text(f"opened {jax.process_index()} of {jax.process_count()}")
    except HoldfastError as error:
        own.write_text(f"{type(error).__name__} {error}")


if __name__ == "__main__":
    Path(f"{sys.argv[1]}.ends").mkdir()
    ray.init(runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}})
    JaxTrainer(
        train_loop,
        train_loop_config={"run": sys.argv[1]},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
    ).fit()
