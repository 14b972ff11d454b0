"""Train the demo's model with JAX and Optax; see `holdfast.demo.learner`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from holdfast.demo import jax_model
from holdfast.demo.learner import JOIN_SECS, LearnerOptions, StateDigests, digest_arrays


class JaxLearner:
    """See `holdfast.demo.learner.Learner`."""

    def __init__(self, options: LearnerOptions) -> None:
        self._options = options
        if options.hosts > 1:
            jax.distributed.initialize(
                options.coordinator, options.hosts, options.host, initialization_timeout=JOIN_SECS
            )
        self._optimizer = jax_model.make_optimizer(options.steps)
        self._step = jax_model.make_train_step(options.config, self._optimizer)

    def initial_state(self) -> dict[str, Any]:
        init_rng, rng = jax.random.split(jax.random.key(self._options.seed))
        init = jax_model.make_init(self._options.config, self._optimizer)
        params, opt_state = init(init_rng)
        return {"params": params, "opt_state": opt_state, "rng": jax_model.everywhere(rng)}

    def train_step(
        self, state: dict[str, Any], batch: NDArray[np.uint8]
    ) -> tuple[dict[str, Any], float]:
        params, opt_state, rng, loss = self._step(
            state["params"], state["opt_state"], state["rng"], batch
        )
        # float waits until the step is finished.
        return {**state, "params": params, "opt_state": opt_state, "rng": rng}, float(loss)

    def state_digests(self, state: dict[str, Any]) -> StateDigests:
        return StateDigests(
            params=digest(state["params"]),
            opt_state=digest(state["opt_state"]),
            rng=digest(jax.random.key_data(state["rng"])),
        )

    def leave_job(self) -> None:
        if self._options.hosts > 1:
            jax.distributed.shutdown()  # type: ignore[no-untyped-call]


def digest(tree: Any) -> str:
    """Return a digest over the paths, dtypes, shapes and bits of all arrays of a tree."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return digest_arrays((jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in leaves)
