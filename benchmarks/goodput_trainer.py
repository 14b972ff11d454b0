"""The demo's training with one system or the other, for runs that are killed on a schedule.

`python -m benchmarks.goodput_trainer SYSTEM DIRECTORY STEPS`; SYSTEM is `holdfast`, `orbax` or
`none`. It exits with 0 when step number STEPS is done, and prints the digest of the parameters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax

from holdfast.demo import jax_learner as model
from holdfast.demo.data import BatchShape, batch_iterator, load_corpus
from holdfast.demo.jax_learner import digest
from holdfast.demo.learner import ModelConfig

State = dict[str, Any]


def main() -> None:
    """Trains to the end, from wherever the run stands."""
    system, directory, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    shape = BatchShape()
    config = ModelConfig(context=shape.context)
    optimizer = model.make_optimizer(steps)
    train_step = model.make_train_step(config, optimizer)
    init_rng, rng = jax.random.split(jax.random.key(0))
    params, opt_state = model.make_init(config, optimizer)(init_rng)
    state = {
        "params": params,
        "opt_state": opt_state,
        "rng": model.everywhere(rng),
        "data": batch_iterator(load_corpus(), shape, seed=0),
    }
    keeper = KEEPERS[system](directory)
    start, state = keeper.resume(state)
    for step in range(start, steps):
        batch = next(state["data"])
        params, opt_state, rng, loss = train_step(
            state["params"], state["opt_state"], state["rng"], batch
        )
        float(loss)
        state |= {"params": params, "opt_state": opt_state, "rng": rng}
        keeper.save(step, state)
    print(json.dumps({"params": digest(state["params"]), "started_at": start}), flush=True)
    keeper.close()


class _None:
    def __init__(self, directory: Path) -> None:
        pass

    def resume(self, state: State) -> tuple[int, State]:
        return 0, state

    def save(self, step: int, state: State) -> None:
        pass

    def close(self) -> None:
        pass


class _Holdfast:
    """RAM whenever it is idle, the disk once a second, as the demo does."""

    def __init__(self, directory: Path) -> None:
        import holdfast
        from holdfast import preservation_policy, save_decision_policy

        continuous = save_decision_policy.ContinuousCheckpointingPolicy
        self._manager = holdfast.CheckpointManager(
            directory,
            save_decision_policy=continuous(minimum_interval_secs=1.0),
            preservation_policy=preservation_policy.LatestN(2),
            ram=holdfast.RamTier(save_decision_policy=continuous()),
        )
        self.resume = self._manager.resume
        self.save = self._manager.save
        self.close = self._manager.close


class _Orbax:
    """Continuous, asynchronous; the iterator's state beside the arrays, as JSON."""

    def __init__(self, directory: Path) -> None:
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers

        self._ocp = ocp
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                save_decision_policy=checkpoint_managers.ContinuousCheckpointingPolicy(),
                preservation_policy=checkpoint_managers.LatestN(2),
                enable_async_checkpointing=True,
            ),
        )

    def resume(self, state: State) -> tuple[int, State]:
        step = self._manager.latest_step()
        if step is None:
            return 0, state
        arrays = {key: value for key, value in state.items() if key != "data"}
        like = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, arrays)
        args = self._ocp.args
        found = self._manager.restore(
            step,
            args=args.Composite(state=args.StandardRestore(like), data=args.JsonRestore()),
        )
        iterator = state["data"]
        iterator.set_state(found["data"])
        return step + 1, {**found["state"], "data": iterator}

    def save(self, step: int, state: State) -> None:
        if not self._manager.should_save(step):
            return
        args = self._ocp.args
        arrays = {key: value for key, value in state.items() if key != "data"}
        self._manager.save(
            step,
            args=args.Composite(
                state=args.StandardSave(arrays), data=args.JsonSave(state["data"].get_state())
            ),
        )

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


KEEPERS: dict[str, Any] = {"none": _None, "holdfast": _Holdfast, "orbax": _Orbax}


if __name__ == "__main__":
    main()
