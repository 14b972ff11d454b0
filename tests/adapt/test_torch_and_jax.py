"""One format for both: what PyTorch saves JAX reads, and the other way round, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import holdfast  # noqa: E402
from holdfast import errors  # noqa: E402
from holdfast.adapt.torch.tensors import host_bytes, tensor_of  # noqa: E402
from holdfast.format.dtypes import numpy_dtype  # noqa: E402

# Both have these, JAX some of them with jax_enable_x64 alone.
SHARED = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
WIDE = {"int64", "uint64", "float64", "complex128"}
OF_JAX_ALONE = ["float8_e3m4", "float8_e4m3b11fnuz", "float4_e2m1fn"]
OF_TORCH_ALONE = ["complex32", "float4_e2m1fn_x2"]
SHAPES: list[tuple[int, ...]] = [(), (3, 5), (0, 2), (1,)]


def random_array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    dtype = numpy_dtype(name)
    assert dtype is not None
    count = int(np.prod(shape)) * dtype.itemsize
    drawn = np.random.default_rng(count).integers(0, 2 if name == "bool" else 256, count)
    return drawn.astype(np.uint8).view(dtype).reshape(shape)


def bytes_of(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    if isinstance(array, torch.Tensor):
        return str(array.dtype)[6:], tuple(array.shape), bytes(host_bytes(array))
    return str(array.dtype), array.shape, np.asarray(array).tobytes()


@pytest.fixture
def x64() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("writer", ["torch", "jax"])
def test_every_dtype_and_shape_is_read_by_the_other_framework(
    writer: str, tmp_path: Path, x64: None
) -> None:
    arrays = {f"{n}.{i}": random_array(n, s) for n in SHARED for i, s in enumerate(SHAPES)}
    if writer == "torch":
        state = {k: tensor_of(a, k.partition(".")[0], k) for k, a in arrays.items()}
    else:
        state = {k: jnp.asarray(a) for k, a in arrays.items()}
    holdfast.save(tmp_path / "saved", {"epoch": 3, "nested": {5: [state]}})
    expected = {k: (k.partition(".")[0], a.shape, a.tobytes()) for k, a in arrays.items()}
    kinds = {"torch": torch.Tensor, "jax": jax.Array, "numpy": np.ndarray}
    with holdfast.open_run(tmp_path / "saved") as run:
        for framework, kind in kinds.items():
            found = run.restore(framework=framework)
            assert found["epoch"] == 3
            (leaves,) = found["nested"][5]
            assert all(isinstance(leaf, kind) for leaf in leaves.values())
            assert {k: bytes_of(leaf) for k, leaf in leaves.items()} == expected


@pytest.mark.parametrize("writer", ["torch", "jax"])
def test_given_arrays_of_the_other_framework_are_filled(
    writer: str, tmp_path: Path, x64: None
) -> None:
    arrays = {n: random_array(n, (3, 5)) for n in SHARED}
    of_torch = {n: tensor_of(a, n, n) for n, a in arrays.items()}
    of_jax = {n: jnp.asarray(a) for n, a in arrays.items()}
    holdfast.save(tmp_path / "saved", of_torch if writer == "torch" else of_jax)
    if writer == "torch":
        like: Any = {n: jnp.zeros_like(a) for n, a in of_jax.items()}
        found = holdfast.load(tmp_path / "saved", like=like, framework="jax")
    else:
        like = {n: torch.empty_like(a) for n, a in of_torch.items()}
        found = holdfast.load(tmp_path / "saved", like=like, framework="torch")
        assert all(found[name] is like[name] for name in like)
    assert {n: bytes_of(a) for n, a in found.items()} == {n: bytes_of(a) for n, a in arrays.items()}


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_what_a_framework_lacks_is_an_error_by_path(tmp_path: Path) -> None:
    of_jax = {"x": {n: jnp.asarray(random_array(n, (2, 2))) for n in OF_JAX_ALONE}}
    of_torch = {"x": {n: torch.zeros(2, 2, dtype=getattr(torch, n)) for n in OF_TORCH_ALONE}}
    of_torch["x"]["float64"] = torch.zeros(1, dtype=torch.float64)
    for state, other, names in (
        (of_jax, "torch", OF_JAX_ALONE),
        (of_torch, "jax", [*OF_TORCH_ALONE, "float64"]),
    ):
        holdfast.save(tmp_path / "saved", state, overwrite=True)
        for name in names:
            with pytest.raises(errors.UnsupportedLeafError, match=f"restore x/{name}: .*{name}"):
                holdfast.load(tmp_path / "saved", only=f"x/{name}", framework=other)
    with pytest.raises(errors.InvalidArgumentError, match="framework='tensorflow'"):
        holdfast.load(tmp_path / "saved", framework="tensorflow")


WIDTH, HEADS, TOKENS = 16, 2, 11


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        split = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(*split, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Transformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(TOKENS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def jax_forward(params: dict[str, Any], tokens: Any) -> Any:
    x = params["embed"][tokens]
    for block in params["blocks"]:
        mean, spread = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        normed = (x - mean) / jnp.sqrt(spread + 1e-5) * block["scale"] + block["bias"]
        split = (normed @ block["qkv"].T).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = jnp.moveaxis(split, 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + mixed @ block["out"].T
    return x @ params["embed"].T


NAMES = {"norm.weight": "scale", "norm.bias": "bias", "qkv.weight": "qkv", "out.weight": "out"}


def jax_params(weights: dict[str, Any]) -> dict[str, Any]:
    """Name the weights of the PyTorch model as the JAX function has them."""
    blocks = [{ours: weights[f"blocks.{i}.{n}"] for n, ours in NAMES.items()} for i in range(2)]
    return {"embed": weights["embed.weight"], "blocks": blocks}


def torch_weights(params: dict[str, Any]) -> dict[str, Any]:
    """Name the params of the JAX function as the PyTorch model has them."""
    found = {"embed.weight": params["embed"], "head.weight": params["embed"]}
    for i, block in enumerate(params["blocks"]):
        found |= {f"blocks.{i}.{n}": block[ours] for n, ours in NAMES.items()}
    return found


def test_a_small_transformer_moves_between_them_with_a_name_map(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Transformer()
    tokens = np.arange(10).reshape(2, 5)
    expected = model(torch.tensor(tokens)).detach().numpy()
    holdfast.save(tmp_path / "of torch", {"model": model})
    params = jax_params(holdfast.load(tmp_path / "of torch", framework="jax")["model"])
    np.testing.assert_allclose(jax_forward(params, tokens), expected, rtol=1e-4, atol=1e-5)
    holdfast.save(tmp_path / "of jax", {"params": params})
    back = Transformer()
    found = holdfast.load(tmp_path / "of jax", framework="torch")
    back.load_state_dict(torch_weights(found["params"]))
    for name, weight in model.state_dict().items():
        assert bytes_of(back.state_dict()[name]) == bytes_of(weight)
    assert back.head.weight is back.embed.weight
    assert torch.equal(back(torch.tensor(tokens)), model(torch.tensor(tokens)))
