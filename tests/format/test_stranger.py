"""A reader that was written from docs/format.md alone reads what Holdfast writes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.commit import read_part
from holdfast.engine.lifecycle.references import remove_durable
from holdfast.engine.lifecycle.run import create_run
from holdfast.format.names import AttemptId, CheckpointId, manifest_key
from holdfast.format.records import Alias
from holdfast.format.values import TensorValue, encode_value
from holdfast.policy.save_decision_policy import FixedIntervalPolicy
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import (
    DTYPES,
    ML_DTYPES,
    RUN_ID,
    TIME,
    Made,
    begin,
    checkpoints,
    disk,
    flip_bit,
    memory_folder,
    random_array,
)
from tests.engine.reusing import Chain
from tests.format import stranger
from tests.format.example import write_example
from tests.format.stranger import BadRunError, read_newest, timeline
from tests.hosts import host, wait_until


def _write_run(root: Path, *made: Made, origins: tuple = (None,)) -> None:
    store = disk(root)
    create_run(store, "run", RUN_ID, TIME)
    begin(store, *origins)
    for checkpoint in made:
        checkpoint.save(store)


def _as_bits(array: np.ndarray) -> np.ndarray:
    """An array as the stranger gives it: bits for what NumPy alone has no dtype for."""
    is_of_numpy = array.dtype.name not in ML_DTYPES and array.dtype.fields is None
    return array if is_of_numpy else array.view(f"u{array.itemsize}")


def _assert_read(made: Made, root: Path) -> stranger.Checkpoint:
    found = read_newest(root)
    assert CheckpointId(found.step, AttemptId(*found.attempt)) == made.id
    assert {*found.arrays} == {spec.name for spec in made.specs}
    for spec, array in zip(made.specs, made.arrays.values(), strict=True):
        expected, read = _as_bits(array), found.arrays[spec.name]
        assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
        assert read.tobytes() == expected.tobytes()
    return found


def test_the_stranger_knows_nothing_of_holdfast_and_is_short() -> None:
    text = Path(stranger.__file__).read_text()
    assert len(text.splitlines()) < 175
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    assert imported - {"__future__"} == {
        *("base64", "collections", "json", "re", "pathlib", "typing"),
        *("numpy", "xxhash"),
    }


def test_a_stranger_reads_every_dtype_and_value_of_several_ranks(tmp_path: Path) -> None:
    made = Made(part_count=3)
    for number, dtype in enumerate(DTYPES):
        array = random_array((5, 7), dtype, number)
        owners = ((number % 3, 2), ((number + 1) % 3, 1), (2, 1))
        made.add(("params", number, dtype), array, (3, 4), owners)
    made.add(("none",), random_array((0, 3), "float32", 1), (0, 2), ((1, 1),))
    made.add(("one",), random_array((), "bfloat16", 1), (), ((2, 1),))
    made.add(("50%/[x]\n", "__metadata__"), random_array((9,), "int8", 1))
    kept = {"a": (1, [2.5, None]), 2: b"\x00", "big": -(10**30), "nan": [float("inf"), -0.0]}
    made.values = {("seen",): encode_value(kept, "seen"), (): 5}
    _write_run(tmp_path, made)
    found = _assert_read(made, tmp_path)
    assert found.values == {("seen",): kept, (): 5}
    assert str(found.values[("seen",)]["nan"]) == "[inf, -0.0]"


def test_a_stranger_reads_listed_extents_aliases_and_tensors_in_values(tmp_path: Path) -> None:
    made = Made(part_count=2)
    rows = (3, 2, 3, 2)
    made.add(("w",), random_array((10, 4), "complex32", 1), (rows, 4), ((0, 1), (1, 2), (0, 1)))
    made.aliases = (Alias(path=("tied", "w"), alias_of=0),)
    state = np.arange(3, dtype=np.uint8).view(TensorValue)
    made.values = {("seen",): encode_value({"rng": state}, "seen")}
    _write_run(tmp_path, made)
    found = read_newest(tmp_path)
    for name in ("w", "tied/w"):
        assert found.arrays[name].tobytes() == made.arrays[("w",)].tobytes()
    assert found.values[("seen",)]["rng"].tolist() == [0, 1, 2]


@settings(max_examples=50)
@given(checkpoints())
def test_a_stranger_reads_any_grid_and_any_owners(made: Made) -> None:
    with memory_folder() as folder:
        _write_run(Path(folder), made)
        _assert_read(made, Path(folder))


def test_a_stranger_reads_chunks_of_several_blocks(tmp_path: Path) -> None:
    made = Made(part_count=2)
    made.add(("big",), random_array((3, 1_500_001), "float32", 1), (2, 1_500_001), ((0, 1), (1, 1)))
    _write_run(tmp_path, made)
    _assert_read(made, tmp_path)


@settings(max_examples=50)
@given(checkpoints(), st.data())
def test_a_stranger_reads_what_keeps_images_of_earlier_checkpoints(
    made: Made, data: st.DataObject
) -> None:
    paths = [spec.path for spec in made.specs]
    with memory_folder() as folder:
        _write_run(Path(folder), made)
        chain = Chain(
            [made],
            [
                [
                    read_part(disk(Path(folder)), made.id, r, made.part_count)
                    for r in range(made.part_count)
                ]
            ],
        )
        for step in range(made.id.step + 1, made.id.step + 5):
            changed = data.draw(st.sets(st.sampled_from(paths)) if paths else st.just(set()))
            chain.go_on(disk(Path(folder)), changed, step)
            chain.commit(disk(Path(folder)), chain.made[-1])
            _assert_read(chain.made[-1], Path(folder))
            if data.draw(st.booleans()):
                store, last = disk(Path(folder)), chain.made[-2].id
                remove_durable(store, list_checkpoints(store), [last])
                assert not (Path(folder) / manifest_key(last)).exists()


def _read_as(*checkpoints: tuple[int, int]) -> list:
    """Return (step, attempt number) pairs as the stranger reads them."""
    return [(step, msgspec.structs.astuple(attempt_id(n))) for step, n in checkpoints]


def test_a_stranger_follows_the_timeline(tmp_path: Path) -> None:
    made = {}
    for step, attempt in [(10, 1), (20, 1), (30, 1), (20, 2), (30, 3)]:
        one = made[step, attempt] = Made(id=checkpoint_id(step, attempt))
        one.add(("w",), random_array((4,), "float32", step * 10 + attempt))
    _write_run(tmp_path, *made.values(), origins=(None, (10, 1), (20, 1)))
    assert timeline(tmp_path) == _read_as((10, 1), (20, 1), (30, 3))
    _assert_read(made[30, 3], tmp_path)
    (tmp_path / "attempts" / "000000003.json").unlink()
    assert timeline(tmp_path) == _read_as((10, 1), (20, 2))
    _assert_read(made[20, 2], tmp_path)


def test_a_stranger_passes_over_what_is_not_committed(tmp_path: Path) -> None:
    made = Made()
    made.add(("w",), random_array((4,), "float32", 1))
    _write_run(tmp_path, made)
    Made(id=checkpoint_id(20), specs=made.specs, arrays=made.arrays).write(disk(tmp_path))
    for name in ("000000030.1", "0000000040.1", "junk", "000000050.01", ".000000060.1"):
        (tmp_path / "checkpoints" / name).mkdir()
    for number, name in ((960, "0000000040.1"), (950, "000000050.01"), (930, "000000060.1")):
        path = tmp_path / f"checkpoints/manifests/0999999999999{number}-{name}.json"
        path.write_bytes(b"{}")
    _assert_read(made, tmp_path)


# Its last chunk, a bfloat16, is not used.
REUSED_IN_PART = "checkpoints/000000120.1-9f2c41ab/image-00001-of-00002.safetensors"
EXAMPLE_FILES = [
    "holdfast.json",
    "attempts/000000001.json",
    "checkpoints/manifests/0999999999999870-000000130.1-9f2c41ab.json",
    "checkpoints/000000130.1-9f2c41ab/part-00000-of-00002.json",
    "checkpoints/000000130.1-9f2c41ab/part-00001-of-00002.json",
    "checkpoints/000000130.1-9f2c41ab/image-00000-of-00002.safetensors",
    "checkpoints/000000130.1-9f2c41ab/image-00001-of-00002.safetensors",
    "checkpoints/000000120.1-9f2c41ab/image-00000-of-00002.safetensors",
    REUSED_IN_PART,
]


@pytest.fixture(scope="module")
def example() -> Iterator[Path]:
    with memory_folder() as folder:
        write_example(Path(folder))
        yield Path(folder)


def _read_second(run: Path) -> None:
    """Reads the newest checkpoint, which has to be the second one."""
    if read_newest(run).step != 130:
        raise BadRunError("step 130 is gone")


@pytest.mark.parametrize("name", EXAMPLE_FILES)
def test_a_stranger_notices_any_flipped_bit(name: str, example: Path) -> None:
    _read_second(example)
    path = example / name
    size_bits = (path.stat().st_size - 2 * (name == REUSED_IN_PART)) * 8
    # One bit of each byte at the start, with the most significant fields, and at the end.
    bits = [b for b in range(size_bits) if (b < 2400 and b % 9 == 0) or b % 391 == 0]
    bits += range(size_bits - 160, size_bits)
    for bit in bits:
        flip_bit(path, bit)
        with pytest.raises(BadRunError):
            _read_second(example)
        flip_bit(path, bit)
    _read_second(example)
    if name == REUSED_IN_PART:
        flip_bit(path, size_bits)
        _read_second(example)
        flip_bit(path, size_bits)


@pytest.mark.parametrize("name", EXAMPLE_FILES)
def test_a_stranger_notices_a_missing_or_a_cut_file(name: str, example: Path) -> None:
    path = example / name
    data = path.read_bytes()
    for content in (data[:-1], data[: len(data) // 2], b"", data + b"\n", None):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        with pytest.raises((BadRunError, IndexError, ValueError)):
            _read_second(example)
        path.write_bytes(data)


def test_a_stranger_notices_parts_that_were_swapped(example: Path, tmp_path: Path) -> None:
    shutil.copytree(example, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "checkpoints" / "000000130.1-9f2c41ab"
    for kind in ("part-0000{}-of-00002.json", "image-0000{}-of-00002.safetensors"):
        shutil.copy(folder / kind.format(0), folder / kind.format(1))
    with pytest.raises(BadRunError):
        _read_second(tmp_path)


class Reader:
    """An iterator over data that keeps its place."""

    def __init__(self) -> None:
        self.place = {"file": 3, "rest": np.arange(3, dtype=np.int16), "seed": 2**100}

    def get_state(self) -> dict:
        return self.place

    def set_state(self, state: dict) -> None:
        self.place = state


def _jax_state() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    sharded = NamedSharding(mesh, PartitionSpec("x", "y"))
    return {
        "params": {
            "kernel": jax.device_put(jnp.arange(64.0).reshape(8, 8), sharded),
            "bias": jnp.arange(5, dtype=jnp.bfloat16),
        },
        "layers": [jnp.float16(0.5), (jnp.zeros((0, 3)), np.float32(2.5))],
        "quantized": np.array([-8, 7, 0], ml_dtypes.int4),
        "key": jax.random.key(7),
        "host": np.arange(4, dtype=np.complex128) * 1j,
        "epoch": 3,
        "rate": float("nan"),
        "note": "grün",
        "nothing": None,
        "data": Reader(),
    }


def test_a_stranger_reads_what_the_manager_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = _jax_state()
    with host() as here:
        monkeypatch.setenv("HOLDFAST_RAM", str(here.folder))
        monkeypatch.setenv("HOLDFAST_HOST", here.name)
        with holdfast.CheckpointManager(
            tmp_path / "run",
            save_decision_policy=FixedIntervalPolicy(1),
            ram=holdfast.RamTier(linger_secs=0.2),
        ) as manager:
            assert manager.save(5, state, metrics={"loss": 0.5})
        wait_until(lambda: not os.listdir(here.folder))
    found = read_newest(tmp_path / "run")
    assert (found.step, found.attempt[0]) == (5, 1)
    expected = {
        "params/kernel": np.arange(64, dtype=np.float32).reshape(8, 8),
        "params/bias": np.asarray(state["params"]["bias"]).view(np.uint16),
        "layers/0": np.array(0.5, np.float16),
        "layers/1/0": np.zeros((0, 3), np.float32),
        "layers/1/1": np.array(2.5, np.float32),
        "key": np.asarray(jax.random.key_data(state["key"])),
        "host": np.array([0, 1j, 2j, 3j]),
    }
    quantized = found.arrays.pop("quantized")
    assert (quantized & 15).tolist() == [8, 7, 0]
    assert {*found.arrays} == {*expected}
    for name, array in expected.items():
        assert found.arrays[name].dtype == array.dtype
        assert np.array_equal(found.arrays[name], array)
    assert np.isnan(found.values.pop(("rate",)))
    assert found.values == {("epoch",): 3, ("note",): "grün", ("nothing",): None}
    (of_rank,) = found.rank_values
    place = of_rank[("data",)]
    assert (place["file"], place["seed"], place["rest"].tolist()) == (3, 2**100, [0, 1, 2])
