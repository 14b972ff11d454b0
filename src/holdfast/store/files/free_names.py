"""Give a finished file a name that must be free, so that of several writers exactly one succeeds.

A hard link does it in one step. Some file systems have no hard links (gcsfuse, FAT, some SMB and
FUSE ones); there the writer first *claims* the name: it creates a hidden file beside it, which must
not exist, looks whether the name is free, and renames its file to it.

Invariants:
- A file that is visible under its name is whole: it has the name by a link or a rename only.
- Claims of a name are numbered. A claim is in force while the next one does not exist. Only the
  process that made a claim, or one that took the name after it, removes it.
- A process that finds a claim for `CLAIM_SECS` makes the next one: the holder died between two
  calls. A holder that lives on the same host is not replaced, because it has the claim locked.

Assumed: the file system creates a file exclusively, for all hosts that write there. A holder on
another host that stops for `CLAIM_SECS`, just between its last look and the rename, can replace the
file of the process that has replaced it; `docs/stores.md` states the promise.

See docs/decisions/0040.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from holdfast.clock import Clock
from holdfast.errors import StorageError
from holdfast.store.files.file_lock import is_file_locked
from holdfast.store.files.file_system import FileSystem

UNFINISHED = ".unfinished"
"""The end of the names, which begin with a dot, of files that are no objects."""
CLAIM_SECS = 10.0
"""How long a claim is respected; its holder needs it for two calls."""
SETTLE_SECS = 1.0
"""How long a process that replaces a claim waits for a rename that has begun."""
POLL_SECS = 0.05
WAIT_SECS = 60.0

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EMLINK)
_reported_devices: set[int] = set()

log = logging.getLogger(__name__)


def take_name(files: FileSystem, source: Path, target: Path, clock: Clock) -> None:
    """Give the finished file `source` the name `target`, in the same folder, if that is free.

    Afterwards `source` is a second name of the file, or does not exist.

    Raises:
        FileExistsError: `target` exists.
        StorageError: another process kept the name claimed, or has replaced this one's claim.
        OSError: the file cannot be renamed.
    """
    try:
        files.link(source, target)
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _report(target, error)
    with _claimed(files, target, clock) as number:
        if number:
            clock.sleep(SETTLE_SECS)
        if os.path.lexists(_claim(target, number + 1)):
            raise StorageError(
                f"write {target}: this process stopped for more than {CLAIM_SECS:.0f} s while it "
                "had the name claimed, and another one has replaced the claim; try again"
            )
        files.rename_to_new(source, target)


def _report(target: Path, error: OSError) -> None:
    device = os.stat(target.parent).st_dev
    if device not in _reported_devices:
        _reported_devices.add(device)
        log.warning(
            "write %s: its file system has no hard links (%s); names are taken by exclusive "
            "creation, which some network file systems do not keep between hosts (docs/stores.md)",
            target,
            error.strerror,
        )


def _claim(target: Path, number: int) -> Path:
    return target.with_name(f".{target.name}.claim-{number}{UNFINISHED}")


@contextlib.contextmanager
def _claimed(files: FileSystem, target: Path, clock: Clock) -> Iterator[int]:
    """Hold the claim of `target` during the block; yield its number.

    Raises:
        FileExistsError: `target` exists.
        StorageError: another process kept it claimed for `WAIT_SECS`.
    """
    number, fd = _make_claim(files, target, clock)
    try:
        # Race: before it is locked, a process on this host may replace it; the caller looks.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        yield number
    finally:
        files.close(fd)
        # A claim that was replaced stays in force as the reason of the next one.
        if not os.path.lexists(_claim(target, number + 1)):
            for gone in range(number + 1):
                with contextlib.suppress(FileNotFoundError):
                    files.unlink(_claim(target, gone))


def _make_claim(files: FileSystem, target: Path, clock: Clock) -> tuple[int, int]:
    """Make the next claim of `target`; return its number and its descriptor."""
    number, waited_secs, began_secs = 0, 0.0, clock.monotonic()
    while clock.monotonic() - began_secs < WAIT_SECS:
        claim = _claim(target, number)
        try:
            return number, files.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            if os.path.lexists(target):
                raise
        clock.sleep(POLL_SECS)
        waited_secs += POLL_SECS
        if waited_secs >= CLAIM_SECS and not _is_locked(claim):
            number, waited_secs = number + 1, 0.0
    raise StorageError(
        f"write {target}: another process has kept the name claimed for {WAIT_SECS:.0f} s by "
        f"{_claim(target, number)}; look for a stopped process, end it, and try again"
    )


def _is_locked(claim: Path) -> bool:
    try:
        return is_file_locked(claim)
    except OSError:
        # The file system has no locks.
        return False
