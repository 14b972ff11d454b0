"""A run's directory, identified by device and inode rather than by path.

A run's directory may be moved, deleted, replaced by a copy or unmounted while a process uses it;
its path would then refer to something else. The directory is held open, so that its inode is not
reused, and the path is compared with it before each use.

Invariants:
- `current_folder` returns a path that led to the bound directory at that time, or raises.
- A directory that was moved is found again by the kernel's own record of its path.

Assumed: `/proc` is mounted. The descriptor is opened with O_PATH: it needs no permission to read
the directory, and keeps its file system from being unmounted other than lazily.

See docs/decisions/0019.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import StorageError
from holdfast.format.records import RunPlace
from holdfast.store.files.mounts import has_lasting_inodes

_DELETED = " (deleted)"
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

log = logging.getLogger(__name__)


class RunDirectory:
    """One directory. Thread-safe. Bound at the first use that finds the directory.

    Args:
        path: Its path.
        advice: What to do once it is not the directory at its path any more.
        is_remote_tier: It is a run's remote tier, without which the training goes on.
    """

    def __init__(
        self, path: Path, advice: str = "stop this process", *, is_remote_tier: bool = False
    ) -> None:
        self._path = path
        self._advice = advice
        self._is_remote_tier = is_remote_tier
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._close: Callable[[], object] | None = None
        self._state: os.stat_result | None = None

    def __repr__(self) -> str:
        return f"RunDirectory({self._path})"

    @property
    def path(self) -> Path:
        """The last known path."""
        return self._path

    @property
    def location_text(self) -> str:
        """The last known path, as text."""
        return str(self._path)

    @property
    def identity(self) -> tuple[int, int] | None:
        """(device, inode); None if no directory has existed at the path yet."""
        state = self._bound()
        return (state.st_dev, state.st_ino) if state is not None else None

    @property
    def identity_text(self) -> str:
        """The identity as text; empty if no directory has existed at the path yet."""
        identity = self.identity
        return f"{identity[0]}:{identity[1]}" if identity is not None else ""

    def recorded_place(self) -> RunPlace | None:
        """Return its inode and its current path; None if no directory has existed at the path yet.

        Raises:
            StorageError: As `current_folder`.
        """
        path, identity = self.current_folder(), self.identity
        return RunPlace(inode=identity[1], path=str(path)) if identity is not None else None

    def has_lasting_inodes(self) -> bool:
        """Return whether its file system gives it the same inode each time it is mounted."""
        return has_lasting_inodes(self._path)

    def unusable_reason(self) -> str | None:
        """Return why the directory cannot be used now; None if it can."""
        try:
            self.current_folder()
        except StorageError as error:
            return str(error)
        return None

    def current_folder(self) -> Path:
        """Return the directory's current path, or the given path if it did not exist yet.

        Raises:
            StorageError: it was deleted, replaced by another directory or unmounted, or its state
                cannot be read.
        """
        state = self._bound()
        if state is None or _is_at(self._path, state):
            return self._path
        moved = self._moved_to()
        if moved is not None and _is_at(moved, state):
            log.info("the run's directory %s was moved to %s", self._path, moved)
            self._path = moved
            return moved
        raise StorageError(self._what_happened())

    def is_gone(self) -> bool:
        """Return whether it was deleted, by itself or after its content was copied elsewhere.

        An unmounted or hidden one may become visible again.
        """
        state = self._bound()
        if state is None or self._fd is None:
            return False
        try:
            return os.fstat(self._fd).st_nlink == 0 or self._link().endswith(_DELETED)
        except OSError as error:
            return error.errno == errno.ESTALE

    def note_gone(self, reason: str) -> None:
        """Do nothing: the kernel knows whether a directory was deleted."""

    def is_at(self, text: str) -> bool:
        """Return whether that path leads to this directory."""
        state = self._bound()
        return state is not None and _is_at(Path(text), state)

    def release(self) -> None:
        """Close the descriptor; a later use binds the directory at the path where it was last."""
        with self._lock:
            close, self._close = self._close, None
            self._fd = self._state = None
            if close is not None:
                close()

    def _bound(self) -> os.stat_result | None:
        if self._state is None:
            with self._lock:
                if self._state is None:
                    self._bind()
        return self._state

    def _bind(self) -> None:
        try:
            fd = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _MISSING:
                return
            raise _cannot_read(self._path, error) from error
        self._close = weakref.finalize(self, os.close, fd)
        self._fd, self._state = fd, os.fstat(fd)

    def _link(self) -> str:
        return os.readlink(f"/proc/self/fd/{self._fd}")

    def _moved_to(self) -> Path | None:
        try:
            link = self._link()
        except OSError:
            return None
        return Path(link) if link.startswith("/") else None

    def _what_happened(self) -> str:
        is_other, is_gone = os.path.lexists(self._path), self.is_gone()
        if is_gone:
            event = "it was deleted, or moved to another file system"
            event += "; another one is there" if is_other else ""
        else:
            event = "its path leads to another directory" if is_other else "its path leads nowhere"
            event += ": it was replaced, or a file system was mounted or unmounted there"
        what, advice = "the run's directory", self._advice
        if self._is_remote_tier:
            what = "the run's remote tier"
            advice = "training goes on in the run's directory; for copies, start it again"
        if not is_gone:
            advice = f"mount it again{'' if self._is_remote_tier else ' and restart'}, or {advice}"
        return f"use {what} {self._path}: {event}; {advice}"


def check_link(path: Path) -> None:
    """Check that a path is no symbolic link to nothing.

    Raises:
        StorageError: It is one.
        OSError: The link cannot be read.
    """
    if path.is_symlink() and not path.exists():
        raise StorageError(
            f"open {path}: expected a directory, found a symbolic link to {path.readlink()}, which "
            "does not exist; make that directory, or correct the link"
        )


def _is_at(path: Path, state: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), state)
    except OSError as error:
        if error.errno in _MISSING:
            return False
        raise _cannot_read(path, error) from error


def _cannot_read(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"use the run's directory {path}: {error.strerror} (errno {error.errno}); check its "
        "permissions and mount"
    )
