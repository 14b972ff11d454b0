"""Several processes on one host share an agent and make one checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import holdfast
from holdfast import errors
from holdfast.engine.reading.metadata import CheckpointMetadata
from tests.attempts import folder_of
from tests.format.stranger import read_checkpoint
from tests.hosts import Host, await_events, events, expire_leases, wait_until
from tests.manifests import manifests
from tests.ports import free_address
from tests.trainer.frameworks import FRAMEWORKS

PROCESS = Path(__file__).with_name("process.py")
DEVICES = "--xla_force_host_platform_device_count=4"


def start_job(host: Host, run: Path, count: int, **todo: Any) -> list[subprocess.Popen[str]]:
    address, argument, stem = free_address(), json.dumps(todo), todo.get("framework", "jax")
    return [
        host.start(PROCESS, address, count, rank, run, argument, stem=stem, XLA_FLAGS=DEVICES)
        for rank in range(count)
    ]


def results(job: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What each process said, as one dict each; all have to end well."""
    found = []
    for process in job:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err[-3000:]
        said: dict[str, Any] = {}
        for line in out.splitlines():
            if line.startswith("{"):
                said |= json.loads(line)
        found.append(said)
    return found


@FRAMEWORKS
def test_two_processes_make_one_checkpoint_and_both_come_back(
    one_host: Host, tmp_path: Path, framework: str
) -> None:
    run = tmp_path / "run"
    first = results(
        start_job(one_host, run, 2, framework=framework, steps=9, interval=4, dies=True)
    )
    assert [r["saved"] for r in first] == [[0, 4, 8], [0, 4, 8]]
    assert first[0]["steps"] == [0, 4, 8]
    folder = folder_of(run, 8)
    assert len(list(folder.glob("image-*-of-00002.safetensors"))) == 2
    sizes = [p.stat().st_size for p in folder.glob("image-*")]
    # No chunk is larger than the replicated array, so no better balance can be asked for.
    assert max(sizes) - min(sizes) <= 48 * 50 * 4
    again = results(start_job(one_host, run, 2, framework=framework, steps=4, interval=4))
    assert [(r["start"], r["right"]) for r in again] == [(9, True)] * 2
    restored = await_events(run, "restored", count=2)
    assert {tier for e in restored for tier in e["sources"]} == {"ram"}


def test_ranks_that_save_the_states_of_different_objects_are_told_and_nothing_is_committed(
    one_host: Host, tmp_path: Path
) -> None:
    todo: dict[str, Any] = {"interval": 2, "forgets": 1, "goes_on": True, "only_closes": True}
    job = start_job(one_host, tmp_path / "run", 2, steps=5, **todo)
    for rank, process in enumerate(job):
        out, err = process.communicate(timeout=240)
        failed = [json.loads(line) for line in out.splitlines() if '"failed"' in line]
        assert {step for line in failed for step in line["failed"]} == {0, 2, 4}, (rank, out, err)
        assert "rank 1 lacks position; all processes of a job" in failed[0]["message"]
    assert not manifests(tmp_path / "run")


@pytest.mark.soak
def test_a_large_array_that_both_processes_have_is_written_by_both_and_comes_back(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    todo: dict[str, Any] = {"interval": 1, "position": False, "big_mib": 40}
    results(start_job(one_host, run, 2, steps=2, **todo))
    for folder in (folder_of(run, 0), folder_of(run, 1)):
        images = sorted(folder.glob("image-*"))
        sizes = [image.stat().st_size for image in images]
        assert len(sizes) == 2
        assert max(sizes) <= 1.1 * sum(sizes) / 2, f"{folder.name} is uneven: {sizes}"
    again = results(start_job(one_host, run, 2, steps=1, **todo))
    assert [(r["start"], r["right"]) for r in again] == [(2, True)] * 2
    expected = np.arange(40 << 18, dtype=np.float32).reshape(40, 512, 512) - 1
    assert np.array_equal(read_checkpoint(run, 1, 1).arrays["big"], expected)
    mesh = jax.make_mesh((2, 4), ("x", "y"), devices=jax.devices()[:8])
    by_columns = NamedSharding(mesh, PartitionSpec("x", None, "y"))
    with holdfast.CheckpointManager(run) as manager:
        grid = manager.metadata(1).arrays["big"].grid
        assert grid[0] >= 2
        assert grid[1:] == (1, 1)
        like = like_of(manager.metadata(1))
        like["big"] = jax.ShapeDtypeStruct(expected.shape, np.float32, sharding=by_columns)
        big = manager.restore(1, like=like)["big"]
        assert big.sharding == by_columns
        assert np.array_equal(big, expected)


@pytest.mark.soak
def test_a_large_array_that_both_write_and_that_does_not_change_is_reused_by_both(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    results(
        start_job(
            one_host,
            run,
            2,
            steps=3,
            interval=1,
            position=False,
            big_mib=40,
            frozen=True,
            sleep=0.2,
        )
    )
    last = folder_of(run, 2)
    for rank in range(2):
        own = last / f"image-0000{rank}-of-00002.safetensors"
        reused = list(run.glob(f"checkpoints/*/image-0000{rank}-of-00002.safetensors"))
        assert own.stat().st_size < 1 << 20
        large = [path for path in reused if path.stat().st_size >= 0.9 * (20 << 20)]
        assert len(large) == 1
    with holdfast.CheckpointManager(run) as manager:
        big = manager.restore(2)["big"]
    assert np.array_equal(big, np.arange(40 << 18, dtype=np.float32).reshape(40, 512, 512))


@FRAMEWORKS
def test_continuous_targets_are_met_by_all_ranks_at_one_step(
    one_host: Host, tmp_path: Path, framework: str
) -> None:
    run = tmp_path / "run"
    job = start_job(one_host, run, 2, framework=framework, steps=10**6, sleep=0.004)
    wait_until(lambda: len({e["step"] for e in events(run, "committed")}) >= 3)
    job[0].terminate()
    found = results(job)
    saved = [set(r["saved"]) for r in found]
    steps = found[0]["steps"]
    complete = {e["step"] for e in await_events(run, "committed", count=len(steps))}
    assert complete <= saved[0] & saved[1]
    assert complete == set(steps)


@FRAMEWORKS
def test_a_signal_to_one_rank_saves_and_leaves_on_all_ranks_at_one_step(
    one_host: Host, tmp_path: Path, framework: str
) -> None:
    run = tmp_path / "run"
    job = start_job(
        one_host,
        run,
        2,
        framework=framework,
        steps=400,
        sleep=0.02,
        interval=10**6,
        signal_at=20,
        signal_rank=1,
    )
    found = results(job)
    assert found[0]["left"] == found[1]["left"] >= 20
    assert found[0]["steps"] == [0, found[0]["left"]]


@FRAMEWORKS
def test_a_job_that_lost_one_process_starts_again_from_its_last_whole_checkpoint(
    one_host: Host, tmp_path: Path, framework: str
) -> None:
    run = tmp_path / "run"
    job = start_job(one_host, run, 2, framework=framework, steps=10**6, interval=5, sleep=0.01)
    wait_until(lambda: len(events(run, "sealed")) >= 3)
    job[1].kill()
    job[1].wait()
    sealed = max(e["step"] for e in events(run, "sealed"))
    again = start_job(one_host, run, 2, framework=framework, steps=3, interval=5)
    job[0].kill()
    found = results(again)
    assert [r["right"] for r in found] == [True, True]
    assert found[0]["start"] == found[1]["start"] >= sealed + 1


@pytest.mark.soak
@FRAMEWORKS
def test_a_bad_block_that_one_rank_needs_sends_all_ranks_to_the_older_checkpoint(
    one_host: Host, tmp_path: Path, framework: str
) -> None:
    run = tmp_path / "run"
    results(start_job(one_host, run, 2, framework=framework, steps=5, interval=2, dies=True))
    one_host.kill_agent()
    for folder in one_host.folder.iterdir():
        shutil.rmtree(folder)
    expire_leases(run)
    image = folder_of(run, 4) / "image-00001-of-00002.safetensors"
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    found = results(start_job(one_host, run, 2, framework=framework, steps=1, interval=100))
    assert [(r["start"], r["right"]) for r in found] == [(3, True)] * 2


@pytest.mark.soak
def test_what_two_processes_saved_is_not_divided_anew_among_one_in_silence(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    results(start_job(one_host, run, 2, steps=1, interval=1))
    with holdfast.CheckpointManager(run) as manager:
        asked = r"position.*2 processes.* has 1\b.*process_values\(0\)"
        with pytest.raises(errors.StructureMismatchError, match=asked):
            manager.restore()
        metadata = manager.metadata(0)
    assert metadata.process_count == 2
    assert metadata.arrays["sharded"].grid == (8, 1)


@pytest.mark.soak
def test_one_process_and_four_read_the_states_that_two_have_saved(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    results(start_job(one_host, run, 2, steps=3, interval=1))
    states = {"position": [{"value": 2}, {"value": 1002}]}
    found = results(start_job(one_host, run, 4, steps=0, position=False, values=True))
    expected = {"start": 3, "right": True, "values": states, "left_out": ["position"]}
    assert [{key: r[key] for key in expected} for r in found] == [expected] * 4
    with holdfast.CheckpointManager(run) as manager:
        start, state = manager.resume(like_of(manager.metadata(2)), partial="position")
        assert (start, manager.last_restore.left_out) == (3, ("position",))
        assert np.array_equal(state["host"], np.arange(5) + 2)
        assert manager.process_values(2) == states
        assert manager.process_values(0) == {"position": [{"value": 0}, {"value": 1000}]}
        with pytest.raises(errors.StepNotFoundError, match="find step 7"):
            manager.process_values(7)


class Sampler:
    """Keeps a place in data."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def like_of(metadata: CheckpointMetadata) -> dict[str, Any]:
    """A state of NumPy arrays, without the objects that keep a state."""
    arrays = {name: np.zeros(a.shape, a.dtype) for name, a in metadata.arrays.items()}
    return arrays | metadata.values


def test_states_of_which_one_part_is_damaged_are_not_given_at_all(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    results(start_job(one_host, run, 2, steps=2, interval=1))
    one_host.kill_agents()
    for folder in one_host.folder.iterdir():
        shutil.rmtree(folder)
    expire_leases(run)
    record = folder_of(run, 1) / "part-00001-of-00002.json"
    record.write_bytes(record.read_bytes().replace(b"1001", b"1002", 1))
    with holdfast.CheckpointManager(run) as manager:
        with pytest.raises(errors.CheckpointDamagedError, match="part-00001-of-00002"):
            manager.process_values(1)
        assert manager.process_values(0) == {"position": [{"value": 0}, {"value": 1000}]}


def test_objects_that_a_loop_leaves_out_are_an_error_unless_partial_names_them(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run) as manager:
        manager.save(0, {"w": np.arange(3), "loaders": [Sampler(7)]}, force=True)
        manager.wait_until_finished()
        forgotten = "loaders/0: expected nothing, found object with a state"
        for call in (manager.resume, lambda like: manager.restore(0, like=like)):
            with pytest.raises(errors.StructureMismatchError, match=forgotten):
                call({"w": np.zeros(3, int)})
        start, state = manager.resume({"w": np.zeros(3, int)}, partial="loaders")
        assert (start, manager.last_restore.left_out) == (1, ("loaders/0",))
        assert np.array_equal(state["w"], np.arange(3))
        assert manager.process_values(0) == {"loaders/0": [{"at": 7}]}
        manager.restore(0, like={"w": np.zeros(3, int)}, only="w")
        assert manager.last_restore.left_out == ("loaders/0",)
        with pytest.raises(errors.StructureMismatchError, match="w: expected nothing, found array"):
            manager.resume({"loaders": [Sampler(0)]})


@pytest.mark.soak
def test_four_processes_read_what_two_have_saved(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    results(start_job(one_host, run, 2, steps=1, interval=1, position=False))
    found = results(start_job(one_host, run, 4, steps=2, interval=1, position=False))
    assert [(r["start"], r["right"]) for r in found] == [(1, True)] * 4
    last = folder_of(run, 2, 2)
    assert len(list(last.glob("image-*-of-00004.safetensors"))) == 4
