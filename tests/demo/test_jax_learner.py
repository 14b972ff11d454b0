import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.demo import jax_learner as model
from holdfast.demo.jax_learner import digest
from holdfast.demo.learner import ModelConfig

_TRAIN_A_LITTLE = """
import jax, numpy as np
from holdfast.demo import jax_learner as model
from holdfast.demo.jax_learner import digest
from holdfast.demo.learner import ModelConfig
config = ModelConfig(layers=2)
optimizer = model.make_optimizer(24)
train_step = model.make_train_step(config, optimizer)
rng, init_rng = jax.random.split(jax.random.key(5))
params, opt_state = model.make_init(config, optimizer)(init_rng)
text = np.random.default_rng(0).integers(0, 256, (16, 65), dtype=np.uint8)
for _ in range(4):
    params, opt_state, rng, loss = train_step(params, opt_state, rng, text)
print(digest(params), digest(opt_state), digest(jax.random.key_data(rng)), float(loss).hex())
"""


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _TRAIN_A_LITTLE],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.soak
def test_two_processes_train_to_the_same_bits() -> None:
    # Side by side, so that they take each other's cores.
    with _start() as first, _start() as second:
        outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert len(outputs[0].split()) == 4
    assert outputs[0] == outputs[1]


def test_training_lowers_the_loss_and_moves_the_rng_on_which_dropout_depends() -> None:
    config = ModelConfig(width=32, heads=2, layers=1, dropout=0.1)
    optimizer = model.make_optimizer(48)
    train_step = model.make_train_step(config, optimizer)
    rng = first_rng = jax.random.key(0)
    make_state = model.make_init(config, optimizer)
    params, opt_state = make_state(rng)
    text = jnp.asarray(np.frombuffer(b"abcd" * 65, dtype=np.uint8).reshape(4, 65))
    losses = []
    for _ in range(48):
        params, opt_state, rng, loss = train_step(params, opt_state, rng, text)
        losses.append(float(loss))
    assert 5.0 < losses[0] < 6.0
    assert losses[-1] < 0.7 * losses[0]
    assert digest(jax.random.key_data(rng)) != digest(jax.random.key_data(first_rng))
    other = train_step(*make_state(first_rng), jax.random.key(1), text)
    assert float(other[3]) != losses[0]


def test_one_changed_bit_changes_the_digest() -> None:
    ones = np.ones(5000, np.float32)
    other = ones.copy()
    other[2500] = np.nextafter(np.float32(1), np.float32(2))
    tree, changed, renamed = {"a": ones, "b": 2}, {"a": other, "b": 2}, {"a": ones, "c": 2}
    assert digest(tree) == digest({"b": 2, "a": ones.copy()})
    assert len({digest(tree), digest(changed), digest(renamed)}) == 3
