"""Read by AXLearn's `ElasticInput` as one process of a job: `DIRECTORY ADDRESS RANK COUNT STEPS`.

Each process stands for a slice, of which the job has `SLICES` unless some are lost. Each step reads
one batch and saves. It prints, for each step, the samples that this process has read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
from axlearn.common.checkpointer import every_n_steps_policy
from axlearn.common.config import config_for_function
from axlearn.common.elastic_input import ElasticInput, ElasticSpmdInputDispatcher
from axlearn.common.input_base import Input
from axlearn.common.utils import PartitionSpec, TensorSpec

from holdfast.interop.trainers.axlearn import Checkpointer

SLICES, SLICE_BATCH = 3, 4


class Numbers(Input):
    """Batches of numbers, of which each feed reads every `SLICES`-th."""

    def dataset(self) -> Any:
        feed = self.input_dispatcher.feed_read_config()
        numbers = tf.data.Dataset.range(1200).shard(feed["num_shards"], feed["shard_index"])
        return numbers.batch(SLICE_BATCH).map(lambda n: {"input_ids": n, "target_labels": n})


def train(directory: Path, steps: int) -> list[list[int]]:
    dispatcher = ElasticSpmdInputDispatcher.default_config().set(
        num_max_slices=SLICES, global_logical_batch_size=SLICES * SLICE_BATCH
    )
    numbers = Numbers.default_config().set(
        input_dispatcher=dispatcher, partition_spec=PartitionSpec(("data",))
    )
    config = ElasticInput.default_config().set(name="input", input=numbers)
    inputs: Any = config.instantiate(parent=None)
    iterator = iter(inputs.dataset())
    policy = config_for_function(every_n_steps_policy).set(n=1)
    saves = Checkpointer.default_config().set(name="saves", dir=str(directory), save_policy=policy)
    own: Any = saves.instantiate(parent=None)
    spec = TensorSpec((6,), jnp.float32, PartitionSpec("data"))
    last, state = own.restore(state={"w": spec, "input": iterator})
    batches = inputs.batches(state["input"])
    first = 1 if last is None else last + 1
    read = []
    for step in range(first, first + steps):
        batch = next(batches)
        # What is padded has no label.
        read.append([int(n) for n in batch["target_labels"] if n >= 0])
        own.save(step=step, state={"w": array(step), "input": iterator})
    own.stop()
    return read


def array(value: float) -> jax.Array:
    whole = np.full(6, value, np.float32)
    sharding = jax.NamedSharding(mesh(), PartitionSpec("data"))
    return jax.make_array_from_callback((6,), sharding, lambda index: whole[index])


def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()), ("data",))


def main() -> None:
    directory, address, rank, count, steps = sys.argv[1:]
    jax.distributed.initialize(address, int(count), int(rank))
    place = "axlearn.common.elastic_input"
    # Devices of CPUs are in one slice. AXLearn's own tests replace the count too.
    slices = mock.patch(f"{place}.slice_count", return_value=int(count))
    with slices, mock.patch(f"{place}.process_count_per_slice", return_value=1), mesh():
        read = train(Path(directory), int(steps))
    print("ENDED", json.dumps(read), flush=True)


main()
