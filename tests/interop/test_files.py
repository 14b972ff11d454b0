"""Files of other programs: safetensors and `torch.save` written, `torch.save` and DCP read."""

from __future__ import annotations

import argparse
import json
import resource
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)

import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import holdfast  # noqa: E402
from holdfast.cli.main import main  # noqa: E402
from holdfast.errors import InvalidArgumentError, StorageError  # noqa: E402
from holdfast.interop.dcp import HoldfastWriter  # noqa: E402
from holdfast.interop.safetensors_export import export_safetensors  # noqa: E402


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("count", torch.tensor(3))
    model.register_parameter("scale", torch.nn.Parameter(torch.rand(5)))
    holdfast.save(tmp_path / "saved", {"model": model, "epoch": 3})
    return tmp_path / "saved", model


def test_safetensors_in_shards_have_the_names_of_the_model(
    saved: tuple[Path, Any], tmp_path: Path
) -> None:
    directory, model = saved
    size = ["--max-shard-size", str(60 / 10**9)]
    assert (
        main(["export", str(directory), "--hf", str(tmp_path / "hf"), "--prefix", "model", *size])
        == 0
    )
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    found = {}
    for name in set(index["weight_map"].values()):
        found |= load_file(tmp_path / "hf" / name)
    assert found.keys() == index["weight_map"].keys() == {"0.weight", "count", "scale"}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert len(set(index["weight_map"].values())) == 2
    model_after = model.state_dict()
    assert all(torch.equal(tensor, model_after[name]) for name, tensor in found.items())


def test_floating_point_arrays_are_converted(saved: tuple[Path, Any], tmp_path: Path) -> None:
    directory, model = saved
    out = tmp_path / "hf"
    assert main(["export", str(directory), "0", "--hf", str(out), "--dtype", "bfloat16"]) == 0
    found = load_file(out / "model.safetensors")
    assert torch.equal(found["model.scale"], model.scale.bfloat16())
    assert found["model.count"].dtype == torch.int64
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


def test_of_two_exports_to_one_directory_each_writes_its_own_and_one_is_refused(
    tmp_path: Path,
) -> None:
    for number in (1, 2):
        holdfast.save(tmp_path / f"run{number}", {"w": np.full(100_000, number)})
    target = tmp_path / "out"

    def other(size_bytes: int) -> None:
        if not target.exists():
            export_safetensors(tmp_path / "run2", 0, target)

    with pytest.raises(InvalidArgumentError, match="another process made it meanwhile"):
        export_safetensors(tmp_path / "run1", 0, target, progress=other)
    assert (load_file(target / "model.safetensors")["w"] == 2).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run1", "run2"]


def test_an_empty_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.pt").touch()
    assert main(["import", str(tmp_path / "empty.pt"), str(tmp_path / "run")]) == 1
    assert "expected a file of torch.save, found" in capsys.readouterr().err


def test_a_damaged_record_of_a_file_of_torch_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensor = torch.arange(1000.0)
    torch.save({"w": tensor}, tmp_path / "state.pt")
    data = bytearray((tmp_path / "state.pt").read_bytes())
    data[data.index(tensor.numpy().tobytes()) + 100] ^= 4
    (tmp_path / "state.pt").write_bytes(data)
    assert main(["import", str(tmp_path / "state.pt"), str(tmp_path / "run")]) == 1
    assert "found state/data/0 with another one" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_a_file_of_torch_without_crcs_is_imported(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(9)}, tmp_path / "state.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert main(["import", str(tmp_path / "state.pt"), str(tmp_path / "run")]) == 0


def test_why_a_file_of_torch_cannot_be_read_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(999)}, tmp_path / "cut")
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:2000])
    torch.save({"a": argparse.Namespace(x=1)}, tmp_path / "object")
    (tmp_path / "text").write_text("hello")
    for name, expected in (
        ("cut", "no end of the zip archive; the file is cut off or damaged"),
        ("object", "an object of argparse.Namespace, which is not executed"),
        ("text", "data that it did not write"),
    ):
        assert main(["import", str(tmp_path / name), str(tmp_path / "run")]) == 1
        assert f"torch.save, found {expected}" in " ".join(capsys.readouterr().err.split())


def test_a_file_of_an_export_that_has_no_room_is_named(saved: tuple[Path, Any]) -> None:
    directory, _ = saved
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(StorageError, match=r"write .*/model\.safetensors: File too large"):
            export_safetensors(directory, 0, directory.with_name("out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_cannot_be_exported_leaves_nothing(
    saved: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = saved
    holdfast.save(tmp_path / "odd", {"x": np.zeros(3, ml_dtypes.int4)})
    out = str(tmp_path / "out")
    for arguments, message in (
        ([str(tmp_path / "odd"), "--hf", out], "x: safetensors has no int4"),
        ([str(tmp_path / "odd"), "--torch", out], "x: expected a dtype that torch.save writes"),
        ([str(directory), "--hf", out, "--prefix", "gone"], "no array is below 'gone'"),
        ([str(directory), "--hf", str(directory)], "it exists"),
        ([str(directory), "--hf", out, "--dtype", "float33"], "found 'float33'"),
        ([str(directory)], "expected one of --hf DIR, --torch FILE and --orbax DIR"),
    ):
        assert main(["export", *arguments]) == 1
        assert message in " ".join(capsys.readouterr().err.split())
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "odd"}


def test_a_file_of_torch_goes_out_and_comes_back(saved: tuple[Path, Any], tmp_path: Path) -> None:
    directory, model = saved
    file = tmp_path / "state.pt"
    assert main(["export", str(directory), "--torch", str(file)]) == 0
    state = torch.load(file, weights_only=True)
    assert state["epoch"] == 3
    assert torch.equal(state["model"]["scale"], model.scale)
    assert main(["import", str(file), str(tmp_path / "back")]) == 0
    with holdfast.open_run(tmp_path / "back") as run:
        assert run.metadata(0).arrays["model/1.weight"].alias_of == "model/0.weight"
        found = run.restore(framework="torch")
    assert found.keys() == state.keys()
    assert all(torch.equal(found["model"][name], state["model"][name]) for name in state["model"])


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_dcp_is_imported(tmp_path: Path) -> None:
    state = {
        "model": {"w.x": torch.rand(4, 3), "half": torch.rand(2).half()},
        "optimizer": {"state": {0: {"step": torch.tensor(2.0)}}, "lr": 0.5},
        "groups": [{"lr": torch.tensor(0.5), "name": "a"}, {"lr": torch.tensor(2.0), "name": "b"}],
        "step": 7,
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "back")]) == 0
    found = holdfast.load(tmp_path / "back", framework="torch")
    assert torch.equal(found["model"].pop("w.x"), state["model"].pop("w.x"))
    assert torch.equal(found["model"].pop("half"), state["model"].pop("half"))
    # DCP lists the keys of dicts as strings.
    state["optimizer"]["state"] = {"0": state["optimizer"]["state"][0]}
    assert found == state


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_dcps_writer_is_exported_as_the_state_that_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {
        "model": {"w.x": torch.rand(4, 3), "half": torch.rand(2).bfloat16()},
        "groups": [{"lr": torch.tensor(0.5), "betas": (0.9, 0.99)}],
        "step": 7,
    }
    dcp.save(state, storage_writer=HoldfastWriter(tmp_path / "run"), no_dist=True)
    assert main(["export", str(tmp_path / "run"), "--torch", str(tmp_path / "state.pt")]) == 0
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    model, expected = found.pop("model"), state.pop("model")
    assert found == state
    assert model.keys() == expected.keys()
    assert all(torch.equal(model[name], expected[name]) for name in model)

    (image,) = (tmp_path / "run").glob("checkpoints/*/image-*")
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    assert main(["export", str(tmp_path / "run"), "--torch", str(tmp_path / "out")]) == 1
    assert "the bytes were changed after they were written" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "out").exists()


def test_without_pytorch_what_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.save(tmp_path / "run", {"w": np.zeros(3)})
    (tmp_path / "state.pt").touch()
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "holdfast.interop.torch_files", raising=False)
    for arguments, message in (
        (["import", "gone", "back"], "import gone: expected a file or a folder, found nothing"),
        (["import", str(tmp_path / "state.pt"), "back"], "holdfast-checkpoint[torch]"),
        (["export", str(tmp_path / "run"), "--torch", "out"], "holdfast-checkpoint[torch]"),
    ):
        assert main(arguments) == 1
        assert message in " ".join(capsys.readouterr().err.split())


def test_what_is_no_file_of_torch_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("no")
    (tmp_path / "folder").mkdir()
    for name in ("text", "folder", "gone"):
        assert main(["import", str(tmp_path / name), str(tmp_path / "back")]) == 1
        assert f"import {tmp_path / name}: expected" in capsys.readouterr().err.replace("\n", "")
    assert not (tmp_path / "back").exists()
