"""Call the checkpointer as AXLearn's trainer and evaluations do: `DIRECTORY`. Prints ENDED well."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from axlearn.common import checkpointer as axlearn_checkpointer
from axlearn.common.checkpointer import every_n_steps_policy
from axlearn.common.config import config_for_function
from axlearn.common.elastic_input import ElasticDatasetIterator
from axlearn.common.metrics import WeightedSummary
from axlearn.common.utils import PartitionSpec, TensorSpec, VDict

import holdfast
from holdfast.errors import (
    CheckpointDamagedError,
    InvalidArgumentError,
    NotARunError,
    StepNotFoundError,
    StructureMismatchError,
)
from holdfast.interop.trainers.axlearn import Checkpointer, ElasticIterator, export
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
    return {"model": VDict(w=sharded, empty={}), "count": TensorSpec((), jnp.int32), **iterators}


def state(value: float, **iterators: Any) -> dict[str, Any]:
    placed = jax.sharding.NamedSharding(mesh(8, 1), PartitionSpec("data", "model"))
    w = jax.device_put(jnp.full((8, 8), value, jnp.float32), placed)
    return {"model": VDict(w=w, empty={}), "count": jnp.int32(value), **iterators}


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
            specs(tf=tf_iterator(), counter=counter) | {"count": TensorSpec((), jnp.int16)},
            specs(tf=tf_iterator(), counter=counter) | {"count": TensorSpec((2,), jnp.int32)},
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
    other.mkdir()
    (other / "1000").mkdir()
    with mesh(8, 1), pytest.raises(NotARunError, match="1000"):
        checkpointer(other).restore(state=specs())
    own.stop()


def axlearns_own(directory: Path) -> Any:
    config = axlearn_checkpointer.Checkpointer.default_config()
    return config.set(name="own", dir=str(directory), keep_last_n=10).instantiate(parent=None)


def continues_from_axlearns_own_and_goes_back(directory: Path) -> None:
    batches, counter = tf_iterator(), Counter()
    with mesh(8, 1), axlearns_own_context(directory) as own:
        for step in (2, 4):
            next(batches), next(counter)
            own.save(step=step, state=state(step, tf=batches, counter=counter))
        own.wait_until_finished()
    (directory / "step_00000009" / "gda").mkdir(parents=True)  # A save that did not end.
    expected = [next(batches).numpy() for _ in range(4)]
    before = sorted(directory.rglob("*"))
    assert Checkpointer.checkpoint_steps(str(directory)) == [2, 4]
    ours = checkpointer(directory, keep_last_n=1)
    batches, counter = tf_iterator(), Counter()
    with mesh(4, 2), ours:
        with pytest.raises(StructureMismatchError):
            ours.restore(state=specs(tf=batches))
        step, found = ours.restore(state=specs(tf=batches, counter=counter))
        assert step == 4
        assert type(found["model"]) is VDict
        assert dict(found["model"]["w"].sharding.mesh.shape) == {"data": 4, "model": 2}
        np.testing.assert_array_equal(found["model"]["w"], np.full((8, 8), 4, np.float32))
        assert found["tf"] is batches
        assert found["counter"] is counter
        assert counter.count == 2
        assert [next(batches).numpy() for _ in range(2)] == expected[:2]
        assert sorted(directory.rglob("*")) == before
        for step in (5, 6):
            ours.save(step=step, state=state(step, tf=batches, counter=counter))
    assert Checkpointer.checkpoint_steps(str(directory)) == [2, 4, 6]
    assert in_another_process(directory) == [2, 4, 6]
    assert "/holdfast/" in Checkpointer.latest_checkpoint_path(str(directory))
    back = directory.parent / "back"
    batches, counter = tf_iterator(), Counter()
    with mesh(4, 2):
        folder = export(str(directory), back, state=specs(tf=batches, counter=counter))
        assert folder == back / "step_00000006"
        with pytest.raises(InvalidArgumentError, match="exists"):
            export(str(directory), back, state=specs(tf=batches, counter=counter))
        export(str(directory), back, state=specs(tf=batches, counter=counter), step=2)
    batches, counter = tf_iterator(), Counter()
    with mesh(8, 1), axlearns_own_context(back) as own:
        step, found = own.restore(state=specs(tf=batches, counter=counter))
        assert (step, counter.count) == (6, 2)
        np.testing.assert_array_equal(found["model"]["w"], np.full((8, 8), 6, np.float32))
        assert [next(batches).numpy() for _ in range(2)] == expected[2:]
        assert own.restore(step=2, state=specs(tf=batches, counter=counter))[0] == 2
        assert counter.count == 1
    ours = checkpointer(directory)
    (directory / "step_00000002" / "gda" / "count" / ".zarray").unlink()
    with mesh(8, 1):
        assert ours.restore(state=specs(tf=batches, counter=counter))[0] == 6
        with pytest.raises(CheckpointDamagedError, match="step_00000002"):
            ours.restore(step=2, state=specs(tf=batches, counter=counter))


@contextlib.contextmanager
def axlearns_own_context(directory: Path) -> Iterator[Any]:
    own = axlearns_own(directory)
    try:
        yield own
    finally:
        own.stop()


def divides_elastic_iterators(directory: Path) -> None:
    """Four slices of two processes; one is missing for three steps, and comes back."""
    processes, left, per_feed = 8, 6, 2
    feeds = [tf.data.Dataset.range(10 * i, 10 * i + 10) for i in range(processes // per_feed)]

    def whole() -> list[ElasticDatasetIterator]:
        return [elastic_of(iter(feeds[i // per_feed])) for i in range(processes)]

    def fewer() -> list[ElasticDatasetIterator]:
        # Process 4 and 5 read nothing for those that are missing.
        missing = [iter(feeds[-1]) if i < 4 else None for i in range(left)]
        return [
            elastic_of(iter(feeds[i // per_feed]), other, range(left, processes))
            for i, other in enumerate(missing)
        ]

    def moved(iterators: list[Any], onto: list[Any]) -> list[Any]:
        states = [ElasticIterator(iterator).get_state() for iterator in iterators]
        for rank, iterator in enumerate(onto):
            ElasticIterator(iterator).set_states(states, rank=rank, count=len(onto))
        return onto

    iterators = whole()
    for steps, following in ((2, fewer()), (3, whole()), (0, whole())):
        for iterator in iterators:
            for _ in range(steps):
                next(iterator)
        iterators = moved(iterators, following)
    positions = [int(next(iterator)[0]) for iterator in iterators]
    assert positions == [10 * (i // per_feed) + 5 for i in range(processes)]
    with pytest.raises(StructureMismatchError, match="process 6"):
        moved(whole()[:4], fewer())
    one = elastic_of(iter(feeds[1]), iter(feeds[3]), range(1, 2))
    with mesh(8, 1):
        own = checkpointer(directory)
        next(one), next(one)
        own.save(step=1, state=state(1, tf=one))
        own.stop()
        again = elastic_of(iter(feeds[1]), iter(feeds[3]), range(1, 2))
        assert checkpointer(directory).restore(state=specs(tf=again))[1]["tf"] is again
    assert [int(value) for value in next(again)] == [12, 32]


def elastic_of(
    primary: Any, elastic: Any = None, for_processes: Iterable[int] = ()
) -> ElasticDatasetIterator:
    return ElasticDatasetIterator(
        primary_iterator=primary,
        elastic_iterator=elastic,
        elastic_process_ids=[] if elastic is None else list(for_processes),
        is_primary_for_checkpoint=True,
    )


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
    continues_from_axlearns_own_and_goes_back(folder / "continued")
    divides_elastic_iterators(folder / "elastic")
    saves_by_holdfasts_policies(folder / "continuous")
    ends_when_preempted(folder / "preempted")
    print("ENDED well")


main()
