"""Call the checkpointer as AXLearn's trainer and evaluations do: `DIRECTORY`. Prints ENDED well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from axlearn.common.checkpointer import every_n_steps_policy
from axlearn.common.config import config_for_function
from axlearn.common.metrics import WeightedSummary
from axlearn.common.utils import PartitionSpec, TensorSpec, VDict

import holdfast
from holdfast.errors import (
    InvalidArgumentError,
    NotARunError,
    StepNotFoundError,
    StructureMismatchError,
)
from holdfast.interop.trainers.axlearn import Checkpointer
from holdfast.policy.preservation_policy import BestN
from holdfast.policy.save_decision_policy import ContinuousCheckpointingPolicy


class Counter:
    """A PythonSavable iterator."""

    def __init__(self) -> None:
        self.count = 0

    def get_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def __next__(self) -> int:
        self.count += 1
        return self.count


def mesh(*shape: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), ("data", "model"))


def checkpointer(directory: Path, **options: Any) -> Checkpointer:
    config = Checkpointer.default_config().set(name="checkpointer", dir=str(directory), **options)
    return config.instantiate(parent=None)


def specs(**iterators: Any) -> dict[str, Any]:
    sharded = TensorSpec((8, 8), jnp.float32, PartitionSpec("data", "model"))
    return {"model": VDict(w=sharded, empty={}), "step": TensorSpec((), jnp.int32), **iterators}


def state(value: float, **iterators: Any) -> dict[str, Any]:
    placed = jax.sharding.NamedSharding(mesh(8, 1), PartitionSpec("data", "model"))
    w = jax.device_put(jnp.full((8, 8), value, jnp.float32), placed)
    return {"model": VDict(w=w, empty={}), "step": jnp.int32(value), **iterators}


def tf_iterator() -> Iterator[Any]:
    return iter(tf.data.Dataset.range(100).shuffle(50, seed=1))


def saves_and_restores(directory: Path) -> None:
    batches, counter = tf_iterator(), Counter()
    policy = config_for_function(every_n_steps_policy).set(n=2)
    own = checkpointer(directory, save_policy=policy, keep_last_n=2)
    with mesh(8, 1):
        assert own.restore(state=specs(tf=batches, counter=counter))[0] is None
        with own:
            for step in range(1, 7):
                next(batches), next(counter)
                own.save(step=step, state=state(step, tf=batches, counter=counter))
            own.wait_until_finished()
            assert Checkpointer.checkpoint_steps(str(directory)) == [4, 6]
            assert in_another_process(directory) == [4, 6]
    expected = [next(batches).numpy() for _ in range(5)]
    assert Checkpointer.latest_checkpoint_step(str(directory)) == 6
    path = Checkpointer.latest_checkpoint_path(str(directory))
    assert list(Path(path).glob("part-*.json"))
    again = checkpointer(directory)
    batches, counter = tf_iterator(), Counter()
    with mesh(4, 2):
        step, found = again.restore(state=specs(tf=batches, counter=counter))
        assert step == 6
        assert type(found["model"]) is VDict
        assert found["model"]["w"].sharding.spec == PartitionSpec("data", "model")
        assert dict(found["model"]["w"].sharding.mesh.shape) == {"data": 4, "model": 2}
        np.testing.assert_array_equal(found["model"]["w"], np.full((8, 8), 6, np.float32))
        assert found["tf"] is batches
        assert [next(batches).numpy() for _ in range(5)] == expected
        assert counter.count == 6
        assert again.restore(step=4, state=specs(tf=batches, counter=counter))[0] == 4
        assert next(counter) == 5
        again.stop()


def in_another_process(directory: Path) -> list[int]:
    script = (
        "import sys, json; from holdfast.interop.trainers.axlearn import Checkpointer;"
        "print(json.dumps(Checkpointer.checkpoint_steps(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def goes_back(directory: Path) -> None:
    """A step that was asked for is the one that the training continues from."""
    own = checkpointer(directory)
    with mesh(8, 1), own:
        batches, counter = tf_iterator(), Counter()
        assert own.restore(step=4, state=specs(tf=batches, counter=counter))[0] == 4
        next(batches), next(counter)
        own.save(step=5, state=state(50, tf=batches, counter=counter))
    assert Checkpointer.checkpoint_steps(str(directory)) == [4, 5]


def refuses(directory: Path) -> None:
    own = checkpointer(directory)
    counter = Counter()
    with mesh(8, 1):
        for wrong in (
            specs(tf=tf_iterator()),
            specs(),
            specs(tf=tf_iterator(), counter=counter) | {"step": TensorSpec((), jnp.int16)},
            specs(tf=tf_iterator(), counter=counter) | {"step": TensorSpec((2,), jnp.int32)},
            specs(tf=tf_iterator(), counter=counter) | {"more": TensorSpec((), jnp.int32)},
        ):
            with pytest.raises(StructureMismatchError) as told:
                own.restore(state=wrong)
            assert isinstance(told.value, ValueError)
        with pytest.raises(StepNotFoundError, match="99") as missing:
            own.restore(step=99, state=specs(tf=tf_iterator(), counter=counter))
        assert isinstance(missing.value, ValueError)
    with pytest.raises(InvalidArgumentError, match="mesh"):
        own.restore(state=specs(tf=tf_iterator(), counter=counter))
    with pytest.raises(InvalidArgumentError, match="keep_last_n"):
        checkpointer(directory, keep_last_n=0)
    other = directory.parent / "other"
    (other / "step_00000010").mkdir(parents=True)
    with mesh(8, 1):
        # A save that did not end.
        assert checkpointer(other).restore(state=specs())[0] is None
        (other / "step_00000010" / "index").write_text("[]")
        with pytest.raises(NotARunError, match="step_00000010"):
            checkpointer(other).restore(state=specs())
    own.stop()


def saves_by_holdfasts_policies(directory: Path) -> None:
    own = checkpointer(
        directory,
        save_decision_policy=ContinuousCheckpointingPolicy(),
        preservation_policy=BestN(metric="eval/loss", n=1, mode="min"),
        ram=holdfast.RamTier(limit_bytes=1 << 24),
    )
    with mesh(8, 1), own:
        for step in range(1, 11):
            loss = WeightedSummary(jnp.float32(abs(step - 5)), jnp.float32(1))
            own.save(step=step, state=state(step), evaler_summaries={"eval": {"loss": loss}})
    assert Checkpointer.latest_checkpoint_step(str(directory)) == 10
    with holdfast.open_run(directory) as run:
        assert run.metadata(10).metrics == {"eval/loss": 5.0}


def ends_when_preempted(directory: Path) -> None:
    never = config_for_function(every_n_steps_policy).set(n=1000)

    own = checkpointer(directory, save_policy=never)

    def steps() -> None:
        for step in range(1, 100):
            own.save(step=step, state=state(step))
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with mesh(8, 1), own, pytest.raises(SystemExit) as ended:
        steps()
    assert ended.value.code == 143
    assert Checkpointer.latest_checkpoint_step(str(directory)) < 20


def main() -> None:
    folder = Path(sys.argv[1])
    saves_and_restores(folder / "run")
    goes_back(folder / "run")
    refuses(folder / "run")
    saves_by_holdfasts_policies(folder / "continuous")
    ends_when_preempted(folder / "preempted")
    print("ENDED well")


main()
