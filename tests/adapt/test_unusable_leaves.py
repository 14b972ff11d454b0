"""What JAX or NumPy would refuse, or change in silence, is refused by path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.adapt.contract import Framework
from holdfast.adapt.jax.state import JaxFramework
from holdfast.errors import UnsupportedLeafError
from holdfast.format.values import encode_value

LOOKS: dict[str, Callable[[Framework, Any], Any]] = {
    "snapshot": lambda framework, state: framework.snapshot(state),
    "outline": lambda framework, state: framework.outline(state),
}


@pytest.fixture(params=LOOKS)
def use(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    framework = JaxFramework()
    return lambda state: LOOKS[request.param](framework, state)


def donated(array: jax.Array) -> jax.Array:
    jax.jit(lambda x: x, donate_argnums=0)(array)
    assert array.is_deleted()
    return array


def test_a_state_inside_a_traced_function_is_refused(use: Callable[[Any], Any]) -> None:
    def step(x: jax.Array) -> jax.Array:
        with pytest.raises(UnsupportedLeafError, match=r"save w/0: .*inside a traced function"):
            use({"w": [x]})
        return x

    jax.jit(step)(jnp.ones(3))
    jax.grad(lambda x: step(x).sum())(jnp.ones(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: jnp.ones(3),
        lambda: jnp.ones(3, jnp.bfloat16),
        lambda: jax.device_put(
            jnp.ones((8, 2)),
            jax.NamedSharding(jax.make_mesh((8,), "x"), jax.sharding.PartitionSpec("x")),
        ),
        lambda: jax.random.key(1),
    ],
    ids=["float32", "bfloat16", "sharded", "key"],
)
def test_a_donated_array_is_refused(
    use: Callable[[Any], Any], make: Callable[[], jax.Array]
) -> None:
    # The second call finds the outline of the first.
    use({"a": jnp.ones(2), "w": make()})
    with pytest.raises(UnsupportedLeafError, match=r"save w: .*was deleted or donated"):
        use({"a": jnp.ones(2), "w": donated(make())})


def test_the_keys_1_and_text_1_of_one_dict_are_refused(use: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"save layers/0: .*'1' and 1; rename"):
        use({"layers": [{1: jnp.ones(2), "1": jnp.ones(2)}]})


def test_a_state_that_contains_itself_is_refused_by_its_path(use: Callable[[Any], Any]) -> None:
    inner: list[Any] = [jnp.ones(2)]
    inner.append({"again": inner})
    for _ in range(2):
        with pytest.raises(UnsupportedLeafError, match=r"save d/1/again/1/.*contains itself"):
            use({"d": inner, "w": [[jnp.ones(2)]] * 3})


def test_masked_arrays_are_refused(use: Callable[[Any], Any]) -> None:
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    with pytest.raises(UnsupportedLeafError, match=r"save w: .*mask"):
        use({"w": masked})
    with pytest.raises(UnsupportedLeafError, match=r"save data/w: .*mask"):
        encode_value({"w": masked}, "data")


def test_an_error_of_an_object_s_own_method_is_raised_with_its_path() -> None:
    class Broken:
        def get_state(self) -> object:
            raise RuntimeError("of its own")

        def set_state(self, state: object) -> None: ...

    with pytest.raises(UnsupportedLeafError, match=r"save data: .*RuntimeError: of its own") as e:
        JaxFramework().snapshot({"w": jnp.ones(2), "data": Broken()})
    assert isinstance(e.value.__cause__, RuntimeError)
