"""Lightning's checkpoints as directories of Holdfast."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)
if importlib.util.find_spec("lightning") is None:
    pytest.skip("Lightning cannot be had here", allow_module_level=True)

import holdfast  # noqa: E402
from holdfast.errors import (  # noqa: E402
    CheckpointDamagedError,
    InvalidArgumentError,
    NotARunError,
)

if TYPE_CHECKING:
    from lightning.pytorch.plugins import CheckpointIO


def checkpoint_io() -> CheckpointIO:
    # Lightning is imported in the process that runs these tests, and not in each that lists them.
    from holdfast.interop.trainers.lightning import HoldfastCheckpointIO

    return HoldfastCheckpointIO()


def _checkpoint() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    return {
        "epoch": 1,
        "global_step": 7,
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "loops": {"fit_loop": {"state_dict": {}, "mean": torch.tensor(0.5)}},
        "hyper_parameters": {"path": Path("somewhere"), "sizes": (3, 2)},
    }


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    io, path, saved = checkpoint_io(), tmp_path / "new" / "step=7.ckpt", _checkpoint()
    io.save_checkpoint(saved, path)
    found = io.load_checkpoint(path, weights_only=False)
    assert found.keys() == saved.keys()
    assert isinstance(found["state_dict"], OrderedDict)
    assert list(found["state_dict"]) == list(saved["state_dict"])
    assert found["state_dict"]._metadata == saved["state_dict"]._metadata
    for name, tensor in saved["state_dict"].items():
        assert torch.equal(found["state_dict"].pop(name), tensor)
    (one,), (other,) = found.pop("optimizer_states"), saved.pop("optimizer_states")
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys() == {0, 1, 2, 3}
    assert torch.equal(one["state"][0]["exp_avg"], other["state"][0]["exp_avg"])
    saved["state_dict"] = {}
    assert found == saved
    assert holdfast.load(path, framework="torch", only="state_dict/0.bias")
    # What is not plain is not loaded where only weights are to be.
    with pytest.raises(Exception, match="weights_only"):
        io.load_checkpoint(path, weights_only=True)
    moved = io.load_checkpoint(path, map_location="meta", weights_only=False)
    assert moved["state_dict"]["0.bias"].device.type == "meta"


def test_a_checkpoint_is_replaced_and_removed_and_nothing_else(tmp_path: Path) -> None:
    io, path = checkpoint_io(), tmp_path / "a.ckpt"
    for step in (1, 2):
        io.save_checkpoint({"global_step": step}, path)
    assert io.load_checkpoint(path) == {"global_step": 2}
    torch.save({"global_step": 0}, tmp_path / "old.ckpt")
    assert io.load_checkpoint(tmp_path / "old.ckpt") == {"global_step": 0}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    with pytest.raises(InvalidArgumentError, match="remove it yourself"):
        io.remove_checkpoint(tmp_path / "mine")
    with pytest.raises(InvalidArgumentError, match="not overwritten"):
        io.save_checkpoint({}, tmp_path / "mine")
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, path, storage_options={})
    for name in ("a.ckpt", "old.ckpt", "gone.ckpt"):
        io.remove_checkpoint(tmp_path / name)
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(path)
    holdfast.save(path, {"w": torch.zeros(1)})
    with pytest.raises(NotARunError, match=r"use holdfast\.load"):
        io.load_checkpoint(path)


def test_a_changed_byte_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    io, path = checkpoint_io(), tmp_path / "a.ckpt"
    io.save_checkpoint(_checkpoint(), path)
    (image,) = path.glob("checkpoints/*/image-*")
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    with pytest.raises(CheckpointDamagedError):
        io.load_checkpoint(path, weights_only=False)
