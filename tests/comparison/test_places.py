"""Runs, steps, safetensors and files of PyTorch as contents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.comparison.differences import Comparison, compare
from holdfast.comparison.places import opened, split_step
from holdfast.errors import CheckpointDamagedError, InvalidArgumentError, StepNotFoundError
from holdfast.interop.safetensors_export import export_safetensors
from tests.comparison.saving import Loader, saved_by


def state(rank: int = 0) -> dict[str, Any]:
    return {
        "params": {"w": np.arange(64.0, dtype=np.float32).reshape(8, 8), "b.x": np.zeros(3)},
        "step": 3,
        "data": Loader(100 + rank),
    }


def diff(a: object, b: object, prefix: str = "") -> Comparison:
    with opened(str(a), prefix) as left, opened(str(b), prefix) as right:
        return compare(left, right)


def test_a_step_is_after_the_last_at_sign(tmp_path: Path) -> None:
    assert split_step("runs/a@120") == ("runs/a", 120)
    assert split_step("runs/a") == ("runs/a", None)
    assert split_step("s3://user@bucket/a") == ("s3://user@bucket/a", None)
    named = tmp_path / "a@12"
    named.mkdir()
    assert split_step(str(named)) == (str(named), None)
    assert split_step(f"{named}@3") == (str(named), 3)


def test_equal_runs_are_compared_without_reading_their_arrays(tmp_path: Path) -> None:
    a = saved_by(1, tmp_path / "a", state)
    comparison = diff(a, saved_by(1, tmp_path / "b", state))
    assert comparison.is_equal
    assert (comparison.array_count, comparison.read_bytes) == (2, 0)
    assert comparison.value_count == 1 + 1 + 9
    assert comparison.a == f"{a}@10"


def test_other_numbers_of_processes_are_equal_and_their_own_states_are_named(
    tmp_path: Path,
) -> None:
    a = saved_by(3, tmp_path / "a", state)
    comparison = diff(a, saved_by(2, tmp_path / "b", state))
    assert comparison.is_equal
    assert len(comparison.left_out) == 1
    assert "data" in comparison.left_out[0]
    changed = diff(a, saved_by(3, tmp_path / "c", lambda rank: state(2 * rank)))
    assert [(d.name, d.rank) for d in changed.differences] == [
        ("data/position", 1),
        ("data/seeds", 1),
        ("data/position", 2),
        ("data/seeds", 2),
    ]


def test_other_shardings_of_equal_arrays_are_equal(tmp_path: Path) -> None:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((4, 2), ("x", "y"))
    array = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    for name, spec in {"whole": (), "rows": ("x",), "columns": (None, ("x", "y"))}.items():
        sharded = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
        holdfast.save(tmp_path / name, {"w": sharded})
    assert diff(tmp_path / "rows", tmp_path / "whole").is_equal
    comparison = diff(tmp_path / "rows", tmp_path / "columns")
    assert comparison.is_equal
    assert comparison.read_bytes == array.nbytes
    array[7, 7] += 1
    holdfast.save(tmp_path / "other", {"w": jax.numpy.asarray(array)})
    (difference,) = diff(tmp_path / "other", tmp_path / "rows").differences
    assert (difference.count, difference.largest) == (1, 1.0)


def test_weak_types_and_keys_are_types(tmp_path: Path) -> None:
    import jax

    for name, scalar in {"weak": jax.numpy.asarray(1.0), "strong": jax.numpy.ones(())}.items():
        holdfast.save(tmp_path / name, {"lr": scalar, "key": jax.random.key(3)})
    (difference,) = diff(tmp_path / "weak", tmp_path / "strong").differences
    assert difference.text == "lr: float32 (), weak type | float32 ()"
    holdfast.save(tmp_path / "key", {"lr": jax.numpy.ones(()), "key": jax.random.key(4)})
    (difference,) = diff(tmp_path / "key", tmp_path / "strong").differences
    assert (difference.name, difference.largest) == ("key", None)


def test_an_exported_file_of_safetensors_equals_its_run(tmp_path: Path) -> None:
    run = saved_by(1, tmp_path / "run", state)
    (file,) = export_safetensors(run, 10, tmp_path / "hf", prefix="params")
    comparison = diff(run, file, "params")
    assert comparison.is_equal
    assert comparison.array_count == 2
    assert diff(tmp_path / "hf", run, "params").is_equal
    whole = export_safetensors(run, 10, tmp_path / "all", dtype="bfloat16")[0]
    comparison = diff(run, whole)
    assert [d.text for d in comparison.differences] == [
        "params.b.x: float64 (3,) | bfloat16 (3,)",
        "params.w: float32 (8, 8) | bfloat16 (8, 8)",
    ]
    assert comparison.left_out == (f"11 values of {run}@10: the other side has arrays alone",)
    header_bytes = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + header_bytes])
    data = bytearray(file.read_bytes())
    data[8 + header_bytes + header["w"]["data_offsets"][0] + 3] ^= 1
    file.write_bytes(data)
    (difference,) = diff(run, file, "params").differences
    assert (difference.name, difference.count) == ("w", 1)


def test_tied_tensors_are_equal_to_a_file_that_has_them_once(tmp_path: Path) -> None:
    import torch

    weight = torch.ones(3, 2)
    holdfast.save(tmp_path / "run", {"embed": weight, "head": weight})
    (file,) = export_safetensors(tmp_path / "run", 0, tmp_path / "hf")
    assert diff(tmp_path / "run", file).is_equal


def test_an_exported_file_of_pytorch_equals_its_run(tmp_path: Path) -> None:
    import torch

    from holdfast.interop.torch_files import export_torch

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "rng": holdfast.torch.RandomState(), "step": 4}
    holdfast.save(tmp_path / "run", state)
    export_torch(tmp_path / "run", 0, tmp_path / "file.pt")
    comparison = diff(tmp_path / "run", tmp_path / "file.pt")
    assert comparison.is_equal, comparison.differences
    content = torch.load(tmp_path / "file.pt", weights_only=False)
    content["optimizer"]["param_groups"][0]["lr"] = 0.5
    content["model"]["weight"] += 1
    torch.save(content, tmp_path / "other.pt")
    found = [(d.name, d.kind) for d in diff(tmp_path / "run", tmp_path / "other.pt").differences]
    assert found == [("model/weight", "elements"), ("optimizer/param_groups/0/lr", "value")]


def test_bad_places_are_named(tmp_path: Path) -> None:
    run = saved_by(1, tmp_path / "run", state)
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    (tmp_path / "folder").mkdir()
    for place, kind, text in [
        (tmp_path / "nothing", InvalidArgumentError, "found nothing there"),
        (f"{run}@7", StepNotFoundError, "step 7"),
        (tmp_path / "cut.safetensors", CheckpointDamagedError, "expected safetensors"),
        (f"{tmp_path / 'cut.safetensors'}@3", InvalidArgumentError, "expected a run"),
        (tmp_path / "folder", InvalidArgumentError, "something else"),
    ]:
        with pytest.raises(kind, match=text):
            diff(run, place)
