"""torch.distributed.checkpoint through Holdfast: one process, and several ranks in programs."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata  # noqa: E402

import holdfast  # noqa: E402
from holdfast.interop.dcp import (  # noqa: E402
    HoldfastReader,
    HoldfastWriter,
    async_save,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from tests import prepared  # noqa: E402
from tests.hosts import ending  # noqa: E402
from tests.interop.dcp_reasons import shown  # noqa: E402

# DCP warns of every call without a process group.
pytestmark = pytest.mark.filterwarnings("ignore")
PROGRAM = Path(__file__).with_name("dcp_ranks.py")


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {
            "layers.0.weight": torch.rand(6, 4),
            "half": torch.rand(3).bfloat16(),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 3),
            "columns": torch.rand(5, 3).t(),
            "complex": torch.rand(4, dtype=torch.complex64).conj(),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(7)}}, "lr": 0.5, "betas": (0.9, 0.99)},
        "epoch": 3,
    }


def _blank(state: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(state)
    for tensor in (*made["model"].values(), made["optimizer"]["state"][0]["step"]):
        tensor.zero_()
    made["epoch"], made["optimizer"]["lr"], made["optimizer"]["betas"] = 0, 0.0, (0.0, 0.0)
    return made


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = one["model"].keys() == other["model"].keys() and all(
        torch.equal(one["model"][name], other["model"][name]) for name in one["model"]
    )
    steps = [state["optimizer"]["state"][0]["step"] for state in (one, other)]
    plain = [(s["epoch"], s["optimizer"]["lr"], s["optimizer"]["betas"]) for s in (one, other)]
    return tensors and bool(steps[0] == steps[1]) and plain[0] == plain[1]


def _saved(path: Path, state: dict[str, Any]) -> Any:
    return dcp.save(copy.deepcopy(state), storage_writer=HoldfastWriter(path), no_dist=True)


def _loaded(path: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=HoldfastReader(path), no_dist=True, **options)
    return state


def test_a_state_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    state = _state()
    made = _saved(tmp_path / "new" / "one", state)
    assert _equal(_loaded(tmp_path / "new" / "one", _blank(state)), state)
    read = HoldfastReader(tmp_path / "new" / "one").read_metadata()
    assert isinstance(read, Metadata)
    assert read.state_dict_metadata == made.state_dict_metadata
    assert read.planner_data == made.planner_data
    # Nothing hidden is left, and everything that reads runs reads it.
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["one"]
    found = holdfast.load(tmp_path / "new" / "one", framework="torch", only="model.half")
    assert torch.equal(found["model.half"], state["model"]["half"])


def test_a_part_of_a_state_is_loaded_and_dtypes_are_converted(tmp_path: Path) -> None:
    state = _state()
    _saved(tmp_path / "one", state)
    expected = state["model"]["layers.0.weight"]
    strided = torch.zeros(4, 6).t()
    wanted = {"model": {"layers.0.weight": strided, "half": torch.zeros(3, dtype=torch.float64)}}
    _loaded(tmp_path / "one", wanted)
    assert torch.equal(strided, expected)
    assert torch.equal(wanted["model"]["half"], state["model"]["half"].double())
    with pytest.raises(dcp.CheckpointException, match="gone"):
        _loaded(tmp_path / "one", {"gone": torch.zeros(1)})


class _Diagonal(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """Writes a tensor of 4 rows in shards that form no grid."""

    shards = (((0, 0), (2, 3)), ((2, 0), (2, 1)), ((2, 1), (2, 2)))

    def create_local_plan(self) -> Any:
        from dataclasses import replace

        plan = super().create_local_plan()
        (item,) = plan.items
        items = []
        for offsets, sizes in self.shards:
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            items.append(
                replace(
                    item,
                    type=dcp.planner.WriteItemType.SHARD,
                    index=replace(item.index, offset=torch.Size(offsets)),
                    tensor_data=replace(item.tensor_data, chunk=chunk),
                )
            )
        return replace(plan, items=items)

    def resolve_data(self, write_item: Any) -> Any:
        (a, b), (rows, columns) = next(
            shard for shard in self.shards if shard[0] == tuple(write_item.index.offset)
        )
        return self.state_dict["w"][a : a + rows, b : b + columns]


def test_shards_that_form_no_grid_are_arrays_of_their_own(tmp_path: Path) -> None:
    state = {"w": torch.rand(4, 3)}
    writer = HoldfastWriter(tmp_path / "one")
    dcp.save(state, storage_writer=writer, planner=_Diagonal(), no_dist=True)
    found = _loaded(tmp_path / "one", {"w": torch.zeros(4, 3)})
    assert torch.equal(found["w"], state["w"])
    with holdfast.open_run(tmp_path / "one") as run:
        assert sorted(run.metadata(0).arrays) == ["w/at 0,0", "w/at 2,0", "w/at 2,1"]


def test_an_id_is_replaced_wholly_and_one_writer_serves_many(tmp_path: Path) -> None:
    writer = HoldfastWriter(tmp_path / "one")
    (tmp_path / "two").mkdir()  # an empty directory is one that a program has prepared
    for number, name in enumerate(("one", "two", "one")):
        state = {"w": torch.full((3,), number), f"only-{number}": torch.zeros(1)}
        dcp.save(state, checkpoint_id=tmp_path / name, storage_writer=writer, no_dist=True)
    assert _loaded(tmp_path / "one", {"w": torch.zeros(3)})["w"].tolist() == [2, 2, 2]
    assert _loaded(tmp_path / "two", {"w": torch.zeros(3)})["w"].tolist() == [1, 1, 1]
    names = HoldfastReader(tmp_path / "one").read_metadata().state_dict_metadata
    assert set(names) == {"w", "only-2"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_tied_tensors_odd_dtypes_and_keys_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tied = torch.rand(3, 4)
    names = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    eights = {name: torch.rand(5).to(getattr(torch, name)) for name in names}
    halves = torch.view_as_complex(torch.rand(3, 2).half())
    state = {
        "tied": {"one": tied, "other": tied, "view": tied[1:, ::2]},
        "eights": {**eights, "e8m0": torch.ones(4).to(torch.float8_e8m0fnu)},
        "complex32": halves,
        "fours": torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "bits": {8: torch.tensor([True, False]), 16: torch.tensor([0, 1, 2], dtype=torch.uint16)},
        "none": torch.zeros(0, 3, 0),
        "list": [torch.ones(1), {"x": 3}],
    }
    dcp.save(state, storage_writer=HoldfastWriter(tmp_path / "one"), no_dist=True)
    blank = copy.deepcopy(state)
    for tensor in (blank["tied"]["one"], *blank["eights"].values(), *blank["bits"].values()):
        tensor.reshape(-1).view(torch.uint8).zero_()
    blank["complex32"].zero_()
    blank["fours"].view(torch.uint8).zero_()
    blank["list"][1]["x"] = 0
    found = _loaded(tmp_path / "one", blank)
    for path in (
        ("tied", "one"),
        ("tied", "view"),
        *(("eights", name) for name in state["eights"]),
    ):
        one, other = found[path[0]][path[1]], state[path[0]][path[1]]
        assert one.dtype == other.dtype, path
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    assert found["tied"]["one"] is found["tied"]["other"]
    assert found["complex32"].dtype == torch.complex32
    assert torch.equal(torch.view_as_real(found["complex32"]), torch.view_as_real(halves))
    assert torch.equal(found["fours"].view(torch.uint8), state["fours"].view(torch.uint8))
    assert [found["bits"][key].tolist() for key in (8, 16)] == [[True, False], [0, 1, 2]]
    assert found["list"][1]["x"] == 3


class _HalfSaved(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """Saves floating-point tensors as bfloat16, and others as they are."""

    def set_up_planner(self, state_dict: Any, *args: Any, **options: Any) -> None:
        halves = {
            name: value.bfloat16() if value.is_floating_point() else value
            for name, value in state_dict.items()
        }
        super().set_up_planner(halves, *args, **options)


class _Renamed(dcp.DefaultLoadPlanner):  # type: ignore[misc]
    """Loads rows 1 and 2, columns 1 and 2, of the array that was saved as `old.NAME`."""

    def create_local_plan(self) -> Any:
        from dataclasses import replace

        items = [
            dcp.planner.ReadItem(
                type=dcp.planner.LoadItemType.TENSOR,
                dest_index=dcp.metadata.MetadataIndex(name, torch.Size((0, 0))),
                dest_offsets=torch.Size((1, 0)),
                storage_index=dcp.metadata.MetadataIndex(f"old.{name}", torch.Size((0, 0))),
                storage_offsets=torch.Size((1, 1)),
                lengths=torch.Size((2, 2)),
            )
            for name in self.state_dict
        ]
        return replace(dcp.planner.LoadPlan(items))

    def resolve_tensor(self, read_item: Any) -> Any:
        tensor = self.state_dict[read_item.dest_index.fqn]
        (row, column), (rows, columns) = read_item.dest_offsets, read_item.lengths
        return tensor[row : row + rows, column : column + columns]


def test_planners_of_the_user_decide_what_is_saved_and_loaded(tmp_path: Path) -> None:
    state = {"old.w": torch.rand(4, 3), "old.count": torch.tensor(7)}
    writer = HoldfastWriter(tmp_path / "one")
    dcp.save(state, storage_writer=writer, planner=_HalfSaved(), no_dist=True)
    with holdfast.open_run(tmp_path / "one") as run:
        dtypes = {name: array.dtype for name, array in run.metadata(0).arrays.items()}
    assert dtypes["old.w"] == "bfloat16"
    assert dtypes["old.count"] == "int64"
    target = torch.zeros(4, 3)
    _loaded(tmp_path / "one", {"w": target}, planner=_Renamed())
    expected = torch.zeros(4, 3)
    expected[1:3, :2] = state["old.w"].bfloat16()[1:3, 1:3]
    assert torch.equal(target, expected)


KILLED = """
import os, signal, sys, warnings
import torch
import torch.distributed.checkpoint as dcp
from holdfast.interop.dcp import HoldfastWriter

class Killed(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item):
        if write_item.index.fqn == "second":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)

warnings.simplefilter("ignore")
state = {"first": torch.ones(100_000), "second": torch.ones(100_000)}
writer = HoldfastWriter(sys.argv[1])
dcp.save(state, storage_writer=writer, planner=Killed(), no_dist=True)
"""


@pytest.mark.parametrize("name", ["two", pytest.param("one", marks=pytest.mark.soak)])
def test_a_process_killed_in_a_save_changes_no_id(name: str, tmp_path: Path) -> None:
    state = {"first": torch.zeros(100_000), "second": torch.zeros(100_000)}
    dcp.save(state, storage_writer=HoldfastWriter(tmp_path / "one"), no_dist=True)
    program = ["-c", KILLED, str(tmp_path / name)]
    with ending(prepared.start("torch", program, os.environ)) as killed:
        assert killed.wait(100) == -signal.SIGKILL
    assert len([*tmp_path.iterdir()]) == 2  # it was killed in the middle
    wanted = {name: torch.full((100_000,), 5.0) for name in state}
    found = _loaded(tmp_path / "one", wanted)
    assert not any(tensor.any() for tensor in found.values())
    if name == "two":
        with pytest.raises(dcp.CheckpointException, match=shown("expected a run")):
            _loaded(tmp_path / "two", wanted)
    state = {"first": torch.full((3,), 2.0)}
    dcp.save(state, storage_writer=HoldfastWriter(tmp_path / name), no_dist=True)
    assert _loaded(tmp_path / name, {"first": torch.zeros(3)})["first"].tolist() == [2, 2, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"one", name}


class _Failing(dcp.DefaultSavePlanner):  # type: ignore[misc]
    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "bad":
            raise RuntimeError("no such data")
        return super().resolve_data(write_item)


def test_the_reason_why_nothing_loads_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(dcp.CheckpointException):
        _loaded(tmp_path / "one", {"w": torch.zeros(3)})
    assert any("expected a run" in record.message for record in caplog.records)


def test_after_a_failed_save_nothing_of_it_loads_and_the_next_one_works(tmp_path: Path) -> None:
    writer = HoldfastWriter(tmp_path / "one")
    state = {"w": torch.ones(3), "bad": torch.zeros(2)}
    with pytest.raises(dcp.CheckpointException, match="no such data"):
        dcp.save(state, storage_writer=writer, planner=_Failing(), no_dist=True)
    with pytest.raises(dcp.CheckpointException, match=shown("expected a run")):
        _loaded(tmp_path / "one", {"w": torch.zeros(3)})
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert _loaded(tmp_path / "one", {"w": torch.zeros(3)})["w"].tolist() == [1, 1, 1]
    with pytest.raises(dcp.CheckpointException, match="no such data"):
        dcp.save(
            {"w": torch.zeros(3), "bad": torch.zeros(2)},
            storage_writer=writer,
            planner=_Failing(),
            no_dist=True,
        )
    # What was there before is still there, whole.
    assert _loaded(tmp_path / "one", {"w": torch.zeros(3)})["w"].tolist() == [1, 1, 1]
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_what_another_program_made_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "notes").write_text("mine")
    with pytest.raises(dcp.CheckpointException, match="which is not overwritten"):
        _saved(tmp_path / "one", {"w": torch.zeros(1)})
    assert (tmp_path / "one" / "notes").read_text() == "mine"
    holdfast.save(tmp_path / "two", {"w": torch.zeros(1)})
    with pytest.raises(dcp.CheckpointException, match=shown(r"use holdfast\.load")):
        _loaded(tmp_path / "two", {"w": torch.zeros(1)})


@pytest.fixture
def plan_caches() -> Iterator[None]:
    """DCP's caches of plans, which are of the process, empty before and after."""

    def clear() -> None:
        for name in ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan"):
            getattr(dcp.SavePlanner, f"_cached_{name}").clear()

    clear()
    yield
    clear()


def test_plans_that_dcp_has_cached_are_used_again(tmp_path: Path, plan_caches: None) -> None:
    states: list[dict[str, Any]] = [
        {"w": torch.rand(5), "lr": 0.1},
        {"w": torch.rand(5), "lr": 0.2},
        {"w": torch.rand(7), "lr": 0.3, "new": torch.rand(2)},
        {"w": torch.rand(7), "lr": 0.4, "new": torch.rand(2)},
    ]
    for number, state in enumerate(states):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        writer = HoldfastWriter(tmp_path / str(number))
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    for number, state in enumerate(states):
        blank = {name: torch.zeros_like(value) for name, value in state.items() if name != "lr"}
        loaded = _loaded(tmp_path / str(number), {**blank, "lr": 0.0})
        assert loaded.pop("lr") == state.pop("lr")
        assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_a_refused_save_leaves_the_cached_plans_of_the_one_before(
    tmp_path: Path, plan_caches: None
) -> None:
    def save(name: str, state: dict[str, Any]) -> None:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        writer = HoldfastWriter(tmp_path / name)
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)

    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "notes").write_text("mine")
    state = {"a": torch.rand(3), "b": torch.rand(4)}
    save("first", state)
    with pytest.raises(dcp.CheckpointException, match="which is not overwritten"):
        save("occupied", {"a": torch.rand(9)})
    save("second", state)
    loaded = _loaded(tmp_path / "second", {"a": torch.zeros(3), "b": torch.zeros(4)})
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_another_dtype_than_that_of_the_cached_plan_is_refused_with_what_to_do(
    tmp_path: Path, plan_caches: None
) -> None:
    def save(name: str, dtype: torch.dtype, *, is_cached: bool) -> None:
        writer = HoldfastWriter(tmp_path / name)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=is_cached)
        dcp.save(
            {"w": torch.ones(3, dtype=dtype)}, storage_writer=writer, planner=planner, no_dist=True
        )

    save("first", torch.float32, is_cached=True)
    with pytest.raises(dcp.CheckpointException, match="planner with enable_plan_caching=False"):
        save("second", torch.bfloat16, is_cached=True)
    save("second", torch.bfloat16, is_cached=False)
    assert _loaded(tmp_path / "second", {"w": torch.zeros(3, dtype=torch.bfloat16)})["w"].sum() == 3


class _OwnPlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """A second class of planners."""


def test_cached_plans_of_two_classes_of_planners_are_refused(
    tmp_path: Path, plan_caches: None
) -> None:
    def save(kind: Any) -> None:
        writer = HoldfastWriter(tmp_path / "one")
        planner = kind(enable_plan_caching=True)
        dcp.save({"w": torch.zeros(1)}, storage_writer=writer, planner=planner, no_dist=True)

    save(dcp.DefaultSavePlanner)
    save(_OwnPlanner)
    with pytest.raises(dcp.CheckpointException, match="DefaultSavePlanner, _OwnPlanner"):
        save(dcp.DefaultSavePlanner)


def test_files_of_torch_and_checkpoints_of_dcp_become_each_other(tmp_path: Path) -> None:
    state = {"model": {"w": torch.rand(5)}, "epoch": 3, "list": [torch.ones(2)]}
    torch.save(state, tmp_path / "one.pt")
    torch_save_to_dcp(tmp_path / "one.pt", tmp_path / "one")
    dcp.save(state, checkpoint_id=tmp_path / "native", no_dist=True)
    for name in ("one", "native"):
        dcp_to_torch_save(tmp_path / name, tmp_path / "again.pt")
        again = torch.load(tmp_path / "again.pt", weights_only=False)
        assert torch.equal(again["model"]["w"], state["model"]["w"])
        assert (again["epoch"], again["list"][0].tolist()) == (3, [1.0, 1.0])


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    _saved(tmp_path / "one", {"w": torch.rand(1000)})
    (image,) = (tmp_path / "one").glob("checkpoints/*/image-*")
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    with pytest.raises(dcp.CheckpointException, match="expected"):
        _loaded(tmp_path / "one", {"w": torch.zeros(1000)})


def test_an_async_save_has_the_state_of_its_call(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(HoldfastWriter(tmp_path / "gone")))
    weight = torch.ones(100_000)
    for number in range(3):
        done = dcp.async_save(
            {"w": weight, "number": number},
            checkpoint_id=tmp_path / str(number),
            storage_writer=writer,
            no_dist=True,
        )
        weight += 1
        done.result(timeout=240)
    for number in range(3):
        found = _loaded(tmp_path / str(number), {"w": torch.zeros(100_000), "number": -1})
        assert found["number"] == number
        assert bool((found["w"] == number + 1).all())
    failing = dcp.async_save(
        {"bad": weight}, storage_writer=writer, planner=_Failing(), no_dist=True
    )
    with pytest.raises(dcp.CheckpointException, match="no such data"):
        failing.result(timeout=240)
    dcp.async_save({"bad": weight}, storage_writer=writer, no_dist=True).result(timeout=240)
    assert torch.equal(_loaded(tmp_path / "2", {"bad": torch.zeros(100_000)})["bad"], weight)


def _run(task: str, path: Path, count: int) -> None:
    """Run the program on `count` ranks, each of which has to end well."""
    assert _codes(task, path, count) == [0] * count


def _codes(task: str, path: Path, count: int) -> list[int]:
    """Run the program on `count` ranks, which find each other by a file."""
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    commands = [[str(PROGRAM), task, str(path), str(rank), str(count)] for rank in range(count)]
    with contextlib.ExitStack() as ends:
        ranks = [
            ends.enter_context(ending(prepared.start("torch", command, variables)))
            for command in commands
        ]
        said = ["".join(process.communicate(timeout=100)) for process in ranks]
    print("\n".join(said))
    return [process.returncode for process in ranks]


def test_ranks_save_their_shards_and_one_process_loads_them(tmp_path: Path) -> None:
    _run("save", tmp_path, 2)
    assert len([*(tmp_path / "one").glob("checkpoints/*/part-*-of-00002.json")]) == 2
    wanted = {"rows": torch.zeros(5, 4), "columns": torch.zeros(4, 3), "plain": torch.zeros(2)}
    found = _loaded(tmp_path / "one", {**wanted, "epoch": 0})
    assert torch.equal(found["rows"], torch.arange(20.0).reshape(5, 4))
    assert torch.equal(found["columns"], torch.arange(12.0).reshape(4, 3))
    assert (found["plain"].tolist(), found["epoch"]) == ([3.0, 3.0], 4)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["one"]


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_a_save_ends_the_others_and_changes_no_id(
    victim: int, tmp_path: Path
) -> None:
    _run("save", tmp_path, 2)
    codes = _codes(f"killed-{victim}", tmp_path, 2)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 0
    with pytest.raises(dcp.CheckpointException, match=shown("expected a run")):
        _loaded(tmp_path / "two", {"rows": torch.zeros(5, 4)})
    _run("again", tmp_path, 2)
    for name, factor in (("one", 1), ("two", 2)):
        found = _loaded(tmp_path / name, {"rows": torch.zeros(5, 4)})
        assert torch.equal(found["rows"], factor * torch.arange(20.0).reshape(5, 4))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["one", "two"]


@pytest.mark.soak
def test_shards_of_two_meshes_and_shards_without_rows(tmp_path: Path) -> None:
    _run("strided", tmp_path, 4)
    wanted = {name: torch.zeros(10, 2) for name in ("w", "whole")}
    found = _loaded(tmp_path / "strided", {**wanted, "few": torch.zeros(2, 3)})
    assert torch.equal(found["w"], found["whole"])
    assert found["w"].all()
    assert torch.equal(found["few"], torch.arange(6.0).reshape(2, 3))


@pytest.mark.soak
def test_more_ranks_load_the_shards_in_other_ways(tmp_path: Path) -> None:
    _run("save", tmp_path, 2)
    _run("load", tmp_path, 3)


@pytest.mark.soak
def test_a_process_of_dcp_saves(tmp_path: Path) -> None:
    _run("process", tmp_path, 2)
    found = _loaded(tmp_path / "process", {"rows": torch.zeros(5, 4)})
    assert torch.equal(found["rows"], torch.arange(20.0).reshape(5, 4))


@pytest.mark.soak
def test_a_group_of_some_ranks_saves(tmp_path: Path) -> None:
    _run("group", tmp_path, 3)
    found = _loaded(tmp_path / "group", {"w": torch.zeros(3), "rank": 0})
    assert (found["w"].tolist(), found["rank"]) == ([7.0, 7.0, 7.0], 1)


def test_a_save_in_the_background_leaves_the_default_group_to_the_training(tmp_path: Path) -> None:
    _run("training", tmp_path, 2)
    found = _loaded(tmp_path / "training", {"w": torch.zeros(3)})
    assert found["w"].tolist() == [8.0, 8.0, 8.0]


def test_one_process_saves_in_the_background_without_a_group(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    saved = async_save(state, storage_writer=HoldfastWriter(tmp_path / "a"))
    state["w"].zero_()
    saved.result(timeout=240)
    assert _loaded(tmp_path / "a", {"w": torch.zeros(3)})["w"].tolist() == [1.0, 1.0, 1.0]
