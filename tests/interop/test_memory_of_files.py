"""The memory that files of other programs take: it does not grow with the state."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)

import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import holdfast  # noqa: E402
from holdfast.cli.main import main  # noqa: E402
from holdfast.errors import StorageError  # noqa: E402
from holdfast.interop import safetensors_export, scratch_memory, torch_files  # noqa: E402
from holdfast.interop.scratch_memory import ScratchMemory  # noqa: E402
from tests.interop.peak_memory import (  # noqa: E402
    MEBI,
    PIECE_BYTES,
    Peak,
    orbax_peaks_bytes,
    peak_bytes,
)

# DCP warns of every call without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")
STATE_BYTES = 160 * MEBI
ALLOWED_BYTES = 80 * MEBI
"""Four threads that each read a block of 8 MiB, pieces, and the allocator's slack."""


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    monkeypatch.setattr(safetensors_export, "PIECE_SIZE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(scratch_memory, "GROUP_SIZE_BYTES", PIECE_BYTES)
    torch.manual_seed(0)
    small = {f"small.{number}": torch.rand(MEBI // 4) for number in range(32)}
    return {"big": torch.rand(1024, 32 * 1024), **small}


def _equal(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> bool:
    return found.keys() == state.keys() and all(torch.equal(found[k], state[k]) for k in state)


@pytest.mark.parametrize("option", ["--hf", pytest.param("--torch", marks=pytest.mark.soak)])
def test_an_export_takes_memory_for_pieces_only(
    option: str, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    holdfast.save(tmp_path / "run", state)
    out = tmp_path / "out"
    # In a process of its own: an allocator that has served other tests gives memory back later.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        peak = pool.submit(peak_bytes, "export", str(tmp_path / "run"), option, str(out))
        assert peak.result() < ALLOWED_BYTES < STATE_BYTES
    found = load_file(out / "model.safetensors") if option == "--hf" else torch.load(out)
    assert _equal(found, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_progress_counts_the_bytes_of_all_arrays(tmp_path: Path) -> None:
    state = {"big": torch.rand(300, 4), "small": torch.tensor(3), "empty": torch.zeros(0, 2)}
    dcp.save(dict(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    holdfast.save(tmp_path / "run", state)
    for call, arguments in (
        (safetensors_export.export_safetensors, (tmp_path / "run", 0, tmp_path / "hf")),
        (torch_files.export_torch, (tmp_path / "run", 0, tmp_path / "file")),
        (torch_files.import_torch, (tmp_path / "dcp", tmp_path / "back")),
    ):
        shown: list[int] = []
        call(*arguments, progress=shown.append)
        assert sum(shown) == 300 * 4 * 4 + 8


def test_a_disk_without_room_for_a_scratch_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="make a scratch file in"):
        ScratchMemory(tmp_path, [2**45])
    assert [*tmp_path.iterdir()] == []
    memory = ScratchMemory(tmp_path, [4, 0, 8])
    arrays = [memory.array(shape, np.dtype("i4")) for shape in ((1,), (0, 3), (2,))]
    arrays[0][:], arrays[2][:] = 7, 9
    assert [array.tolist() for array in arrays] == [[7], [], [9, 9]]


@pytest.mark.parametrize("program", ["torch.save", pytest.param("dcp", marks=pytest.mark.soak)])
def test_an_import_takes_memory_for_pieces_only(
    program: str, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    if program == "dcp":
        halves = torch.chunk(state.pop("big"), 16)
        state |= {f"half.{number}": half.clone() for number, half in enumerate(halves)}
        dcp.save(dict(state), checkpoint_id=source, no_dist=True)
    else:
        torch.save(state, source)
    with Peak() as peak:
        assert main(["import", str(source), str(tmp_path / "run")]) == 0
    assert peak.bytes < ALLOWED_BYTES < STATE_BYTES
    assert _equal(holdfast.load(tmp_path / "run", framework="torch"), state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "source"]


@pytest.mark.soak
def test_checkpoints_of_orbax_take_memory_for_groups_only(tmp_path: Path) -> None:
    jnp = pytest.importorskip("jax.numpy", reason="JAX cannot be had here")
    ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax cannot be had here")
    draw = np.random.default_rng(0)
    state = {str(leaf): jnp.asarray(draw.random(MEBI // 2)) for leaf in range(128)}
    # Orbax copies all arrays of NumPy before it writes.
    state["numpy"] = draw.random(MEBI // 8)
    size_bytes = sum(array.nbytes for array in state.values())
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        peaks = pool.submit(orbax_peaks_bytes, tmp_path).result()
    assert max(peaks.values()) < 180 * MEBI < size_bytes, peaks
    with ocp.CheckpointManager(tmp_path / "back") as manager:
        back = manager.restore(1, args=ocp.args.StandardRestore())
    assert back.keys() == state.keys()
    assert all(np.array_equal(back[name], state[name]) for name in state)
