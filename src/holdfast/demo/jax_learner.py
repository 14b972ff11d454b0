"""Train the demo's transformer with plain JAX and Optax; see `holdfast.demo.learner`.

The training is data parallel over a mesh with one device for each host: each host has the whole
state and its own batch.

Invariant: equal inputs give equal bits in every process on one machine, which `tests/demo` checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from holdfast.demo.learner import (
    BETA_2,
    END_RATE,
    GRADIENT_NORM_MAX,
    JOIN_SECS,
    PEAK_RATE,
    WEIGHT_DECAY,
    ModelConfig,
    StateDigests,
    TrainerOptions,
    digest_arrays,
)

Params: TypeAlias = dict[str, Any]
TrainStep: TypeAlias = Callable[
    [Params, optax.OptState, jax.Array, NDArray[np.uint8]],
    tuple[Params, optax.OptState, jax.Array, jax.Array],
]


class JaxLearner:
    """See `holdfast.demo.learner.Learner`."""

    def __init__(self, options: TrainerOptions) -> None:
        self._options = options
        if options.hosts > 1:
            jax.distributed.initialize(
                options.coordinator, options.hosts, options.host, initialization_timeout=JOIN_SECS
            )
        self._optimizer = make_optimizer(options.steps)
        self._step = make_train_step(options.config, self._optimizer)

    def initial_state(self) -> dict[str, Any]:
        init_rng, rng = jax.random.split(jax.random.key(self._options.seed))
        init = make_init(self._options.config, self._optimizer)
        params, opt_state = init(init_rng)
        return {"params": params, "opt_state": opt_state, "rng": everywhere(rng)}

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


def init_params(config: ModelConfig, rng: jax.Array) -> Params:
    """Return initial float32 parameters, a nested dict with one entry for each layer."""
    width = config.width
    shapes: Params = {
        "embedding": (config.vocabulary, width),
        "position": (config.context, width),
        "norm": (width,),
    }
    for layer in range(config.layers):
        shapes[f"layer_{layer}"] = {
            "attention": {"norm": (width,), "qkv": (width, 3 * width), "out": (width, width)},
            "mlp": {"norm": (width,), "up": (width, 4 * width), "down": (4 * width, width)},
        }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    # All are drawn by one call: one for each array would take longer to compile than the training.
    ends = np.cumsum([np.prod(shape) for shape in leaves])
    drawn = jnp.split(0.02 * jax.random.normal(rng, (int(ends[-1]),)), ends[:-1])
    arrays = [
        jnp.ones(shape) if len(shape) == 1 else values.reshape(shape)
        for shape, values in zip(leaves, drawn, strict=True)
    ]
    params: Params = jax.tree.unflatten(tree, arrays)
    return params


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """Return AdamW with clipped gradients, and warm-up and cosine decay over `steps` steps."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=PEAK_RATE,
        warmup_steps=max(1, steps // 12),
        decay_steps=steps,
        end_value=END_RATE,
    )
    return optax.chain(
        optax.clip_by_global_norm(GRADIENT_NORM_MAX),
        optax.adamw(schedule, b2=BETA_2, weight_decay=WEIGHT_DECAY),
    )


def shardings() -> tuple[NamedSharding, NamedSharding]:
    """Return the shardings for whole arrays on each host, and for arrays divided between hosts.

    The mesh has the first device of each process.
    """
    first: dict[int, jax.Device] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([first[index] for index in sorted(first)]), ("hosts",))
    whole, divided = PartitionSpec(), PartitionSpec("hosts")  # type: ignore[no-untyped-call]
    return NamedSharding(mesh, whole), NamedSharding(mesh, divided)


def everywhere(value: jax.Array) -> jax.Array:
    """Return a value that is equal on all hosts as one replicated array."""
    whole, _ = shardings()
    result: jax.Array = jax.jit(lambda same: same, out_shardings=whole)(value)
    return result


def make_init(
    config: ModelConfig, optimizer: optax.GradientTransformation
) -> Callable[[jax.Array], tuple[Params, optax.OptState]]:
    """Return `init(rng) -> (params, opt_state)`, compiled as one program."""

    def init(rng: jax.Array) -> tuple[Params, optax.OptState]:
        params = init_params(config, rng)
        return params, optimizer.init(params)

    whole, _ = shardings()
    return jax.jit(init, out_shardings=whole)


def make_train_step(config: ModelConfig, optimizer: optax.GradientTransformation) -> TrainStep:
    """Return `train_step(params, opt_state, rng, batch) -> (params, opt_state, rng, loss)`.

    `batch` is this host's batch, uint8 of shape (windows, context + 1). `loss` is the mean cross
    entropy over the batches of all hosts, in nats per byte. `params` and `opt_state` are donated:
    the arrays passed in cannot be used afterwards.
    """
    whole, by_host = shardings()

    def train_step(
        params: Params, opt_state: optax.OptState, rng: jax.Array, batch: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array, jax.Array]:
        rng, dropout_rng = jax.random.split(rng)
        loss, grads = jax.value_and_grad(_loss)(params, config, dropout_rng, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, rng, loss

    compiled: TrainStep = jax.jit(train_step, donate_argnums=(0, 1), out_shardings=whole)

    def step(
        params: Params, opt_state: optax.OptState, rng: jax.Array, batch: NDArray[np.uint8]
    ) -> tuple[Params, optax.OptState, jax.Array, jax.Array]:
        of_all = jax.make_array_from_process_local_data(by_host, batch)  # type: ignore[no-untyped-call]
        return compiled(params, opt_state, rng, of_all)

    return step


def _loss(params: Params, config: ModelConfig, rng: jax.Array, batch: jax.Array) -> jax.Array:
    logits = _logits(params, config, rng, batch[:, :-1])
    targets = batch[:, 1:].astype(jnp.int32)
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean()


def _logits(params: Params, config: ModelConfig, rng: jax.Array, text: jax.Array) -> jax.Array:
    x = params["embedding"][text] + params["position"][: text.shape[1]]
    for layer, layer_rng in enumerate(jax.random.split(rng, config.layers)):
        weights = params[f"layer_{layer}"]
        attention_rng, mlp_rng = jax.random.split(layer_rng)
        x += _dropout(_attention(weights["attention"], config, x), config, attention_rng)
        x += _dropout(_mlp(weights["mlp"], x), config, mlp_rng)
    return jnp.matmul(_rms_norm(x, params["norm"]), params["embedding"].T)


def _attention(weights: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    windows, context, width = x.shape
    qkv = _rms_norm(x, weights["norm"]) @ weights["qkv"]
    query, key, value = jnp.split(
        qkv.reshape(windows, context, 3 * config.heads, width // config.heads), 3, axis=2
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (width // config.heads) ** 0.5
    visible = jnp.tril(jnp.ones((context, context), dtype=bool))
    attention = jax.nn.softmax(jnp.where(visible, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", attention, value)
    return jnp.matmul(mixed.reshape(windows, context, width), weights["out"])


def _mlp(weights: Params, x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(_rms_norm(x, weights["norm"]) @ weights["up"])
    return jnp.matmul(hidden, weights["down"])


def _dropout(x: jax.Array, config: ModelConfig, rng: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(rng, 1.0 - config.dropout, x.shape)
    return jnp.where(kept, x / (1.0 - config.dropout), 0.0)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale
