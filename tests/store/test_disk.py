"""The disk store beyond the contract: no leftovers, errors with a remedy."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import stat
import threading
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.errors import (
    HoldfastError,
    NotARunError,
    ObjectNotFoundError,
    OutOfSpaceError,
    StorageError,
)
from holdfast.store import object_folder
from holdfast.store.disk import DiskStore
from holdfast.store.files.file_system import LocalFileSystem
from holdfast.store.files.free_names import UNFINISHED
from holdfast.store.object_folder import make_folder
from holdfast.testing.block_source import BlockSource, SourceFailedError, fail
from tests.engine.making import memory_folder
from tests.store.crash_states import materialise, power_losses
from tests.store.places import mounted, open_disk
from tests.store.recording import RecordingFileSystem, Sync

MIB = 1 << 20


@pytest.fixture
def store(in_memory: Path) -> DiskStore:
    return open_disk(in_memory / "run")


def _names(root: Path) -> list[str]:
    """All files there are, hidden ones too."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir())


def _open_files() -> list[str]:
    """What the descriptors of this process lead to."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def _failing() -> BlockSource:
    return BlockSource([bytes(5000)] * 2, on_block=lambda start: start and fail(start))


def _too_short() -> BlockSource:
    return BlockSource([b"x"], size_bytes=10)


@pytest.mark.parametrize(
    ("limit", "value", "advice"),
    [
        (resource.RLIMIT_FSIZE, 100_000, "ulimit -f"),
        (resource.RLIMIT_NOFILE, 3, "ulimit -n"),
    ],
)
def test_a_limit_of_the_process_is_named_and_leaves_no_file(
    store: DiskStore, limit: int, value: int, advice: str
) -> None:
    store.put("a/kept", b"x")
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, hard))
    try:
        with pytest.raises(StorageError, match=advice):
            store.put("a/long", bytes(MIB))
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert _names(store.root) == ["a/kept"]
    store.put("a/long", bytes(MIB))


def test_a_failed_put_leaves_no_file(store: DiskStore) -> None:
    store.put("a/kept", b"x")
    with pytest.raises(SourceFailedError):
        store.put("a/b", _failing())
    with pytest.raises(HoldfastError):
        store.put("a/b", _too_short())
    assert not store.put_if_absent("a/kept", b"y")
    assert _names(store.root) == ["a/kept"]


def test_discarding_removes_every_file_of_an_interrupted_put_and_nothing_else(
    store: DiskStore,
) -> None:
    store.put("a/b/c", b"x")
    left = [".c.0123.unfinished", "b/.c.4567.unfinished", "b/.d.89ab.unfinished"]
    for name in [*left, ".hidden", "b/c.unfinished"]:
        (store.root / "a" / name).write_bytes(b"torn")
    (store.root / ".e.unfinished").write_bytes(b"elsewhere")
    store.discard_unfinished("a")
    assert _names(store.root) == [".e.unfinished", "a/.hidden", "a/b/c", "a/b/c.unfinished"]


def test_what_is_no_plain_file_is_not_listed_and_no_link_is_followed(
    store: DiskStore, in_memory: Path
) -> None:
    store.put("a/b", b"x")
    outside = in_memory / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    folder = store.root / "a"
    (folder / "link").symlink_to(outside / "secret")
    (folder / "links").symlink_to(outside)
    (folder / "dangling").symlink_to(outside / "nothing")
    os.mkfifo(folder / "pipe")
    (folder / ".dot").write_bytes(b"")
    assert [s.key for s in store.list("a")] == ["a/b"]
    for call in (store.get, lambda key: store.open(key).__enter__()):
        with pytest.raises(StorageError):
            call("a/link")


def test_folders_go_with_their_last_object_and_the_root_stays(store: DiskStore) -> None:
    store.put("a/b/c/d", b"x")
    store.put("a/e", b"x")
    store.delete("a/b/c/d")
    assert not (store.root / "a" / "b").exists()
    store.delete("a/e")
    assert store.root.is_dir()
    assert list(store.root.iterdir()) == []


def test_an_object_is_readable_by_others_as_far_as_the_umask_allows(store: DiskStore) -> None:
    old = os.umask(0o027)
    try:
        store.put("a", b"x")
        store.put_if_absent("b", b"x")
    finally:
        os.umask(old)
    assert [(store.root / k).stat().st_mode & 0o777 for k in "ab"] == [0o640, 0o640]


def test_a_failed_call_leaves_no_open_file(store: DiskStore) -> None:
    store.put("a/b", b"x")
    for _ in range(5):
        for call in (
            lambda: store.get("a"),
            lambda: store.get("never"),
            lambda: store.put("a/b", _too_short()),
            lambda: store.put("a/b/c", b"x"),
            lambda: store.put("a/c", _failing()),
        ):
            with contextlib.suppress(HoldfastError, SourceFailedError):
                call()
    # The directory itself is held open, so that it is found again wherever it is moved.
    assert [path for path in _open_files() if path.startswith(f"{store.root}/")] == []


def test_an_error_says_what_failed_on_what_and_what_to_do(store: DiskStore) -> None:
    store.put("a", b"x")
    with pytest.raises(StorageError, match=r"write .*/run/a/b: Not a directory .*; check the"):
        store.put("a/b", b"x")
    with pytest.raises(ObjectNotFoundError, match=r"open .*/run/never: there is no such object"):
        store.get("never")


def test_a_full_disk_is_told_as_such_and_leaves_what_was_there(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "small", "size=1m") as folder:
        store = open_disk(folder / "run")
        store.put("a/old", b"whole")
        for call in (
            lambda: store.put("a/old", bytes(4 * MIB)),
            lambda: store.put("a/new", bytes(4 * MIB)),
            lambda: store.put_if_absent("a/new", bytes(4 * MIB)),
        ):
            with pytest.raises(OutOfSpaceError, match=r"no space left .*; free some"):
                call()
        assert _names(folder) == ["run/a/old"]
        assert store.get("a/old") == b"whole"
        store.put("a/new", b"again")


class _Quota(LocalFileSystem):
    """A file system with a quota that is reached at one of the calls: as NFS, some only at sync."""

    def __init__(self, call: str) -> None:
        self.call = call

    def write(self, fd: int, data: memoryview) -> int:
        self._check("write", fd)
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        self._check("sync", fd)
        super().sync(fd)

    def _check(self, call: str, fd: int) -> None:
        if call == self.call and stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_quota_that_is_reached_is_named_and_leaves_what_was_there(
    tmp_path: Path, call: str
) -> None:
    files = _Quota("")
    (tmp_path / "run").mkdir()
    store = DiskStore(tmp_path / "run", SystemClock(), files)
    store.put("a/old", b"whole")
    files.call = call
    for key in ("a/old", "a/new"):
        with pytest.raises(OutOfSpaceError, match=r"Disk quota exceeded\); free some"):
            store.put(key, bytes(MIB))
    files.call = ""
    assert _names(tmp_path) == ["run/a/old"]
    assert store.get("a/old") == b"whole"
    store.put("a/new", b"again")


def test_a_read_only_disk_is_told_as_such(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "small", "size=1m,ro") as folder:
        store = open_disk(folder)
        with pytest.raises(StorageError, match="check its permissions and mount") as error:
            store.put("a", b"x")
        assert isinstance(error.value.__cause__, OSError)
        assert error.value.__cause__.errno == errno.EROFS


def test_a_truncated_object_says_where_it_ends(store: DiskStore) -> None:
    store.put("a", bytes(100))
    with store.open("a") as reader:
        os.truncate(store.root / "a", 60)
        with pytest.raises(StorageError, match=r"bytes up to 90, found its end at 60"):
            reader.read_into(10, memoryview(bytearray(80)))


def test_two_puts_of_one_key_at_once_leave_one_of_the_two_whole(store: DiskStore) -> None:
    size = 300_000
    barrier = threading.Barrier(2, timeout=240)

    def put(byte: bytes) -> None:
        other = open_disk(store.root)
        for _ in range(20):
            barrier.wait()
            other.put("a/b", BlockSource([byte * (size // 3)] * 3))

    threads = [threading.Thread(target=put, args=(byte,)) for byte in (b"1", b"2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get("a/b") in (b"1" * size, b"2" * size)
    assert _names(store.root) == ["a/b"]


def test_an_object_put_after_others_is_never_more_durable_than_they(tmp_path: Path) -> None:
    """Also where the process that made their folders was killed before it synced anything."""
    recorder = RecordingFileSystem({"disk": tmp_path})
    make_folder(recorder, tmp_path / "run", tmp_path, durable=True)
    recorder.make_folder(tmp_path / "run" / "a")
    recorder.make_folder(tmp_path / "run" / "a" / "b")
    for name in ("1", "2"):
        fd = recorder.open(tmp_path / "run" / "a" / "b" / name, os.O_CREAT | os.O_WRONLY, 0o600)
        recorder.write(fd, memoryview(b"bytes"))
        recorder.sync(fd)
        recorder.close(fd)
    store = DiskStore(tmp_path / "run", SystemClock(), recorder)
    assert store.put_if_absent("c/last", b"x", after=["a/b/1", "a/b/2"])
    count = 0
    for state in power_losses(recorder.log, ["disk"]):
        with memory_folder() as fresh:
            materialise(state.tree, {"disk": Path(fresh)})
            if not (Path(fresh) / "run").is_dir():
                continue
            left = open_disk(Path(fresh) / "run")
            if [stored.key for stored in left.list("c")]:
                count += 1
                assert [s.key for s in left.list("a")] == ["a/b/1", "a/b/2"], state.description
    assert count


def test_what_was_deleted_in_one_call_is_synced_once_a_folder_and_stays_deleted(
    tmp_path: Path,
) -> None:
    recorder = RecordingFileSystem({"disk": tmp_path})
    make_folder(recorder, tmp_path / "run", tmp_path, durable=True)
    store = DiskStore(tmp_path / "run", SystemClock(), recorder)
    keys = [f"a/{number}" for number in range(20)]
    for key in (*keys, "a/kept"):
        store.put(key, b"x")
    before = len(recorder.log.operations)
    store.delete(*keys)
    done = recorder.log.operations[before:]
    assert sum(isinstance(operation, Sync) for operation in done) == 1
    recorder.add_mark("deleted")
    count = 0
    for state in power_losses(recorder.log, ["disk"]):
        if "deleted" in recorder.log.marks(state.done_count):
            count += 1
            with memory_folder() as fresh:
                materialise(state.tree, {"disk": Path(fresh)})
                left = open_disk(Path(fresh) / "run")
                assert [stored.key for stored in left.list("a")] == ["a/kept"], state.description
    assert count


class _Refusing(LocalFileSystem):
    """A file system like some of FUSE and SMB: `open` takes flags that later calls refuse."""

    def __init__(self) -> None:
        self.direct_opens = 0

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self.direct_opens += bool(flags & os.O_DIRECT)
        return super().open(path, flags, mode)

    def write(self, fd: int, data: memoryview) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        super().sync(fd)


def test_a_file_system_that_refuses_direct_writes_and_syncs_of_folders_works_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_folder, "_reported_devices", set())
    files = _Refusing()
    (tmp_path / "run").mkdir()
    store = DiskStore(tmp_path / "run", SystemClock(), files)
    for number in range(3):
        store.put(f"a/{number}", bytes([number]) * MIB)
        assert store.put_if_absent(f"b/{number}", b"x")
    assert [store.get(f"a/{n}") for n in range(3)] == [bytes([n]) * MIB for n in range(3)]
    assert _names(tmp_path / "run") == ["a/0", "a/1", "a/2", "b/0", "b/1", "b/2"]
    assert files.direct_opens == 1
    assert sorted(record.message.split(" its file")[0] for record in caplog.records) == [
        f"sync the folder {tmp_path}:",
        f"write to {tmp_path / 'run'}:",
    ]


def test_a_place_is_unused_until_something_whole_is_stored_there(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "outer" / "run", SystemClock())
    assert store.is_unused()
    for _ in range(2):
        # Two processes may prepare it at the same time.
        store.prepare_place()
        assert store.is_unused()
    (store.root / f".record.1{UNFINISHED}").touch()
    assert store.is_unused()
    assert not store.has_object("record.json")
    store.put("record.json", b"{}")
    assert store.has_object("record.json")
    assert not store.is_unused()
    with pytest.raises(NotARunError, match="expected a directory, found a file"):
        DiskStore(store.root / "record.json", SystemClock()).is_unused()
    with pytest.raises(StorageError):
        DiskStore(store.root / "record.json" / "run", SystemClock()).prepare_place()


def test_new_files_are_opened_for_reading_too(tmp_path: Path) -> None:
    opened: dict[str, int] = {}

    class NotingFiles(LocalFileSystem):
        def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
            if flags & os.O_CREAT:
                opened[path.name] = flags & os.O_ACCMODE
            return super().open(path, flags, mode)

    store = DiskStore(tmp_path, SystemClock(), NotingFiles())
    store.put("a", b"a" * 10_000)
    store.put_if_absent("b", b"b")
    # A mount by smbnetfs is gone for seconds where the size of any other file is set.
    assert len(opened) == 2
    assert set(opened.values()) == {os.O_RDWR}
