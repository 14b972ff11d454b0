"""Every kind of state comes back as it was, bit for bit.

`tests/trainer/test_fixed_state.py` has a state of many kinds with a manager, from RAM and disk.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import equinox
import flax.linen
import flax.struct
import grain
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast
from holdfast.errors import StructureMismatchError, UnsupportedLeafError
from tests.trainer.states import same

Point = namedtuple("Point", "x y")

if hasattr(jax, "enable_x64"):
    enable_x64 = jax.enable_x64
else:  # Before JAX 0.8.
    from jax.experimental import enable_x64


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    inside: Any
    size: Any


def round_trip(directory: Path, state: Any, like: Any) -> Any:
    """`state` saved, and restored like `like`."""
    holdfast.save(directory, state)
    return holdfast.load(directory, like=like)


JAX_DTYPES = [
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16"),
    *("float32", "complex64", "int4", "uint4", "int2", "uint2", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "float4_e2m1fn"),
]


def test_every_dtype_of_jax_comes_back(tmp_path: Path) -> None:
    state = {name: jnp.arange(7).astype(name).reshape(7, 1) for name in JAX_DTYPES}
    like = jax.tree.map(jnp.zeros_like, state)
    assert same(round_trip(tmp_path / "run", state, like), state)


def test_wide_dtypes_come_back_where_they_are_enabled(tmp_path: Path) -> None:
    with enable_x64(True):
        names = ["int64", "uint64", "float64", "complex128"]
        state = {name: jnp.arange(5).astype(name) / 3 for name in names}
        like = jax.tree.map(jnp.zeros_like, state)
        assert same(round_trip(tmp_path / "run", state, like), state)


def test_numpy_arrays_and_scalars_come_back_as_what_they_are(tmp_path: Path) -> None:
    state = {
        "int64": np.arange(6).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "strided": np.arange(20)[::3],
        "complex128": np.array([1 + 2j, np.nan]),
        "scalar": np.float32(2.5),
        "bfloat16": np.arange(3).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 3), np.int16),
        "zero_d": np.array(7, np.uint8),
        "bool": np.bool_(True),
    }
    like = {
        k: np.zeros_like(v) if isinstance(v, np.ndarray) else type(v)(0) for k, v in state.items()
    }
    restored = round_trip(tmp_path / "run", state, like)
    assert same(restored, state)
    restored["int64"][0, 0] = 5


def test_arrays_without_axes_and_without_elements_come_back(tmp_path: Path) -> None:
    state = [jnp.float32(3.5), jnp.zeros((0,)), jnp.zeros((4, 0, 2), jnp.bfloat16), jnp.array(True)]
    assert same(round_trip(tmp_path / "run", state, jax.tree.map(jnp.zeros_like, state)), state)


def test_containers_of_all_kinds_come_back(tmp_path: Path) -> None:
    state = {
        "ints": {3: jnp.ones(2), 1: {2: 5}},
        "list": [jnp.zeros(1), (1, 2.5, [None])],
        "namedtuple": Point(jnp.ones(3), "text"),
        "dataclass": Box(inside=jnp.ones((2, 2)), size=(1, b"bytes")),
        "ordered": OrderedDict(b=jnp.ones(1), a=True),
        "empty": [{}, (), [], None, Point((), {})],
        "odd/keys": {"a[0:1]": 1, "": 2, "%": 3, "ü\n": 4},
    }
    like = jax.tree.map(lambda x: jnp.zeros_like(x) if isinstance(x, jax.Array) else x, state)
    assert same(round_trip(tmp_path / "run", state, like), state)


def test_without_a_like_dicts_lists_tuples_and_int_keys_come_back(tmp_path: Path) -> None:
    state = {
        "ints": {3: jnp.ones(2), 1: {2: 5}},
        "mixed": [jnp.zeros(1), (1, 2.5, [None]), {}],
        "point": Point(jnp.ones(3), "text"),
    }
    restored = round_trip(tmp_path / "run", state, None)
    assert restored["ints"].keys() == {1, 3}
    assert restored["ints"][1] == {2: 5}
    assert type(restored["mixed"]) is list
    assert restored["mixed"][1] == (1, 2.5, [None])
    assert restored["mixed"][2] == {}
    assert restored["point"]["y"] == "text"
    np.testing.assert_array_equal(restored["point"]["x"], np.ones(3, np.float32))


def test_a_state_that_is_one_array_comes_back(tmp_path: Path) -> None:
    state = jnp.arange(10.0)
    assert same(round_trip(tmp_path / "a", state, jnp.zeros(10)), state)
    restored = round_trip(tmp_path / "b", state, None)
    np.testing.assert_array_equal(restored, np.arange(10.0))


def test_values_come_back_as_the_type_they_were(tmp_path: Path) -> None:
    state = {
        "int": 2**80,
        "negative": -3,
        "float": 0.1,
        "nan": float("nan"),
        "inf": -float("inf"),
        "minus_zero": -0.0,
        "bool": True,
        "text": "grüße \U0001f600",
        "bytes": bytes(range(256)),
        "none": None,
        "one": 1.0,
    }
    like = {k: type(v)() if v is not None else None for k, v in state.items()}
    assert same(round_trip(tmp_path / "run", state, like), state)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_prng_keys_carry_their_implementation(tmp_path: Path, impl: str) -> None:
    state = {
        "one": jax.random.key(1, impl=impl),
        "many": jax.random.split(jax.random.key(2, impl=impl), (3, 2)),
        "raw": jax.random.PRNGKey(3),
    }
    like = {
        "one": jax.random.key(0, impl=impl),
        "many": jax.ShapeDtypeStruct((3, 2), state["many"].dtype),
        "raw": jax.random.PRNGKey(0),
    }
    restored = round_trip(tmp_path / "run", state, like)
    assert same(restored, state)
    assert str(jax.random.key_impl(restored["one"])) == impl


def test_an_optax_state_comes_back(tmp_path: Path) -> None:
    params = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4, jnp.bfloat16)}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100))
    )
    state = optimizer.init(params)
    _, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert same(round_trip(tmp_path / "run", state, optimizer.init(params)), state)


def test_a_flax_linen_train_state_comes_back(tmp_path: Path) -> None:
    module = flax.linen.Dense(3)
    variables = module.init(jax.random.key(0), jnp.ones((1, 2)))

    def fresh() -> TrainState:
        return TrainState.create(apply_fn=module.apply, params=variables["params"], tx=optimizer)

    optimizer = optax.adam(1e-2)
    state = fresh().apply_gradients(grads=jax.tree.map(jnp.ones_like, variables["params"]))
    assert same(round_trip(tmp_path / "run", state, fresh()), state)


def test_a_flax_nnx_model_and_its_split_state_come_back(tmp_path: Path) -> None:
    def fresh(seed: int) -> nnx.Sequential:
        rngs = nnx.Rngs(seed)
        return nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs))

    _, state = nnx.split(fresh(1))
    _, like = nnx.split(fresh(2))
    assert same(round_trip(tmp_path / "split", state, like), state)
    model = fresh(3)
    restored = round_trip(tmp_path / "whole", model, fresh(4))
    assert same(jax.tree.leaves(restored), jax.tree.leaves(model))


def test_an_equinox_model_comes_back_through_its_arrays(tmp_path: Path) -> None:
    def fresh(seed: int) -> equinox.nn.MLP:
        return equinox.nn.MLP(2, 2, 4, 1, key=jax.random.key(seed))

    state = equinox.filter(fresh(1), equinox.is_array)
    restored = round_trip(tmp_path / "run", state, equinox.filter(fresh(2), equinox.is_array))
    assert same(restored, state)


def batches() -> Any:
    numbers = grain.MapDataset.source(np.arange(1000)).shuffle(seed=7).repeat()
    return iter(numbers.batch(5).to_iter_dataset())


def test_a_grain_iterator_goes_on_where_the_arrays_do(tmp_path: Path) -> None:
    iterator = batches()
    for _ in range(3):
        next(iterator)
    holdfast.save(tmp_path / "saved", {"data": iterator, "w": jnp.float32(3)})
    expected = [next(iterator) for _ in range(4)]
    state = holdfast.load(tmp_path / "saved", like={"data": batches(), "w": jnp.float32(0)})
    assert state["w"] == 3
    for batch in expected:
        np.testing.assert_array_equal(next(state["data"]), batch)


def shard(number: int) -> Any:
    """A Grain iterator over its own numbers, in an order of its own."""
    numbers = np.arange(100 * number, 100 * number + 100)
    return iter(grain.MapDataset.source(numbers).shuffle(seed=number).repeat().to_iter_dataset())


class Shards:
    """The Grain iterators of some shards."""

    def __init__(self, *numbers: int) -> None:
        self.iterators = {number: shard(number) for number in numbers}

    def get_state(self) -> dict[int, Any]:
        return {number: iterator.get_state() for number, iterator in self.iterators.items()}

    def set_state(self, states: dict[int, Any]) -> None:
        for number, state in states.items():
            self.iterators[number].set_state(state)


def test_grain_iterators_of_shards_are_divided_anew_and_go_on_where_they_were(
    tmp_path: Path,
) -> None:
    data = Shards(0, 1, 2, 3)
    for number, iterator in data.iterators.items():
        for _ in range(3 * number):
            next(iterator)
    holdfast.save(tmp_path / "saved", {"data": data, "w": jnp.float32(3)})
    expected = {n: [next(i) for _ in range(5)] for n, i in data.iterators.items()}
    with holdfast.open_run(tmp_path / "saved") as run:
        run.restore(like={"w": jnp.float32(0)}, partial="data")
        (states,) = run.process_values(0)["data"]
    for numbers in ((0, 3), (1, 2)):
        share = Shards(*numbers)
        share.set_state({number: states[number] for number in numbers})
        found = {n: [next(i) for _ in range(5)] for n, i in share.iterators.items()}
        assert found == {number: expected[number] for number in numbers}


class Sampler:
    """An object with `state_dict`, as PyTorch's loaders and samplers have."""

    def __init__(self) -> None:
        self.position = 0
        self.order = np.arange(5)

    def state_dict(self) -> dict[str, Any]:
        return OrderedDict(position=self.position, order=self.order, nested=[(1, None)])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["nested"] == [(1, None)]
        self.position, self.order = state["position"], state["order"]


def test_objects_with_a_state_dict_keep_their_identity(tmp_path: Path) -> None:
    sampler = Sampler()
    sampler.position, sampler.order = 9, np.array([3, 1, 2])
    fresh = Sampler()
    restored = round_trip(
        tmp_path / "run",
        {"s": sampler, "n": np.random.RandomState(3)},
        {"s": fresh, "n": np.random.RandomState(0)},
    )
    assert restored["s"] is fresh
    assert fresh.position == 9
    np.testing.assert_array_equal(fresh.order, [3, 1, 2])
    assert restored["n"].randint(1 << 30) == np.random.RandomState(3).randint(1 << 30)


def mesh(*shape: int) -> Mesh:
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), ("a", "b")[: len(shape)])


SHARDINGS = {
    "rows": lambda: NamedSharding(mesh(8), PartitionSpec("a")),
    "columns": lambda: NamedSharding(mesh(8), PartitionSpec(None, "a")),
    "grid": lambda: NamedSharding(mesh(2, 4), PartitionSpec("a", "b")),
    "partly_replicated": lambda: NamedSharding(mesh(2, 4), PartitionSpec("b")),
    "replicated": lambda: NamedSharding(mesh(4), PartitionSpec()),
    "two_devices": lambda: NamedSharding(mesh(2), PartitionSpec(None, "a")),
    "one_device": lambda: jax.sharding.SingleDeviceSharding(jax.devices()[3]),
}


@pytest.mark.parametrize("saved", SHARDINGS)
def test_sharded_arrays_come_back_in_any_other_sharding(tmp_path: Path, saved: str) -> None:
    values = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 8)
    state = {"w": jax.device_put(values, SHARDINGS[saved]()), "keys": keys}
    holdfast.save(tmp_path / "saved", state)
    with holdfast.open_run(tmp_path / "saved") as run:
        for name, sharding in SHARDINGS.items():
            by_rows = NamedSharding(mesh(4), PartitionSpec("a"))
            like = {
                "w": jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharding()),
                "keys": jax.device_put(jax.random.split(jax.random.key(9), 8), by_rows),
            }
            restored = run.restore(like=like)
            assert restored["w"].sharding == sharding(), name
            np.testing.assert_array_equal(np.asarray(restored["w"]), values)
            assert same(restored["keys"], keys)
            assert restored["keys"].sharding == by_rows
        grid = run.metadata(0).arrays["w"].grid
    parts = {"rows": (8, 1), "columns": (1, 8), "grid": (2, 4), "partly_replicated": (4, 1)}
    assert grid == parts.get(saved, (1, 2) if saved == "two_devices" else (1, 1))


@pytest.mark.parametrize(
    ("leaf", "told"),
    [
        (lambda x: x, "function"),
        (object(), "object"),
        (np.array(["text"]), "<U4"),
        (np.array([object()]), "object"),
        (np.datetime64("2026-01-01"), "datetime64"),
        ({1, 2}, "set"),
        (1 + 2j, "complex"),
        ("\ud800", "surrogate"),
    ],
)
def test_an_unsupported_leaf_is_told_with_path_and_type_before_anything_is_written(
    tmp_path: Path, leaf: Any, told: str
) -> None:
    with pytest.raises(UnsupportedLeafError, match="layers/1/activation") as caught:
        holdfast.save(tmp_path / "saved", {"layers": [{"w": jnp.ones(3)}, {"activation": leaf}]})
    assert told in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["\ud800", 1.5, True, None, (1, 2)])
def test_a_key_that_is_neither_text_nor_int_is_told_before_anything_is_written(
    tmp_path: Path, key: Any
) -> None:
    with pytest.raises(UnsupportedLeafError, match="rename the key"):
        holdfast.save(tmp_path / "saved", {"params": {key: jnp.ones(3)}})
    assert not list(tmp_path.iterdir())


class Refusing(Sampler):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("position")


def test_an_object_that_refuses_its_state_is_named_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(
        StructureMismatchError, match=r"restore s/0: .*Refusing raised KeyError: 'p"
    ):
        round_trip(tmp_path / "run", {"s": [Sampler()]}, {"s": [Refusing()]})


def test_the_key_data_that_numpy_reads_of_typed_keys_is_a_like_for_them(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    holdfast.save(tmp_path / "run", {"keys": keys})
    plain = holdfast.load(tmp_path / "run")
    again = holdfast.load(tmp_path / "run", like={"keys": np.zeros_like(plain["keys"])})
    np.testing.assert_array_equal(again["keys"], jax.random.key_data(keys))
    # Raw key data of JAX is an array like any other: keys would lose their type in silence.
    with pytest.raises(StructureMismatchError, match=r"keys: expected array uint32\[4, 2\]"):
        holdfast.load(tmp_path / "run", like={"keys": jnp.asarray(plain["keys"])})


def test_a_sharding_that_does_not_divide_an_array_is_refused_by_its_path(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"layers": [{"w": jnp.ones((6, 4))}]})
    sharding = NamedSharding(mesh(8), PartitionSpec("a"))
    like = {"layers": [{"w": jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=sharding)}]}
    with pytest.raises(StructureMismatchError, match=r"restore layers/0/w: expected a sharding th"):
        holdfast.load(tmp_path / "run", like=like)


def test_a_prefix_of_partial_that_is_nowhere_is_refused_with_the_nearest_path(
    tmp_path: Path,
) -> None:
    holdfast.save(tmp_path / "run", {"head": {"w": np.ones(2)}, "x": 1})
    like: dict[str, Any] = {"head": {"w": np.ones(2)}, "x": 1}
    with pytest.raises(StructureMismatchError, match=r"at hed \(there is head\) \(partial=...\)"):
        holdfast.load(tmp_path / "run", like=like, partial=["hed", "x"])
    # One that either side has is right, an empty container too.
    like = {"head": {"w": np.ones(2)}, "new": {"y": 3}, "empty": {}}
    found = holdfast.load(tmp_path / "run", like=like, partial=["new/y", "empty", "x"])
    assert found["new"] == {"y": 3}


def test_leaves_that_partial_keeps_are_counted_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    holdfast.save(tmp_path / "run", {"w": np.ones(2)})
    with caplog.at_level("INFO", "holdfast.adapt.like"):
        holdfast.load(tmp_path / "run", like={"w": np.ones(3)}, partial="w")
    assert (
        "kept 1 leaf of the state given, which the checkpoint lacks or has with another shape"
        in (caplog.text)
    )
