"""The JSON files of Orbax's checkpoints are read as each of its versions writes them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax", reason="JAX cannot be had here", exc_type=ImportError)

from holdfast.errors import CheckpointDamagedError
from holdfast.interop.orbax.orbax_directory import (
    OF_ROOT,
    OF_STEP,
    OF_TREE,
    SHARDINGS,
    read_leaves,
    read_root_metadata,
    read_step,
)

V0, V1 = "orbax.checkpoint._src.handlers.", "orbax.checkpoint.experimental.v1._src.handlers."


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("device", "number"),
    [
        ("cpu:3", 3),
        ("TFRT_CPU_0", 0),
        ("cuda:12", 12),
        ("CudaDevice(id=1)", 1),
        ("TPU_5(process=1,(0,0,2,3))", 5),
    ],
)
def test_the_device_of_an_array_is_read_as_each_version_of_jax_prints_it(
    tmp_path: Path, device: str, number: int
) -> None:
    key = [{"key": "w", "key_type": 2}]
    leaf = {"key_metadata": key, "value_metadata": {"value_type": "jax.Array"}}
    write(tmp_path / OF_TREE, {"tree_metadata": {"('w',)": leaf}})
    sharding = {"sharding_type": "SingleDeviceSharding", "device_str": device}
    write(tmp_path / SHARDINGS, {base64.b64encode(b"w").decode(): json.dumps(sharding)})
    (found,), _ = read_leaves(tmp_path)
    assert found.sharding == {"single": number}


@pytest.mark.parametrize("name", ["custom", "custom_metadata"])
def test_custom_metadata_are_read_under_the_names_that_versions_give_them(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path / OF_STEP, {"item_handlers": {}, name: {"lr": 0.5}})
    write(tmp_path / "metadata" / OF_ROOT, {name: {"run": "one"}})
    assert read_step(0, tmp_path).custom_metadata == {"lr": 0.5}
    assert read_root_metadata(tmp_path) == {"run": "one"}


def test_a_checkpointable_whose_folder_was_removed_is_left_out_and_an_item_is_damage(
    tmp_path: Path,
) -> None:
    for interface, handler in (
        ("v1", V1 + "pytree_handler.PyTreeHandler"),
        ("v0", V0 + "pytree_checkpoint_handler.PyTreeCheckpointHandler"),
    ):
        handlers = {"kept": handler, "removed": handler}
        write(tmp_path / interface / OF_STEP, {"item_handlers": handlers})
        write(tmp_path / interface / "kept" / OF_TREE, {"tree_metadata": {}})
    assert [item.name for item in read_step(0, tmp_path / "v1").items] == ["kept"]
    with pytest.raises(CheckpointDamagedError, match="expected the item removed"):
        read_step(0, tmp_path / "v0")
