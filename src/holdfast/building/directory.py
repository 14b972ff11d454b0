"""The directory of one checkpoint, from its hidden beginning to its place.

The directory is a run with one attempt and one checkpoint, of step 0, so everything that reads runs
reads it.

Invariants:
- The directory is built beside its place, under a hidden name, and put there by one rename. So it
  is there whole, or not at all; a crash leaves a hidden directory, which nothing loads and the next
  save to the same place removes. A directory that is being built is locked by its process.
- Where one may be replaced, the old directory stays in place until the new one is on the disk.
  Where the file system cannot exchange two directories in one step, a crash between two renames
  leaves the old one under a hidden name too.
- A file that no save made is never removed. The old directory is checked before the exchange and
  after it, when its path no longer leads there; then only files that saves make are removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.clock import Clock
from holdfast.engine.lifecycle.attempts import AttemptStart, attempt_numbers, begin_attempt
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.run import create_run, read_run_record
from holdfast.errors import HoldfastError, InvalidArgumentError, StorageError
from holdfast.format.names import (
    EVENTS,
    LEASES,
    MANIFESTS,
    RUN_FILE,
    TOKEN_CHARS,
    AttemptId,
    CheckpointId,
    attempt_keys,
    image_key,
    manifest_key,
    parse_part_name,
    part_key,
)
from holdfast.format.records import RunPlace
from holdfast.local_agent.place import host_name
from holdfast.store.disk import DiskStore
from holdfast.store.files.file_system import LOCAL
from holdfast.store.files.free_names import UNFINISHED
from holdfast.store.files.renames import exchange, rename_to_new
from holdfast.store.location import RunLocation

SAVED = CheckpointId(0, AttemptId(1, "0" * TOKEN_CHARS))
"""The only checkpoint of a saved state; its names do not depend on chance."""
STEP = SAVED.step
"""Its step, by which it is read."""

log = logging.getLogger(__name__)


def local_path(place: str | os.PathLike[str]) -> Path | None:
    """Return the absolute path that a user has named; None for the URL of a bucket.

    Raises:
        InvalidArgumentError: it is neither a path nor a URL of a bucket and a prefix in it.
    """
    location = RunLocation.parse(place)
    return None if location.is_url else location.folder


def check_replaceable(place: Path, *, directory: Path, clock: Clock) -> None:
    """Check that `place` holds what an earlier save to `directory` made, and nothing else.

    Raises:
        InvalidArgumentError: it does not; the message names the first files of others.
    """
    if not is_saved_one(place, clock):
        raise InvalidArgumentError(
            f"save to {directory}: expected what an earlier save made, found something else, which "
            "is not overwritten; remove it, or give a new path"
        )
    _, foreign = _files(place)
    if foreign:
        raise InvalidArgumentError(
            f"save to {directory}: expected only what an earlier save made there, found "
            f"{', '.join(foreign[:5])}, which would be removed; move it away, or give a new path"
        )


def _files(directory: Path) -> tuple[list[str], list[str]]:
    """Return the files in `directory` that a save makes, and the others."""
    keys = sorted(
        (Path(folder) / name).relative_to(directory).as_posix()
        for folder, folders, files in os.walk(directory)
        for name in [*files, *(n for n in folders if os.path.islink(os.path.join(folder, n)))]
    )
    saved = {RUN_FILE, *attempt_keys(SAVED.attempt.number), manifest_key(SAVED)}
    # A save that crashed may have left an image without its record.
    names = {Path(key).stem.removeprefix("image-").removeprefix("part-") for key in keys}
    for part in filter(None, (parse_part_name(f"part-{name}.json") for name in names)):
        saved |= {part_key(SAVED, *part), image_key(SAVED, *part)}
    unfinished = {key for key in keys if re.fullmatch(rf"(.*/)?\..+{re.escape(UNFINISHED)}", key)}
    own = saved | unfinished
    return [key for key in keys if key in own], [key for key in keys if key not in own]


def is_saved_one(directory: Path, clock: Clock) -> bool:
    """Return whether `directory` is a run of the one attempt and checkpoint that a save makes.

    A run that a manager has trained has events, even with no other checkpoint.
    """
    store = DiskStore(directory, clock)
    try:
        read_run_record(store, str(directory))
        content = attempt_numbers(store), [*list_checkpoints(store)]
    except HoldfastError:
        return False
    is_trained = any(os.path.lexists(directory / name) for name in (EVENTS, LEASES))
    return (
        content == ([SAVED.attempt.number], [SAVED])
        and not is_trained
        and not directory.is_symlink()
    )


@contextlib.contextmanager
def locked_directory(directory: Path, clock: Clock) -> Iterator[Path]:
    """Yield a new hidden directory beside `directory`, locked; remove it at the end."""
    fds: list[int] = []
    while not fds:
        building = directory.parent / f".{directory.name}.{clock.new_token()[:12]}{UNFINISHED}"
        building.mkdir()
        try:
            # Race: another save may take it for a leftover before it is locked, and remove it.
            fds += _lock(building)
        except OSError:
            # Without locks on this file system, no save removes leftovers.
            break
    state = os.stat(building)
    try:
        yield building
    finally:
        with contextlib.suppress(OSError):
            # After an exchange the old directory is there.
            if os.path.samestat(os.stat(building), state):
                shutil.rmtree(building)
        for fd in fds:
            os.close(fd)


def remove_leftovers(directory: Path) -> None:
    """Remove what saves to `directory` left that have crashed.

    While nothing is at `directory`, a complete leftover stays: the crash may have been between the
    two renames of an exchange. One with files of others stays too.
    """
    named = re.compile(rf"\.{re.escape(directory.name)}\.[0-9a-f]{{12}}{re.escape(UNFINISHED)}")
    is_there = os.path.lexists(directory)
    with contextlib.suppress(OSError):
        for left in [path for path in directory.parent.iterdir() if named.fullmatch(path.name)]:
            for fd in _lock(left):
                if is_there or not any(left.glob(f"{MANIFESTS}/*.json")):
                    if os.path.lexists(RunLocation(left).record):
                        _remove_saved(left)
                    else:
                        # An export was building it, or a save that had not begun its run.
                        shutil.rmtree(left, ignore_errors=True)
                os.close(fd)


def _remove_saved(directory: Path) -> None:
    """Remove what a save made in `directory`; warn if it stays, because it has other files."""
    saved, foreign = _files(directory)
    if not foreign:
        with contextlib.suppress(OSError):
            for key in saved:
                (directory / key).unlink(missing_ok=True)
        for folder, _, _ in os.walk(directory, topdown=False):
            # Race: another process may put a file there until this moment; it is kept.
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    if os.path.lexists(directory):
        log.warning(
            "remove %s, which a later save has replaced: expected only what a save made, found %s; "
            "it is kept: move what you need away, and remove it",
            directory,
            ", ".join(foreign[:5]) or "a file that cannot be removed",
        )


def _lock(folder: Path) -> list[int]:
    """Return a descriptor that locks the folder; none if another process locked or removed it.

    Raises:
        OSError: the file system has no locks.
    """
    with contextlib.ExitStack() as on_failure:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            on_failure.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(folder), os.fstat(fd)):
                on_failure.pop_all()
                return [fd]
        except (BlockingIOError, FileNotFoundError):
            pass
    return []


def begin_run(store: DiskStore, directory: Path, clock: Clock) -> str:
    """Begin a run in `store`, whose directory will be renamed to `directory`; return its id."""
    built = store.home.recorded_place()
    # A rename keeps the inode; with the path it will have, the run is where its record says.
    place = RunPlace(inode=built.inode, path=str(directory)) if built is not None else None
    record = create_run(store, str(directory), clock.new_token(), clock.now(), place)
    start = AttemptStart(
        run_id=record.run_id, origin=None, host=host_name(), pid=os.getpid(), time=clock.now()
    )
    begin_attempt(store, SAVED.attempt, start)
    return record.run_id


def put_in_place(
    building: Path, directory: Path, check: Callable[[Path], None] | None = None
) -> None:
    """Rename `building` to `directory`, durably, and remove what was there.

    Args:
        building: the new directory, beside `directory`.
        directory: its place.
        check: raises if the directory at a path may not be removed. It is called for `directory`,
            and again once that was moved, before anything is removed. None refuses to replace.

    Raises:
        InvalidArgumentError: `directory` exists and may not be replaced; it is unchanged.
        StorageError: it cannot be renamed; it is unchanged.
    """
    try:
        rename_to_new(building, directory)
    except FileExistsError as error:
        if check is None:
            raise InvalidArgumentError(
                f"save to {directory}: another process made it meanwhile; give a new path, or pass "
                "overwrite=True"
            ) from error
        check(directory)
        try:
            exchange(building, directory)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise StorageError(
                f"replace {directory}: expected a directory that can be renamed, found one in a "
                "lower layer of an overlay file system, such as a container's image; remove it "
                "first, or save to a new path"
            ) from error
        _remove_replaced(building, directory, check)
        return
    _sync_names(directory.parent)


def _remove_replaced(old: Path, directory: Path, check: Callable[[Path], None]) -> None:
    """Remove the directory `old`, which was exchanged for the one at `directory`, or undo that.

    Raises:
        HoldfastError: that of `check`, for which the exchange is undone.
    """
    fds: list[int] = []
    try:
        fds += _lock(old)
        is_left_to_others = not fds
    except OSError:
        # Without locks on this file system, no other save removes it.
        is_left_to_others = False
    try:
        # Another save may have it locked, which has just made it or is removing it.
        if not is_left_to_others:
            try:
                check(old)
            except HoldfastError:
                exchange(old, directory)
                raise
        _sync_names(directory.parent)
        if not is_left_to_others:
            _remove_saved(old)
    finally:
        for fd in fds:
            os.close(fd)


def _sync_names(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        LOCAL.sync(fd)
    finally:
        os.close(fd)
