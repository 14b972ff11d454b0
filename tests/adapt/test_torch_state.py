"""States of PyTorch: what is saved, how it is filled, and what is refused, in one process."""

from __future__ import annotations

import ctypes
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)

import holdfast  # noqa: E402
from holdfast import errors  # noqa: E402
from holdfast.adapt.detect import find_framework  # noqa: E402
from holdfast.format.dtypes import numpy_dtype  # noqa: E402
from tests.hosts import host  # noqa: E402

nn = torch.nn

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:Sparse")

DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
]
BELOW_A_BYTE = ["int1", "int2", "int4", "uint1", "uint2", "uint4"]


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.CheckpointManager]:
    with host() as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_RAM", str(made.folder))
        patch.setenv("HOLDFAST_HOST", made.name)
        run = tmp_path_factory.mktemp("torch") / "run"
        with holdfast.CheckpointManager(run, framework="torch") as opened:
            yield opened


STEPS = itertools.count()


@pytest.fixture
def save(manager: holdfast.CheckpointManager) -> Callable[[Any], Any]:
    """Save a state as the next step; the result restores like a state."""

    def saved(state: Any) -> Callable[..., Any]:
        step = next(STEPS)
        assert manager.save(step, state, force=True)
        return lambda like=None, **options: manager.restore(step, like=like, **options)

    return saved


class Net(nn.Module):
    """Tied weights, buffers, an extra state and a tensor that takes no gradient."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.seen = 0

    def forward(self, x: Any) -> Any:
        return self.norm(self.last(self.first(x)))

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Loader:
    """A loader with a tensor in its state, as torchdata's has."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"at": 0, "generator": torch.zeros(8, dtype=torch.uint8)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def bits(tensor: Any) -> tuple[Any, ...]:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.dtype, tuple(dense.shape), bytes(dense.reshape(-1).view(torch.uint8).numpy())


def random_tensor(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    made = torch.empty(shape, dtype=getattr(torch, dtype))
    drawn = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, made.nbytes)
    if made.numel():
        made.reshape(-1).view(torch.uint8).copy_(torch.tensor(drawn, dtype=torch.uint8))
    return made


def trained(steps: int = 3) -> tuple[Any, Any, Any]:
    torch.manual_seed(steps)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for _ in range(steps):
        step(net, optimizer, scheduler)
    return net, optimizer, scheduler


def step(net: Any, optimizer: Any, scheduler: Any) -> None:
    optimizer.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    net.seen += 1


def everything(net: Any, optimizer: Any, scheduler: Any, epoch: int = 0) -> dict[str, Any]:
    return {
        "model": net,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": Loader(),
        "rng": holdfast.torch.RandomState(),
        "epoch": epoch,
    }


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert bits(one) == bits(other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            assert_same(mine, its)
    else:
        assert one == other


def test_a_training_goes_on_bit_for_bit_in_the_objects_that_were_given(
    save: Callable[[Any], Any],
) -> None:
    first = trained()
    state = everything(*first, epoch=3)
    state["data"].state = {"at": 7, "generator": torch.arange(8, dtype=torch.uint8)}
    restore = save(state)
    expected = [torch.rand(3), np.random.random(), __import__("random").random()]
    other = trained(0)
    memory = [(id(p), p.data_ptr()) for p in other[0].parameters()]
    found = restore(given := everything(*other))
    assert {**found, "epoch": 0} == given
    assert found["epoch"] == 3
    assert [(id(p), p.data_ptr()) for p in other[0].parameters()] == memory
    assert other[0].first.weight is other[0].last.weight
    drawn = [torch.rand(3), np.random.random(), __import__("random").random()]
    assert_same(drawn, expected)
    assert_same(found["data"].state, state["data"].state)
    for _ in range(2):
        for one, of in zip(first, other, strict=True):
            assert_same(one.state_dict(), of.state_dict())
        for objects in (first, other):
            torch.manual_seed(5)
            step(*objects)


def test_an_optimizer_that_has_stepped_keeps_its_tensors_and_can_lose_its_state(
    save: Callable[[Any], Any],
) -> None:
    (_, optimizer, _), (_, before, _) = trained(3), trained(0)
    stepped, fresh = save({"optimizer": optimizer}), save({"optimizer": before})
    step(*(objects := trained(1)))
    moments = objects[1].state[objects[0].first.weight]["exp_avg"]
    stepped({"optimizer": objects[1]})
    assert objects[1].state[objects[0].first.weight]["exp_avg"] is moments
    assert_same(objects[1].state_dict(), optimizer.state_dict())
    fresh({"optimizer": objects[1]})
    assert objects[1].state_dict()["state"] == {}


def test_every_dtype_keeps_its_bits(
    save: Callable[[Any], Any], manager: holdfast.CheckpointManager
) -> None:
    shapes: list[tuple[int, ...]] = [(), (3, 5), (0, 2), (1,)]
    made, into = (
        {
            f"{dtype}.{number}": random_tensor(shape, dtype, seed + number)
            for dtype in DTYPES
            for number, shape in enumerate(shapes)
        }
        for seed in (0, 100)
    )
    restore = save(made)
    found = restore(into)
    assert all(found[name] is into[name] for name in made)
    assert_same(found, made)
    assert_same(restore(), made)
    manager.wait_until_finished()
    with holdfast.open_run(manager._parts.run.location.text) as run:
        arrays = run.restore()
    for name, tensor in made.items():
        assert arrays[name].dtype == numpy_dtype(name.partition(".")[0])
        assert arrays[name].tobytes() == bits(tensor)[2]


@pytest.mark.usefixtures("manager")
@pytest.mark.parametrize("has_ram", [True, False])
def test_integers_below_a_byte_keep_their_bytes_in_any_layout(
    has_ram: bool, tmp_path: Path
) -> None:
    def drawn(seed: int) -> dict[str, Any]:
        made = np.random.default_rng(seed).integers(0, 2, (6, 4), np.uint8)
        every = torch.tensor(made)
        return {
            f"{name}.{layout}": of.view(getattr(torch, name))
            for name in BELOW_A_BYTE
            for layout, of in (("rows", every.clone()), ("columns", every.clone().t()))
        }

    state, into = drawn(1), drawn(2)
    ram = holdfast.RamTier() if has_ram else None
    with holdfast.CheckpointManager(tmp_path / "run", ram=ram) as saving:
        for number in range(2):
            assert saving.save(number, state, force=True)
        saving.wait_until_finished()
        saving.restore(1, like=into)
    for name, tensor in state.items():
        assert torch.equal(into[name].view(torch.uint8), tensor.view(torch.uint8)), name


def odd_tensors() -> dict[str, Any]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "transposed": base.clone().T,
        "strided": base.clone()[:, ::2],
        "reversed of 3 axes": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        "expanded": torch.arange(4.0).reshape(4, 1).expand(4, 3),
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "view": torch.arange(100.0)[40:44],
        "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "coo": torch.sparse_coo_tensor([[0, 1, 1], [1, 0, 0]], [3.0, 4.0, 5.0], (2, 3)),
        "csr": torch.tensor([[0.0, 2.0], [3.0, 4.0]]).to_sparse_csr(),
        "gradient": torch.ones(3, requires_grad=True) * 2,
        "list": [torch.zeros(2), (torch.ones(2), {5: torch.ones(1), 7: None})],
        "numpy": np.arange(3.0),
    }


def test_tensors_of_every_layout_are_saved_and_filled(save: Callable[[Any], Any]) -> None:
    made = odd_tensors()
    restore = save(made)
    into = odd_tensors()
    for name, tensor in into.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
            into[name] = torch.zeros(tensor.shape).to_sparse(layout=tensor.layout)
        elif isinstance(tensor, torch.Tensor):
            with torch.no_grad():
                (tensor[:, :1] if name == "expanded" else tensor).zero_()
    found = restore(into)
    for name in ("coo", "csr"):
        assert found[name] is into[name]
        assert found[name].layout == made[name].layout
        assert_same(found.pop(name).to_dense(), made.pop(name).to_dense())
    assert np.array_equal(found.pop("numpy"), made.pop("numpy"))
    assert_same(found, made)
    assert all(found[name] is into[name] for name in ("transposed", "expanded", "negated"))


def test_tied_tensors_are_written_once(
    save: Callable[[Any], Any], manager: holdfast.CheckpointManager
) -> None:
    shared = torch.rand(1 << 20)
    restore = save(
        {"a": shared, "b": {"tied": shared}, "c": shared[1:], "d": shared.view(1024, -1)}
    )
    found = restore()
    assert found["a"] is found["b"]["tied"]
    assert bits(found["c"]) == bits(shared[1:])
    metadata = manager.metadata(max(manager.all_steps()))
    assert metadata.arrays["b/tied"].alias_of == "a"
    assert 3 * shared.nbytes - 4 <= metadata.size_bytes < 3.1 * shared.nbytes
    into = {"a": torch.zeros(1 << 20), "b": {"tied": torch.zeros(1 << 20)}}
    restore(into, only=["a", "b"])
    assert_same(into["a"], into["b"]["tied"])
    assert_same(into["a"], shared)


def overwrite_by_address(tensor: Any) -> None:
    ctypes.memset(tensor.data_ptr(), 0x55, tensor.nbytes)


MUTATIONS: dict[str, Callable[[Any, Any], None]] = {
    "step": lambda net, optimizer: (
        [p.grad is not None and p.grad.fill_(1.0) for p in net.parameters()] and optimizer.step()
    ),
    "data": lambda net, optimizer: [p.data.add_(1) for p in net.parameters()] and None,
    "in place": lambda net, optimizer: [b.zero_() for b in net.buffers()] and None,
    "load_state_dict": lambda net, optimizer: net.load_state_dict(Net(512).state_dict()) and None,
    "address": lambda net, optimizer: [overwrite_by_address(p) for p in net.parameters()] and None,
    "moments": lambda net, optimizer: (
        [overwrite_by_address(t) for s in optimizer.state.values() for t in s.values()] and None
    ),
}


@pytest.mark.parametrize("act", MUTATIONS)
def test_what_changes_right_after_save_is_not_in_the_checkpoint(
    save: Callable[[Any], Any], act: str
) -> None:
    net = Net(512)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    net(torch.randn(8, 512)).square().mean().backward()
    optimizer.step()
    # Once before a slot is ready, and once into one.
    for _ in range(2):
        before = {
            "model": {n: t.clone() for n, t in net.state_dict().items() if n[0] != "_"},
            "state": {
                i: {n: t.clone() for n, t in of.items()}
                for i, of in optimizer.state_dict()["state"].items()
            },
        }
        restore = save({"model": net, "optimizer": optimizer})
        MUTATIONS[act](net, optimizer)
        found = restore()
        for name, tensor in before["model"].items():
            assert bits(found["model"][name]) == bits(tensor)
        for index, moments in before["state"].items():
            for name, tensor in moments.items():
                assert bits(found["optimizer"]["state"][index][name]) == bits(tensor)


def test_a_module_on_the_meta_device_gets_elements(save: Callable[[Any], Any]) -> None:
    net = trained()[0]
    restore = save({"model": net})
    with torch.device("meta"):
        empty = Net()
    restore({"model": empty})
    assert_same(empty.state_dict(), net.state_dict())
    assert empty.first.weight is empty.last.weight
    assert not empty.frozen.requires_grad
    assert empty.first.weight.requires_grad


def test_a_wrapped_module_has_the_names_of_the_module(save: Callable[[Any], Any]) -> None:
    net, plain = trained()[0], Net()
    restore = save({"model": torch.compile(net, backend="eager")})
    restore({"model": plain})
    assert_same(plain.state_dict(), net.state_dict())
    partly = Net()
    partly.norm = torch.compile(partly.norm, backend="eager")
    restore({"model": partly})
    assert_same(partly.norm._orig_mod.state_dict(), net.norm.state_dict())


def test_nothing_is_touched_unless_everything_fits(save: Callable[[Any], Any]) -> None:
    restore = save({"a": torch.ones(3), "model": Net(), "z": torch.ones(3)})
    into = {"a": torch.zeros(3), "model": Net(5), "z": torch.zeros(4, dtype=torch.int32)}
    with pytest.raises(errors.StructureMismatchError) as caught:
        restore(into)
    for expected in (
        "model/first.weight: expected array float32[5, 5], found array float32[4, 4]",
        "z: expected array int32[4], found array float32[3]",
    ):
        assert expected in str(caught.value)
    assert_same(into["a"], torch.zeros(3))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], momentum=0.9)
    restore = save({"a": torch.ones(3), "optimizer": trained()[1]})
    with pytest.raises(errors.StructureMismatchError, match=r"optimizer/param_groups: .*\[1\]"):
        restore({"a": into["a"], "optimizer": optimizer})
    assert_same(into["a"], torch.zeros(3))


def test_the_nearest_names_are_suggested(save: Callable[[Any], Any]) -> None:
    restore = save({"model": Net(), "other": torch.ones(1)})
    renamed = nn.Module()
    renamed.frist, renamed.norm = Net().first, Net().norm
    with pytest.raises(errors.StructureMismatchError) as caught:
        restore({"model": renamed, "unlike": torch.ones(1)})
    for expected in (
        "model/frist.bias: expected array float32[4], found nothing (the checkpoint has "
        "model/first.bias)",
        "model/frozen: expected nothing, found array float32[2]\n",
        "unlike: expected array float32[1], found nothing\n",
    ):
        assert expected in str(caught.value)


def test_different_arrays_are_not_restored_into_tied_tensors(save: Callable[[Any], Any]) -> None:
    tied = Net()
    untied = Net()
    untied.last = nn.Linear(4, 4)
    with torch.no_grad():
        untied.last.weight.fill_(2)
    before = bits(tied.norm.weight), bits(tied.first.weight)
    restore = save({"model": untied})
    with pytest.raises(errors.StructureMismatchError, match=r"first.weight and model/last.weight"):
        restore({"model": tied})
    assert (bits(tied.norm.weight), bits(tied.first.weight)) == before
    with torch.no_grad():
        untied.last.weight.copy_(untied.first.weight)
    save({"model": untied})({"model": tied})
    assert_same(tied.last.weight, untied.first.weight)


def test_only_partial_and_cast_choose_what_is_filled(save: Callable[[Any], Any]) -> None:
    first, other = trained(), trained(1)
    restore = save({"model": first[0], "optimizer": first[1], "x": torch.arange(3.0)})
    kept = {n: t.clone() for n, t in other[0].state_dict().items() if n[0] != "_"}
    restore(
        {"model": other[0], "optimizer": other[1], "x": torch.zeros(3)},
        only=["optimizer/state"],
    )
    assert_same({n: t for n, t in other[0].state_dict().items() if n[0] != "_"}, kept)
    assert_same(other[1].state_dict()["state"], first[1].state_dict()["state"])
    assert other[1].param_groups[0]["lr"] != first[1].param_groups[0]["lr"]
    found = restore(
        {"new": {"y": torch.ones(2)}, "x": torch.zeros(3, dtype=torch.bfloat16)},
        partial=["new", "model", "optimizer"],
        cast=True,
    )
    assert_same(found["x"], torch.arange(3.0).bfloat16())
    assert_same(found["new"]["y"], torch.ones(2))


def unusable() -> dict[str, tuple[Any, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(1)])
    return {
        "quantized": (quantized, "quantized tensors"),
        "meta": (torch.ones(2, device="meta"), "meta device"),
        "nested": (nested, "nested tensors"),
        "bits": (torch.empty(2, dtype=torch.bits8), "bits8 cannot be stored"),
        "module on meta": (nn.Linear(2, 2, device="meta"), "meta device"),
        "set": ({1, 2}, "found builtins.set"),
        "dtype": (torch.float32, "found torch.dtype"),
    }


@pytest.mark.parametrize("kind", [*unusable()])
def test_what_cannot_be_saved_is_named_by_its_path(save: Callable[[Any], Any], kind: str) -> None:
    leaf, message = unusable()[kind]
    with pytest.raises(errors.UnsupportedLeafError, match=rf"save bad/0.*{message}"):
        save({"good": torch.ones(1), "bad": [leaf]})


class Refusing(nn.Linear):
    """A module whose extra state cannot be set."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        raise KeyError("version 2")


class RefusingLoader(Loader):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("position")


@pytest.mark.parametrize(
    ("leaf", "path", "cause"),
    [
        (Refusing(2, 2), "models/0", "test_torch_state.Refusing raised KeyError: 'version 2'"),
        (RefusingLoader(), "models/0", "test_torch_state.RefusingLoader raised KeyError: 'posit"),
    ],
    ids=["module", "loader"],
)
def test_an_object_that_refuses_its_state_is_named_by_its_path(
    save: Callable[[Any], Any], leaf: Any, path: str, cause: str
) -> None:
    restore = save({"models": [leaf], "x": torch.ones(1)})
    with pytest.raises(errors.StructureMismatchError, match=f"restore {path}: .*{cause}") as caught:
        restore({"models": [leaf], "x": torch.ones(1)})
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_loader_without_a_state_is_refused_and_one_with_a_state_is_named(
    save: Callable[[Any], Any],
) -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3])
    with pytest.raises(errors.UnsupportedLeafError, match=r"save data/0: .*StatefulDataLoader"):
        save({"data": [loader]})


def test_large_states_of_ones_own_are_refused_unless_they_are_replicated(
    save: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.adapt.torch.objects.TENSORS_OF_VALUE_MAX_BYTES", 100)
    average = Loader()
    average.state = {"shadow": [torch.rand(100)], "decay": 0.99}
    with pytest.raises(errors.UnsupportedLeafError, match=r"save ema: .*holdfast.torch.Replicated"):
        save({"ema": average})
    restore = save({"ema": holdfast.torch.Replicated(average)})
    other = Loader()
    restore({"ema": holdfast.torch.Replicated(other)})
    assert_same(other.state, average.state)


def test_a_state_of_two_frameworks_is_refused_by_path(save: Callable[[Any], Any]) -> None:
    import jax.numpy as jnp

    with pytest.raises(errors.UnsupportedLeafError, match=r"save b/0: .*of JAX"):
        save({"a": torch.ones(1), "b": [jnp.ones(1)]})


def test_where_both_are_imported_the_first_state_decides() -> None:
    import jax.numpy as jnp

    of_torch, of_jax = find_framework(), find_framework()
    (outline,) = of_torch.outline({"a": [nn.Linear(2, 2)]}).arrays[:1]
    assert outline.path == ("a", 0, "bias")
    assert of_jax.outline({"a": [jnp.ones(2)]}).arrays[0].placement.shape == (2,)
    for framework, state in ((of_torch, [jnp.ones(2)]), (of_jax, [torch.ones(2)])):
        with pytest.raises(errors.UnsupportedLeafError, match="save 0: "):
            framework.outline(state)
    inner: list[Any] = []
    inner.append(inner)
    with pytest.raises(errors.UnsupportedLeafError, match=r"0/0/.*contains itself"):
        find_framework().outline(inner)


def test_processes_that_did_not_start_their_group_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(errors.InvalidArgumentError, match="init_process_group"):
        find_framework("torch").processes()
    # Where JAX is imported too, PyTorch is asked once a state shows that it is used.
    either = find_framework()
    either.outline([torch.ones(1)])
    either = find_framework()
    assert either.processes().count == 1
    with pytest.raises(errors.InvalidArgumentError, match="init_process_group"):
        either.outline([torch.ones(1)])
