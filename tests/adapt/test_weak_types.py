"""A weakly typed JAX array is one after a restore too, with the same bits in the same sharding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast
from holdfast.adapt.jax import internals
from holdfast.adapt.jax.restore import whole_array
from holdfast.adapt.jax.state import JaxFramework
from holdfast.format.records import ArraySpec

BITS = np.array([0x7F800001, 0xFFC12345, 0x00000001, 0x80000000], np.uint32).view(np.float32)


def sharded(*axes: str) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec(*axes))


MADE: dict[str, Callable[[], jax.Array]] = {
    "scalar": lambda: jnp.asarray(1.01),
    "integer": lambda: jnp.asarray(7),
    "complex": lambda: jnp.asarray(1 + 2j),
    "axes": lambda: jax.lax.full_like(jnp.asarray(2.5), 1.25, shape=(4, 3)),
    "empty": lambda: jax.lax.full_like(jnp.asarray(2.5), 1.25, shape=(0, 3)),
    "narrow": lambda: internals.weakly_typed(jnp.ones(3, jnp.bfloat16)),
    "bits": lambda: internals.weakly_typed(jax.device_put(BITS)),
    "device": lambda: jax.device_put(jnp.asarray(3.5), jax.devices()[1]),
    "divided": lambda: jax.device_put(internals.weakly_typed(jax.device_put(BITS)), sharded("x")),
    "copied": lambda: jax.device_put(jnp.asarray(0.5), sharded()),
}


def strong(array: jax.Array) -> jax.Array:
    return jax.device_put(jnp.zeros(array.shape, array.dtype), array.sharding)


@pytest.mark.parametrize("name", MADE)
def test_weak_types_come_back_whatever_the_state_asked_for_has(name: str, tmp_path: Path) -> None:
    saved = MADE[name]()
    assert saved.weak_type
    holdfast.save(tmp_path / "a", {"weak": saved, "strong": strong(saved)})
    stand_in = jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=saved.sharding)
    for like in (saved, strong(saved), stand_in):
        restored = holdfast.load(tmp_path / "a", like={"weak": like, "strong": like})
        assert [restored[key].weak_type for key in ("weak", "strong")] == [True, False]
        array = restored["weak"]
        assert (array.shape, array.dtype) == (saved.shape, saved.dtype)
        assert array.sharding == saved.sharding
        assert array.committed == getattr(like, "committed", True)
        assert np.asarray(array).tobytes() == np.asarray(saved).tobytes()
        assert jax.jit(lambda x: x * 2)(array).weak_type
    plain = holdfast.load(tmp_path / "a")
    assert type(plain["weak"]) is np.ndarray


def test_a_restored_training_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    @jax.jit
    def step(state: Any) -> Any:
        return {
            "w": state["w"] * state["decay"] + state["rate"],
            "decay": state["decay"],
            "rate": state["rate"] * 0.99,
        }

    def began() -> Any:
        return {
            "w": jnp.ones(5, jnp.bfloat16),
            "decay": jnp.asarray(1.01),
            "rate": jnp.asarray(0.1),
        }

    state = step(step(began()))
    holdfast.save(tmp_path / "a", state)
    restored = step(step(holdfast.load(tmp_path / "a", like=began())))
    expected = step(step(state))
    for key, array in expected.items():
        assert restored[key].dtype == array.dtype
        assert np.asarray(restored[key]).tobytes() == np.asarray(array).tobytes()


def test_the_weak_type_is_part_of_the_structure_of_a_state() -> None:
    framework = JaxFramework()
    weak, strong_one = {"x": jnp.asarray(1.5)}, {"x": jnp.float32(1.5)}
    outlines = [framework.snapshot(state).outline for state in (weak, strong_one, weak)]
    assert [outline.arrays[0].weak_type for outline in outlines] == [True, False, True]
    assert outlines[0] is outlines[2]


def test_a_cast_array_is_strongly_typed(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "a", {"x": jnp.asarray(1.5)})
    like = {"x": jax.ShapeDtypeStruct((), jnp.bfloat16)}
    restored = holdfast.load(tmp_path / "a", like=like, cast=True)
    assert (restored["x"].dtype, restored["x"].weak_type) == (jnp.bfloat16, False)


def test_an_array_that_is_restored_without_a_state_asked_for_is_weakly_typed_too() -> None:
    spec = ArraySpec(
        path=("x",), shape=(4,), dtype="float32", chunk_shape=(4,), owners=((0, 1),), weak_type=True
    )
    array = whole_array(BITS, spec)
    assert array.weak_type
    assert np.asarray(array).tobytes() == BITS.tobytes()


def test_a_weakly_typed_array_may_be_donated() -> None:
    # JAX may use the memory of a NumPy array, and then takes none of it.
    array = internals.weakly_typed(jax.jit(lambda: jnp.ones(4096))())
    place = array.unsafe_buffer_pointer()
    result = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()
    assert result.unsafe_buffer_pointer() == place
