"""Tensors that are not their object's memory, that overlap, or that have no elements."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the package torch")

import holdfast  # noqa: E402
from holdfast.errors import StructureMismatchError, UnsupportedLeafError  # noqa: E402


class ExtraTensor(torch.nn.Linear):
    """A module whose extra state is a tensor that is made for each call."""

    def __init__(self, value: int) -> None:
        super().__init__(2, 2)
        self.value = value

    def get_extra_state(self) -> Any:
        return torch.tensor([self.value], dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        self.value = int(state[0])


class Cloning(torch.nn.Linear):
    """A module whose state dict has copies."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        own = super().state_dict(*arguments, **options)
        return OrderedDict((name, value.clone()) for name, value in own.items())


class Packing(torch.nn.Linear):
    """A module that packs its weights into one tensor."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        packed = torch.cat([self.weight.reshape(-1), self.bias])
        destination[f"{prefix}packed"] = packed if keep_vars else packed.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_others: Any) -> None:
        packed = state_dict[f"{prefix}packed"]
        with torch.no_grad():
            self.weight.copy_(packed[:4].reshape(2, 2))
            self.bias.copy_(packed[4:])


def restored(tmp_path: Any, saved: Any, like: Any) -> Any:
    holdfast.save(tmp_path / "one", {"x": saved}, overwrite=True)
    return holdfast.load(tmp_path / "one", like={"x": like})["x"]


@pytest.mark.parametrize("kind", [Cloning, Packing])
def test_a_module_whose_state_dict_is_not_its_memory_loads_it(tmp_path: Any, kind: Any) -> None:
    saved, like = kind(2, 2), torch.nn.Sequential(kind(2, 2))
    assert restored(tmp_path, torch.nn.Sequential(saved), like) is like
    assert torch.equal(like[0].weight, saved.weight)
    assert torch.equal(like[0].bias, saved.bias)


def test_extra_state_that_is_a_tensor_is_set(tmp_path: Any) -> None:
    like = ExtraTensor(9)
    restored(tmp_path, ExtraTensor(7), like)
    assert like.value == 7


def test_an_expanded_tensor_takes_equal_elements_and_no_others(tmp_path: Any) -> None:
    like = torch.zeros(3, 1).expand(3, 4)
    with pytest.raises(StructureMismatchError, match=r"x: expected elements that are equal"):
        restored(tmp_path, torch.arange(12.0).reshape(3, 4), like)
    assert not like.any()
    equal = torch.arange(3.0).reshape(3, 1).expand(3, 4)
    restored(tmp_path, equal, like)
    assert torch.equal(like, equal)


def test_tensors_that_overlap_take_elements_that_agree_and_no_others(tmp_path: Any) -> None:
    memory = torch.zeros(6)
    differing = {"a": torch.arange(3.0), "b": torch.arange(3.0) + 1}
    holdfast.save(tmp_path / "two", differing)
    for a, b in ((memory[:3], memory[2:5]), (memory[::2], memory[2:5])):
        with pytest.raises(StructureMismatchError, match=r"a and b: expected elements that"):
            holdfast.load(tmp_path / "two", like={"a": a, "b": b})
    with pytest.raises(StructureMismatchError, match=r"x: expected elements that are equal"):
        restored(tmp_path, torch.arange(4.0).reshape(2, 2), memory[:3].as_strided((2, 2), (1, 1)))
    assert not memory.any()
    # Columns of one matrix lie between each other, and a[1:] is b[:-1].
    for a, b in ((memory[::2], memory[1::2]), (memory[:3], memory[1:4])):
        holdfast.load(tmp_path / "two", like={"a": a, "b": b})
        assert torch.equal(a, differing["a"])
        assert torch.equal(b, differing["b"])


def test_a_buffer_and_views_into_it_are_filled(tmp_path: Any) -> None:
    def state(flat: Any) -> dict[str, Any]:
        weight = flat[:6].view(2, 3)
        return {"flat": flat, "weight": weight, "turned": weight.t(), "bias": flat[6:]}

    saved, like = torch.arange(8.0), torch.zeros(8)
    restored(tmp_path, state(saved), state(like))
    assert torch.equal(like, saved)


def test_a_view_of_one_element_has_any_stride(tmp_path: Any) -> None:
    one = torch.arange(6.0).reshape(3, 2)[1:2, 1]
    like = torch.zeros(3, 2)[:1, 0]
    assert restored(tmp_path, one, like).item() == 3.0
    imaginary = torch.tensor([1 + 2j]).conj().imag
    assert restored(tmp_path, imaginary, torch.zeros(1)).item() == -2.0


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.nn.LazyLinear(3), "lazy module"),
        (lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.ones(2)), "ordinary tensor"),
    ],
    ids=["lazy", "fake"],
)
def test_tensors_without_elements_are_refused_by_path(
    tmp_path: Any, make: Any, problem: str
) -> None:
    with pytest.raises(UnsupportedLeafError, match=rf"save x.*{problem}"):
        holdfast.save(tmp_path / "one", {"x": make()})


def adam(*sizes: int) -> Any:
    made = torch.optim.AdamW([torch.nn.Parameter(torch.ones(size)) for size in sizes])
    for p in made.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    made.step()
    return made


def test_the_state_of_another_optimizer_is_refused(tmp_path: Any) -> None:
    like = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    with pytest.raises(StructureMismatchError, match=r"optimizer with dampening.*partial=\['x'\]"):
        restored(tmp_path, adam(2), like)


def test_an_optimizer_with_other_parameters_is_kept_if_that_is_allowed(tmp_path: Any) -> None:
    holdfast.save(tmp_path / "one", {"w": torch.ones(2), "optimizer": adam(2, 3)})
    like = {"w": torch.zeros(2), "optimizer": adam(2, 3, 4)}
    like["optimizer"].state_dict()["state"][0]["exp_avg"].fill_(5)
    with pytest.raises(StructureMismatchError, match=r"partial=\['optimizer'\]"):
        holdfast.load(tmp_path / "one", like=like)
    holdfast.load(tmp_path / "one", like=like, only="w")
    assert like["w"].all()
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run, ram=holdfast.RamTier(linger_secs=0)) as manager:
        manager.save(1, {"w": torch.ones(2), "optimizer": adam(2, 3)}, force=True)
        like["w"].zero_()
        manager.restore(1, like=like, partial="optimizer")
    assert like["w"].all()
    assert like["optimizer"].state_dict()["state"][0]["exp_avg"].eq(5).all()
