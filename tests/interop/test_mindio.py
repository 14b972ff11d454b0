"""MindIO's calls: whole files in RAM first, ordinary files of `torch.save` soon after."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)

from holdfast.errors import CheckpointDamagedError  # noqa: E402
from holdfast.interop import mindio  # noqa: E402
from holdfast.interop.mindio import calls  # noqa: E402
from holdfast.interop.mindio.file_agent import protocol  # noqa: E402
from holdfast.interop.mindio.file_agent.ram_files import data_path  # noqa: E402
from tests.hosts import Host, is_running, stop, wait_until  # noqa: E402

TRAINING = Path(__file__).with_name("mindio_training.py")


class Held:
    """The file agent of a test: it writes nothing while it is held."""

    def __init__(self) -> None:
        self.agent = calls._session().agent

    def reopen(self) -> None:
        """Begins a session of its own, as another process would."""
        self.agent.close()
        calls._sessions.clear()
        self.agent = calls._session().agent

    def configure(self, **settings: Any) -> None:
        self.agent.call_agent("configure", protocol.Configure(**settings), protocol.Done)

    def hold(self) -> None:
        self.configure(thread_count=0)

    def release(self) -> None:
        self.configure(thread_count=4)

    def find(self, path: Path) -> protocol.FoundFile:
        return self.agent.call_agent(
            "find", protocol.FilesAt(paths=[str(path)]), protocol.FoundFile
        )

    def status(self) -> protocol.FileAgentStatus:
        return self.agent.call_agent("status", protocol.FilesAsked(), protocol.FileAgentStatus)

    def kill(self) -> None:
        pid = self.status().pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))

    def damage(self, path: Path) -> None:
        with data_path(self.agent.folder, self.find(path).name or "none").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            (last,) = file.read()
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))


@pytest.fixture
def held(one_host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    for name in ("HOLDFAST_RAM", "HOLDFAST_HOST"):
        monkeypatch.setenv(name, one_host.environment[name])
    calls._sessions.clear()
    assert mindio.initialize({"memfs.data_block_size_in_mb": "1"}) == 0
    made = Held()
    made.hold()
    yield made
    made.agent.close()
    calls._sessions.clear()


def test_a_file_is_in_ram_first_and_an_ordinary_file_soon_after(held: Held, tmp_path: Path) -> None:
    weight = torch.rand(1_000_000)
    saved = weight.clone()
    assert mindio.save({"w": weight, "step": 3}, tmp_path / "a.pt") == 1
    weight.zero_()
    assert not (tmp_path / "a.pt").exists()
    assert torch.equal(mindio.load(tmp_path / "a.pt")["w"], saved)
    held.release()
    assert mindio.flush() == 0
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert found["step"] == 3
    assert torch.equal(found["w"], saved)
    with zipfile.ZipFile(tmp_path / "a.pt") as file:
        assert file.testzip() is None
    assert os.listdir(tmp_path) == ["a.pt"]
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "a.pt").stat().st_mode & 0o777 == 0o666 & ~umask


def test_the_codes_are_those_of_mindio(
    held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.release()
    monkeypatch.chdir(tmp_path)
    assert mindio.multi_save([1], ["a", tmp_path / "b", "b"]) == 1
    assert mindio.save([2], "c", open_way="fopen") == 2
    assert mindio.multi_save([1], []) is None
    assert mindio.multi_save([1], "ab") is None
    for path, obj, way in (
        (tmp_path / "gone" / "a", 1, "memfs"),
        (tmp_path, 1, "memfs"),
        (3, 1, "memfs"),
        ("d", lambda: 1, "memfs"),
        ("d", lambda: 1, "fopen"),
        ("d", 1, "mmap"),
    ):
        assert mindio.save(obj, path, way) == -1
    assert mindio.flush() == 0
    assert {name: torch.load(name) for name in sorted(os.listdir())} == {
        "a": [1],
        "b": [1],
        "c": [2],
    }
    assert mindio.initialize({"memfs.data_block_pool_capacity_in_gb": 0}) == -1
    assert mindio.initialize({"memfs.write.parallel.enabled": "yes"}) == -1
    assert mindio.initialize({"memfs.pool": "1"}) == -1
    assert mindio.initialize({"memfs.data_block_pool_capacity_in_gb": "2"}) == 0
    assert held.status().capacity_bytes == 2 * 1024**3
    with pytest.raises(FileNotFoundError):
        mindio.load(tmp_path / "gone")
    with pytest.raises(ValueError, match="memfs or fopen"):
        mindio.load("a", "mmap")


def test_a_later_save_replaces_an_earlier_one_whoever_writes_it(held: Held, tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert mindio.save("first", path) == 1
    assert mindio.save("second", path) == 1
    assert mindio.load(path) == "second"
    held.release()
    assert mindio.flush() == 0
    assert torch.load(path) == "second"
    held.hold()
    assert mindio.save("third", path) == 1
    assert mindio.save("fourth", path, "fopen") == 2
    held.release()
    assert mindio.flush() == 0
    assert (torch.load(path), mindio.load(path)) == ("fourth", "fourth")
    held.hold()
    assert mindio.save("fifth", path) == 1
    threading.Timer(0.3, held.release).start()
    assert mindio.load(path, "fopen") == "fifth"
    assert os.listdir(tmp_path) == ["a"]


def test_of_saves_to_one_path_at_a_time_one_is_whole_and_none_is_lost(
    held: Held, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    held.release()
    codes: set[tuple[str, int]] = set()
    ways = ["memfs"] * 6 + ["fopen"] * 2

    def save(number: int, way: str) -> None:
        state = (number, torch.full((200_000,), number))
        codes.add((way, mindio.save(state, path, way)))

    threads = [threading.Thread(target=save, args=one) for one in enumerate(ways)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == {("memfs", 1), ("fopen", 2)}
    assert mindio.flush() == 0
    number, weight = torch.load(path)
    assert bool((weight == number).all())
    assert os.listdir(tmp_path) == ["a"]


def test_a_save_that_fails_leaves_the_earlier_one(held: Held, tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert mindio.save("first", path) == 1
    for way in ("fopen", "memfs"):
        assert mindio.save([torch.zeros(100), lambda: 1], path, way) == -1
    assert mindio.load(path) == "first"
    held.release()
    assert mindio.flush() == 0
    assert torch.load(path) == "first"
    held.hold()
    assert mindio.save("second", path) == 1
    assert mindio.save("third", path) == 1
    held.damage(path)
    held.release()
    assert mindio.flush() == 1
    assert torch.load(path) == "second"
    assert os.listdir(tmp_path) == ["a"]


def test_flush_waits_for_the_other_files_where_one_is_lost(held: Held, tmp_path: Path) -> None:
    assert mindio.save("lost", tmp_path / "a") == 1
    (marker,) = tmp_path.iterdir()
    marker.unlink()
    held.release()
    wait_until(lambda: held.status().pending_count == 0)
    held.hold()
    assert mindio.save("later", tmp_path / "a") == 1
    threading.Timer(0.5, held.release).start()
    assert mindio.flush() == 1
    assert torch.load(tmp_path / "a") == "later"


def test_an_agent_that_hangs_costs_one_wait(
    held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mindio.save("older", tmp_path / "a")
    pid = held.status().pid
    monkeypatch.setattr("holdfast.interop.mindio.file_agent.client.CALL_SECS", 5.0)
    held.reopen()
    stop(pid)
    try:
        assert mindio.save("newer", tmp_path / "a") == 2
        start = time.monotonic()
        assert mindio.save("newest", tmp_path / "a") == 2
        assert mindio.load(tmp_path / "a") == "newest"
        assert mindio.flush() == 1
        assert time.monotonic() - start < 5
    finally:
        os.kill(pid, signal.SIGCONT)
    held.reopen()
    held.release()
    mindio.flush()
    # The older save is cancelled, although the agent could not be asked.
    assert torch.load(tmp_path / "a") == "newest"
    assert os.listdir(tmp_path) == ["a"]


def test_a_changed_byte_in_ram_is_never_loaded_nor_written(held: Held, tmp_path: Path) -> None:
    path = tmp_path / "a"
    mindio.save(torch.zeros(1000), path)
    held.damage(path)
    with pytest.raises(CheckpointDamagedError, match="load an older one"):
        mindio.load(path)
    held.release()
    assert mindio.flush() == 1
    assert os.listdir(tmp_path) == []
    assert mindio.flush() == 0  # reported once
    mindio.save(torch.ones(1000), path)
    assert mindio.flush() == 0
    held.damage(path)
    assert torch.equal(mindio.load(path), torch.ones(1000))
    assert held.find(path).name is None


def test_without_room_in_ram_a_file_is_written_at_once_which_is_reported_once(
    held: Held, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held.configure(capacity_bytes=3 * 1024**2)
    big = torch.rand(400_000)
    with caplog.at_level(logging.WARNING):
        codes = [mindio.save(big, tmp_path / str(number)) for number in range(4)]
    assert codes == [1, 2, 2, 2]
    assert [
        record.message for record in caplog.records if "written directly" in record.message
    ] == [caplog.records[0].message]
    assert "data_block_pool_capacity_in_gb" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] != ".") == ["1", "2", "3"]
    held.release()
    assert mindio.flush() == 0
    # What is written makes room.
    assert mindio.save(big, tmp_path / "4") == 1
    assert held.status().used_bytes <= 3 * 1024**2


def test_preloaded_files_are_loaded_from_ram_until_they_change(held: Held, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        torch.save(path.name, path)
    assert mindio.preload(paths[0], iter(paths[1:])) == 0
    assert all(held.find(path).name for path in paths)
    assert mindio.preload(*paths) == 0
    assert [mindio.load(path) for path in paths] == ["a", "b", "c"]
    torch.save("new", paths[0])
    assert mindio.load(paths[0]) == "new"
    assert mindio.preload(tmp_path / "gone", paths[0]) == 1
    assert held.find(paths[0]).name
    assert mindio.preload(tmp_path) == 1
    assert mindio.preload() == 0


def test_a_checker_waits_for_whole_files_and_no_longer_than_its_timeout(
    held: Held, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[tuple[int, Any]] = []
    done = threading.Semaphore(0)

    def callback(result: int, context: Any) -> None:
        called.append((result, context))
        done.release()
        raise RuntimeError("in the callback") if len(called) == 1 else SystemExit(3)

    folder = tmp_path / "iter_0000001"
    (folder / "rank").mkdir(parents=True)
    (folder / "rank" / "a").write_text("older")
    # There are two files, but one is about to be replaced.
    torch.save(2, folder / "b")
    mindio.save(1, folder / "rank" / "a")
    assert mindio.register_checker(callback, {str(folder): 2}, "late", 1) == 1
    assert done.acquire(timeout=240)
    assert called == [(1, "late")]
    assert mindio.register_checker(callback, {str(folder): 2}, "whole", 30) == 1
    held.release()
    assert done.acquire(timeout=240)
    assert called[1:] == [(0, "whole")]
    assert torch.load(folder / "rank" / "a") == 1
    wait_until(lambda: caplog.text.count("the callback failed") == 2)
    for arguments in (
        (None, {}, None, 10),
        (callback, [str(folder)], None, 10),
        (callback, {str(folder): "2"}, None, 10),
        (callback, {}, None, 0),
        (callback, {}, None, 3601),
    ):
        assert mindio.register_checker(*arguments) is None
    assert len(called) == 2


def test_flush_reports_a_file_that_cannot_be_written_and_does_not_hang(
    held: Held, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    mindio.save(1, tmp_path / "gone" / "a")
    mindio.save(2, tmp_path / "b")
    (marker,) = tmp_path.glob(".b.*")
    (gone,) = (tmp_path / "gone").iterdir()
    gone.unlink()
    (tmp_path / "gone").rmdir()
    marker.unlink()
    marker.mkdir()
    held.release()
    assert mindio.flush() == 1
    assert torch.equal(torch.tensor(mindio.load(tmp_path / "b")), torch.tensor(2))
    marker.rmdir()
    marker.touch()
    wait_until(lambda: (tmp_path / "b").exists())
    assert mindio.flush() == 0
    assert not (tmp_path / "gone").exists()


def test_converting_copies_files_of_torch_only(held: Held, tmp_path: Path) -> None:
    source, to = tmp_path / "source", tmp_path / "to"
    (source / "rank").mkdir(parents=True)
    mindio.save("in RAM", source / "rank" / "a")
    assert mindio.convert(source / "rank" / "a", tmp_path / "a") == 0
    assert torch.load(tmp_path / "a") == "in RAM"
    held.release()
    assert mindio.flush() == 0
    assert mindio.convert(source, to) == 0
    assert torch.load(to / "rank" / "a") == "in RAM"
    (source / "text").write_text("no file of torch")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for src, dst in (
        (source / "text", tmp_path / "b"),
        (source / "gone", tmp_path / "b"),
        (tmp_path / "link", tmp_path / "b"),
        (tmp_path / "a", tmp_path / "gone" / "b"),
    ):
        assert mindio.convert(src, dst) == -1
    assert sorted(os.listdir(tmp_path)) == ["a", "link", "source", "to"]


def test_a_killed_agent_leaves_no_half_file_and_the_next_one_writes_what_it_had(
    held: Held, tmp_path: Path
) -> None:
    older, big = torch.zeros(10), torch.rand(8_000_000)
    torch.save(older, tmp_path / "big")
    mindio.save(big, tmp_path / "big")
    (marker,) = tmp_path.glob(".big.*")
    held.release()
    wait_until(lambda: not marker.exists() or marker.stat().st_size > 0)
    held.kill()
    assert torch.load(tmp_path / "big").shape in (older.shape, big.shape)
    assert mindio.save("next", tmp_path / "next") == 1
    assert mindio.flush() == 0
    assert torch.equal(torch.load(tmp_path / "big"), big)
    assert torch.load(tmp_path / "next") == "next"
    held.hold()
    assert mindio.save("held", tmp_path / "held") == 1
    held.configure(capacity_bytes=77 * 1024**2)
    held.kill()
    assert mindio.load(tmp_path / "held") == "held"
    # The settings stay as they were.
    assert held.status().capacity_bytes == 77 * 1024**2
    assert not (tmp_path / "held").exists()
    held.release()
    assert mindio.flush() == 0
    assert sorted(os.listdir(tmp_path)) == ["big", "held", "next"]


SAVER = """
import os, signal, sys, torch
from holdfast.interop import mindio
print(mindio.save(torch.full((2_000_000,), 7.0), sys.argv[1]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_file_agent_imports_neither_a_framework_nor_the_calls() -> None:
    code = (
        "import sys; import holdfast.interop.mindio.file_agent.process as _;"
        "print({'torch', 'jax', 'holdfast.interop.mindio.calls'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_a_trainer_killed_right_after_save_has_its_file(one_host: Host, tmp_path: Path) -> None:
    path = tmp_path / "a"
    done = subprocess.run(
        [sys.executable, "-c", SAVER, path],
        env=one_host.environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "1\n"), done.stderr
    wait_until(path.exists)
    assert torch.equal(torch.load(path), torch.full((2_000_000,), 7.0))


def test_an_agent_leaves_what_it_has_not_written_to_the_next_one_and_frees_the_rest(
    held: Held, tmp_path: Path
) -> None:
    mindio.save(1, tmp_path / "a")
    pid = held.status().pid
    os.kill(pid, signal.SIGTERM)
    held.agent.close()
    wait_until(lambda: not is_running(pid))
    assert not (tmp_path / "a").exists()
    held.release()
    assert mindio.flush() == 0
    assert torch.load(tmp_path / "a") == 1
    held.configure(linger_secs=0)
    held.agent.close()
    wait_until(lambda: not held.agent.folder.exists())
    assert mindio.load(tmp_path / "a") == 1
    assert not held.agent.folder.exists()


def _train(one_host: Host, folder: Path, *, kill: int = 0) -> list[list[str]]:
    """Train on two ranks up to iteration 12; return what each has printed at its end."""
    ranks = [
        one_host.start(
            *("-m", "tests.interop.mindio_training", folder, rank, 2, 12, kill),
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=100) for process in ranks]
    codes = [process.returncode for process in ranks]
    assert codes == [-signal.SIGKILL if kill else 0] * 2, outputs
    return [output.split()[1:] for output, _ in outputs]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_killed_megatron_training_ends_with_the_same_bits(one_host: Host, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    expected = _train(one_host, tmp_path / "whole")
    assert [start for start, _ in expected] == ["0", "0"]
    tracker = tmp_path / "killed" / "latest_checkpointed_iteration.txt"
    _train(one_host, tmp_path / "killed", kill=9)
    # Both ranks were killed right after the save of iteration 9, whose files appear nevertheless.
    saved = [tmp_path / "killed" / "iter_0000009" / f"mp_rank_0{r}" for r in range(2)]
    wait_until(lambda: all((path / "model_optim_rng.pt").exists() for path in saved))
    assert torch.load(saved[1] / "model_optim_rng.pt", weights_only=False)["iteration"] == 9
    assert tracker.read_text() == "6"
    resumed = _train(one_host, tmp_path / "killed")
    assert resumed == [["6", digest] for _, digest in expected]
    assert tracker.read_text() == "12"
    files = [path for path in (tmp_path / "killed").rglob("*") if path.name.startswith(".")]
    assert files == []
