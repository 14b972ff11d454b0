"""Put links, pipes, sockets, folders and huge files in the place of a run's files.

No call waits for them or follows them, and none allocates memory for what they only claim to hold.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from holdfast.adapt.contract import EVERYTHING
from holdfast.cli.main import main as command
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.run import read_run
from holdfast.engine.reading.view import view_of
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.names import manifest_key, parse_checkpoint_name, parse_part_name
from holdfast.store.disk import DiskStore
from holdfast.trainer.restore.restoring import LoneReader, RestoredState, Restorer
from tests.engine.making import memory_folder
from tests.trust.damaged_run import (
    NEWEST,
    TIMELINE,
    DamagedRun,
    NestedFramework,
    right_state,
    same_tree,
)

WAIT_SECS = 10.0
MEMORY_BYTES = 256 * 1024 * 1024
HUGE_BYTES = 1 << 40

FOLDER = f"checkpoints/{NEWEST}"
FILES = {
    "run": "holdfast.json",
    "attempt": "attempts/000000003.json",
    "copy": "attempts/000000003.copy.json",
    "manifest": manifest_key(NEWEST),
    "part": f"{FOLDER}/part-00000-of-00001.json",
    "image": f"{FOLDER}/image-00000-of-00001.safetensors",
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[DamagedRun]:
    with memory_folder() as root:
        made = DamagedRun(Path(root), 1)
        # As a reader opens it that has written nothing.
        made.durable = DiskStore(made.run, SystemClock())
        monkeypatch.setenv("HOLDFAST_RAM", f"{root}/host")
        yield made
        made.close()


def _session(path: Path) -> None:
    good = path.with_name(f".{path.name}")
    path.rename(good)
    path.symlink_to(good)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _socket(path: Path) -> None:
    path.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").write_bytes(b"x")


def _huge(path: Path) -> None:
    os.truncate(path, HUGE_BYTES)


HUGE = "a file of 1 TiB"
THINGS: dict[str, Callable[[Path], None]] = {
    "a link": _session,
    "a pipe": _pipe,
    "a socket": _socket,
    "a folder": _folder,
    HUGE: _huge,
}


def in_time(path: Path, call: Callable[[], None], secs: float = WAIT_SECS) -> None:
    """Runs `call` on a thread; where it waits for a pipe, the pipe is ended and the test fails."""
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call)
        waited = bool(wait([called], secs).not_done)
        while not called.done():
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            wait([called], 0.05)
    assert not waited, f"waited {secs} s for {path}"
    called.result()


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Refuses memory that goes far beyond what is in use now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def restored(run: DamagedRun) -> RestoredState:
    rounds = LoneReader(rank=0, count=1, is_outside=False)
    durable = run.durable
    found = Restorer(NestedFramework(), rounds, SystemClock()).newest(
        lambda: view_of([durable], durable), EVERYTHING
    )
    assert found is not None
    assert same_tree(found.state, right_state(found.id, 0, False))
    return found


CASES = [(kind, thing) for kind in FILES for thing in THINGS]

# A manifest that is no file is none: all parts are sealed, so the checkpoint is complete. Bytes
# behind an image's last chunk are no part of it. What is in the others' place is damage.
OLDER = {("manifest", HUGE), ("part", HUGE)}


@pytest.mark.parametrize(("kind", "thing"), CASES)
def test_a_restore_is_right_whatever_stands_in_place_of_one_file(
    run: DamagedRun, kind: str, thing: str
) -> None:
    path = run.run / FILES[kind]
    THINGS[thing](path)

    def read() -> None:
        with little_memory():
            read_run(run.durable, str(run.run))
            found = restored(run)
        is_damaged = (kind, thing) in OLDER or (kind in ("part", "image") and thing != HUGE)
        assert found.id == (TIMELINE[-2] if is_damaged else NEWEST)

    in_time(path, read, WAIT_SECS)


@pytest.mark.parametrize(("kind", "thing"), CASES)
def test_the_command_line_ends_whatever_stands_in_place_of_one_file(
    run: DamagedRun, kind: str, thing: str
) -> None:
    path = run.run / FILES[kind]
    THINGS[thing](path)

    def look_at() -> None:
        for name in ("ls", "show", "verify"):
            out = io.StringIO()
            with (
                little_memory(),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(out),
            ):
                code = command([name, str(run.run)])
            assert code in (0, 1)

    in_time(path, look_at, WAIT_SECS)


# Folders.


@pytest.mark.parametrize("name", ["checkpoints", "attempts"])
def test_a_linked_folder_of_the_format_is_refused_by_name(run: DamagedRun, name: str) -> None:
    folder = run.run / name
    folder.rename(run.root / "elsewhere")
    folder.symlink_to(run.root / "elsewhere")
    with pytest.raises(StorageError, match=f"{name}: expected a folder, found a symbolic link"):
        view_of([run.durable], run.durable)


def test_a_linked_checkpoint_is_none(run: DamagedRun) -> None:
    folder = run.run / FOLDER
    folder.rename(run.root / "elsewhere")
    folder.symlink_to(run.root / "elsewhere")
    assert restored(run).id == TIMELINE[-2]


def test_a_link_to_itself_and_links_to_nowhere_are_none(run: DamagedRun) -> None:
    (run.run / "checkpoints/000000070.3-00000003").symlink_to("000000070.3-00000003")
    (run.run / "checkpoints/000000080.3-00000003").symlink_to("/nowhere")
    (run.run / "checkpoints/000000090.3-00000003").symlink_to("..")
    assert restored(run).id == NEWEST


def test_a_delete_through_a_link_touches_nothing(run: DamagedRun) -> None:
    outside = run.root / "outside"
    outside.mkdir()
    (outside / "part-00000-of-00001.json").write_bytes(b"mine")
    (run.run / "checkpoints/000000070.3-00000003").symlink_to(outside)
    for call in (run.durable.delete, lambda key: run.durable.put(key, b"")):
        with pytest.raises(HoldfastError):
            call("checkpoints/000000070.3-00000003/part-00000-of-00001.json")
    assert (outside / "part-00000-of-00001.json").read_bytes() == b"mine"


def test_a_linked_folder_of_events_does_not_concern_a_reader(run: DamagedRun) -> None:
    (run.run / "events").symlink_to("/etc")
    assert restored(run).id == NEWEST


@pytest.mark.parametrize("name", ["checkpoints", "attempts"])
def test_a_file_in_place_of_a_folder_is_as_if_nothing_were_there(
    run: DamagedRun, name: str
) -> None:
    (run.run / name).rename(run.root / "elsewhere")
    (run.run / name).write_bytes(b"x")
    assert view_of([run.durable], run.durable).timeline == ()


def test_folders_in_folders_without_end_are_ignored(run: DamagedRun) -> None:
    folder = os.open(run.run / "checkpoints", os.O_RDONLY)
    try:
        for _ in range(1100):
            os.mkdir("d", dir_fd=folder)
            deeper = os.open("d", os.O_RDONLY, dir_fd=folder)
            os.close(folder)
            folder = deeper
    finally:
        os.close(folder)
    try:
        assert restored(run).id == NEWEST
    finally:
        _remove_chain(run.run / "checkpoints")


def _remove_chain(root: Path) -> None:
    folders = [os.open(root, os.O_RDONLY)]
    with contextlib.suppress(FileNotFoundError):
        while True:
            folders.append(os.open("d", os.O_RDONLY, dir_fd=folders[-1]))
    os.close(folders.pop())
    while folders:
        os.rmdir("d", dir_fd=folders[-1])
        os.close(folders.pop())


# Names.

HOSTILE_NAMES = [
    *(
        "000000050.3-00000003\n",
        "000000050.03-00000003",
        "0000000050.3-00000003",
        "00000005٣.3-00000003",
        "-00000050.3-00000003",
        "000000050.-3-00000003",
        "000000050.3",
        "000000050.3-0000000",
        "000000050.3-0000000G",
        "000000050.3-0000000A",
        "000000050.3-000000030",
    ),
    *(
        "9" * 16 + ".1-00000001",
        "000000050.0-00000000",
        "000000050.9999999999-00000003",
        "000000050.3-00000003 ",
        "000000050,3-00000003",
    ),
    *("%2e%2e", "\udcff\udcfe", "CON", "a" * 255),
]


def test_folders_of_other_names_are_ignored(run: DamagedRun) -> None:
    before = list_checkpoints(run.durable)
    made = []
    try:
        for name in HOSTILE_NAMES:
            assert parse_checkpoint_name(name) is None
            folder = run.run / "checkpoints" / name
            folder.mkdir()
            made.append(folder)
            (folder / "part-00000-of-00001.json").write_bytes(b"{}")
        assert list_checkpoints(run.durable) == before
    finally:
        for folder in made:
            (folder / "part-00000-of-00001.json").unlink()
            folder.rmdir()


@pytest.mark.parametrize(
    "name",
    [
        *("part-00002-of-00002.json", "part-00000-of-1000001.json", "part-000000-of-00002.json"),
        *("part-00000-of-00002.json\n", "part--0001-of-00002.json", "part-0000٣-of-00004.json"),
    ],
)
def test_names_of_parts_that_cannot_be_are_none(name: str) -> None:
    assert parse_part_name(name) is None


def test_stray_parts_of_another_count_do_not_hide_the_checkpoint(run: DamagedRun) -> None:
    made = []
    try:
        for name in ("part-00000-of-00003.json", "image-00000-of-00003.safetensors"):
            made.append(run.run / FOLDER / name)
            made[-1].write_bytes(b"stray")
        view = view_of([run.durable], run.durable)
        assert view.newest_sound() == NEWEST
    finally:
        for path in made:
            path.unlink()
