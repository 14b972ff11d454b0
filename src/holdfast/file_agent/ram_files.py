"""Files in RAM: memory on a tmpfs that is reserved, filled by trainers, sealed, and recycled.

Below one folder, `data/NAME` has the bytes and `records/NAME` says what they are. The file system
is the state, so that the next agent adopts what a killed one has left:

- data without a record, locked: a trainer fills it;
- data without a record, not locked: its trainer died, or has not locked it yet;
- data with a record that has pending paths: to be written, and never recycled;
- data with a record without pending paths: it may be recycled, unless a reader has it locked.

Memory is recycled by renaming, because pages that exist are filled faster than fresh ones. Owned by
the agent's event loop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.clock import Clock
from holdfast.errors import InvalidArgumentError, ObjectNotFoundError, OutOfSpaceError
from holdfast.file_agent.protocol import (
    FileTarget,
    FoundFile,
    RamFileRecord,
    Reserved,
    Seal,
    WrittenFile,
)
from holdfast.format.json_codec import decode
from holdfast.store.file_lock import is_file_locked
from holdfast.store.memory_limit import memory_left_bytes

DATA = "data"
RECORDS = "records"
LOCK_SECS = 60.0
"""After this time, a reserved file that no process has locked belongs to none."""


def data_path(folder: Path, name: str) -> Path:
    """Return the path of a file's bytes in an agent's folder."""
    return folder / DATA / name


@dataclass(kw_only=True)
class RamFile:
    """A sealed file. `pending` are the paths that it does not have yet."""

    number: int
    name: str
    size_bytes: int
    digest: str
    pending: dict[str, FileTarget] = field(default_factory=dict)
    written: dict[str, WrittenFile] = field(default_factory=dict)
    attempts: int = 0
    error: str = ""
    used: float = 0.0

    def as_record(self) -> RamFileRecord:
        """Return what the next agent needs."""
        return RamFileRecord(
            number=self.number,
            name=self.name,
            size_bytes=self.size_bytes,
            digest=self.digest,
            pending=[*self.pending.values()],
            written=[*self.written.values()],
        )


class RamFiles:
    """The files below `folder`, at most `capacity_bytes` of them together."""

    def __init__(self, folder: Path, capacity_bytes: int, clock: Clock) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self._clock = clock
        self._sizes: dict[str, int] = {}
        self._unsealed: dict[str, float] = {}
        self._sealed: dict[str, RamFile] = {}
        self._newest: dict[str, RamFile] = {}
        for name in (DATA, RECORDS):
            (folder / name).mkdir(mode=0o700, exist_ok=True)

    @property
    def used_bytes(self) -> int:
        """The bytes of all files, whatever they hold."""
        return sum(self._sizes.values())

    def sealed_files(self) -> list[RamFile]:
        """Return the sealed files, the oldest first."""
        return sorted(self._sealed.values(), key=lambda one: one.number)

    def pending_files(self) -> list[RamFile]:
        """Return the files that are not at all of their paths, the oldest first."""
        return [one for one in self.sealed_files() if one.pending]

    def is_newest(self, one: RamFile, path: str) -> bool:
        """Return whether no later file is for `path`."""
        return self._newest.get(path) is one

    def adopt_files(self) -> None:
        """Take over what an earlier agent had."""
        for path in (self.folder / DATA).iterdir():
            self._sizes[path.name] = path.stat().st_size
        for path in (self.folder / RECORDS).iterdir():
            try:
                found = decode(path.read_bytes(), RamFileRecord)
            except (msgspec.DecodeError, UnicodeDecodeError):
                found = None
            if found is None or self._sizes.get(found.name, -1) < found.size_bytes:
                path.unlink()
                continue
            self._sealed[found.name] = RamFile(
                number=found.number,
                name=found.name,
                size_bytes=found.size_bytes,
                digest=found.digest,
                pending={target.path: target for target in found.pending},
                written={one.path: one for one in found.written},
            )
        for one in self.sealed_files():
            self._newest |= dict.fromkeys([*one.pending, *one.written], one)
        now = self._clock.monotonic()
        self._unsealed = {name: now for name in self._sizes if name not in self._sealed}

    def reserve_file(self, size_bytes: int) -> Reserved:
        """Return a file of at least `size_bytes` that is not sealed; its pages may not exist yet.

        Raises:
            OutOfSpaceError: what is in RAM is not written yet, and there is no room for more.
        """
        name = self._clock.new_token()
        superseded = next(self._recyclable(superseded_only=True), None)
        recycled = superseded or (None if self._has_room(size_bytes) else self._oldest())
        if recycled is not None:
            self._forget(recycled)
            os.rename(self._data(recycled), self._data(name))
            self._sizes[name] = self._sizes.pop(recycled)
        else:
            self._make_room(size_bytes)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            os.close(os.open(self._data(name), flags, 0o600))
            self._sizes[name] = 0
        self._unsealed[name] = self._clock.monotonic()
        try:
            return self.extend(name, size_bytes)
        except OutOfSpaceError:
            self.remove_file(name)
            raise

    def extend(self, name: str, size_bytes: int) -> Reserved:
        """Count a file that is not sealed as one of at least `size_bytes`.

        Raises:
            OutOfSpaceError: as `reserve`.
            ObjectNotFoundError: there is no such file: the agent took it for one of a dead trainer.
        """
        if name not in self._unsealed:
            raise ObjectNotFoundError(f"fill file {name} in RAM: it was given up; save again")
        if size_bytes > self._sizes[name]:
            self._make_room(size_bytes - self._sizes[name])
            self._sizes[name] = size_bytes
        return Reserved(name=name, size_bytes=self._sizes[name])

    def allocate_file(self, name: str) -> None:
        """Make a file's pages exist. Called on any thread.

        Raises:
            OSError: the tmpfs is full.
        """
        fd = os.open(self._data(name), os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, max(1, self._sizes[name]))
        finally:
            os.close(fd)

    def seal_file(self, message: Seal) -> RamFile:
        """Take a file that a trainer has filled; earlier saves to the same paths are superseded.

        The times of the markers decide, and not the order of the calls.

        Raises:
            ObjectNotFoundError: there is no such file.
            InvalidArgumentError: it has another size.
        """
        known = self._sealed.get(message.name)
        if known is not None:
            return known
        if message.name not in self._unsealed:
            raise ObjectNotFoundError(f"seal file {message.name} in RAM: there is none; save again")
        size_bytes = self._data(message.name).stat().st_size
        if size_bytes != message.size_bytes:
            raise InvalidArgumentError(
                f"seal file {message.name} in RAM: expected {message.size_bytes} bytes, found "
                f"{size_bytes}"
            )
        one = RamFile(
            number=1 + max((other.number for other in self._sealed.values()), default=0),
            name=message.name,
            size_bytes=message.size_bytes,
            digest=message.digest,
            pending={target.path: target for target in message.targets},
            used=self._clock.monotonic(),
        )
        self._put_record(one)
        del self._unsealed[one.name]
        self._sizes[one.name] = size_bytes
        self._sealed[one.name] = one
        for path, target in [*one.pending.items()]:
            other = self._newest.get(path)
            if other is not None and path in other.pending:
                is_later = target.marker > other.pending[path].marker
            else:
                is_later = True
            if is_later:
                self.supersede(path)
                self._newest[path] = one
            else:
                self._cancel(one, path)
        return one

    def add_read(self, name: str, size_bytes: int, digest: str, written: WrittenFile) -> None:
        """Take a file that was read from its path."""
        target = FileTarget(path=written.path, marker="")
        one = self.seal_file(
            Seal(name=name, size_bytes=size_bytes, digest=digest, targets=[target])
        )
        self.mark_written(one, written)

    def mark_written(self, one: RamFile, written: WrittenFile) -> None:
        """Note that a file is at one of its paths."""
        one.pending.pop(written.path, None)
        if self.is_newest(one, written.path):
            one.written[written.path] = written
        one.error = ""
        self._put_record(one)

    def drop_target(self, one: RamFile, path: str) -> None:
        """Give up writing a file to one of its paths."""
        one.pending.pop(path, None)
        if self.is_newest(one, path):
            del self._newest[path]
        self._put_record(one)

    def forget_outdated(self, path: str, outdated: WrittenFile | FileTarget) -> None:
        """Forget a file that `is_current` found replaced, unless a save has come meanwhile."""
        if self.held_at(path) == outdated:
            self.supersede(path)

    def held_at(self, path: str) -> WrittenFile | FileTarget | None:
        """Return by which RAM has a file for a path: `is_current` checks whether it still has."""
        one = self._newest.get(path)
        return None if one is None else one.pending.get(path) or one.written[path]

    def find_file(self, path: str) -> FoundFile:
        """Return what RAM has of a path."""
        one = self._newest.get(path)
        if one is None:
            return FoundFile()
        one.used = self._clock.monotonic()
        target = one.pending.get(path)
        return FoundFile(
            name=one.name,
            size_bytes=one.size_bytes,
            digest=one.digest,
            is_pending=target is not None,
        )

    def remove_file(self, name: str) -> None:
        """Free a file's memory; one that is pending stays."""
        if name in self._sizes and not (name in self._sealed and self._sealed[name].pending):
            self._forget(name)
            self._data(name).unlink(missing_ok=True)
            del self._sizes[name]

    def supersede(self, path: str) -> None:
        """Forget what is held for a path, and cancel a write to it."""
        older = self._newest.pop(path, None)
        if older is not None:
            self._cancel(older, path)

    def _cancel(self, one: RamFile, path: str) -> None:
        """Forget one of a file's paths, and remove the marker there."""
        target = one.pending.pop(path, None)
        if target is not None:
            with contextlib.suppress(OSError):
                os.unlink(target.marker)
        one.written.pop(path, None)
        self._put_record(one)

    def _forget(self, name: str) -> None:
        self._record(name).unlink(missing_ok=True)
        self._unsealed.pop(name, None)
        one = self._sealed.pop(name, None)
        if one is not None:
            self._newest = {path: of for path, of in self._newest.items() if of is not one}

    def _has_room(self, size_bytes: int) -> bool:
        return size_bytes <= self._room()[0]

    def _room(self) -> tuple[int, str]:
        """Return how many more bytes fit, and what bounds them."""
        tmpfs = os.statvfs(self.folder)
        free = tmpfs.f_bavail * tmpfs.f_frsize
        bounds = [
            (
                self.capacity_bytes - self.used_bytes,
                f"{self.used_bytes} of {self.capacity_bytes} bytes are in use; raise "
                "memfs.data_block_pool_capacity_in_gb, or save less often",
            ),
            (free, f"its file system has {free} left; enlarge it, or set HOLDFAST_RAM to another"),
        ]
        memory = memory_left_bytes()
        if memory is not None:
            bounds.append((memory, f"the cgroup's memory limit leaves {memory}; raise it"))
        return min(bounds)

    def _make_room(self, size_bytes: int) -> None:
        while not self._has_room(size_bytes):
            oldest = self._oldest()
            if oldest is None:
                waiting = sum(one.size_bytes for one in self.pending_files())
                raise OutOfSpaceError(
                    f"reserve {size_bytes} bytes of RAM in {self.folder}, where {waiting} are not "
                    f"written yet: {self._room()[1]}"
                )
            self.remove_file(oldest)

    def _oldest(self) -> str | None:
        return next(self._recyclable(), None)

    def _recyclable(self, *, superseded_only: bool = False) -> Iterator[str]:
        """Yield the files that may be removed, those without a path first, then the least used."""
        now = self._clock.monotonic()
        free = [one for one in self._sealed.values() if not one.pending]
        names = [one.name for one in free if not one.written]
        if not superseded_only:
            names += [n for n, since in self._unsealed.items() if now - since > LOCK_SECS]
            kept = sorted((one for one in free if one.written), key=lambda one: one.used)
            names += [one.name for one in kept]
        yield from (name for name in names if not is_in_use(self._data(name)))

    def _put_record(self, one: RamFile) -> None:
        """Store a record; a file that was removed meanwhile has none."""
        path = self._record(one.name)
        if one.name in self._sealed or one.name in self._unsealed:
            unfinished = self.folder / f"record-{one.name}"
            unfinished.write_bytes(msgspec.json.encode(one.as_record()))
            unfinished.rename(path)

    def _data(self, name: str) -> Path:
        return data_path(self.folder, name)

    def _record(self, name: str) -> Path:
        return self.folder / RECORDS / name


def is_in_use(data: Path) -> bool:
    """Return whether a process fills the file in RAM, or reads it."""
    return is_file_locked(data, is_shared=False)


def is_current(held: WrittenFile | FileTarget) -> bool:
    """Return whether no other program, and no save without the agent, has replaced a file.

    It looks at the file's storage, and takes as long as that does.
    """
    if isinstance(held, FileTarget):
        return os.path.lexists(held.marker)
    with contextlib.suppress(OSError):
        state = os.stat(held.path)
        found = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        return found == (held.device, held.inode, held.size_bytes, held.mtime_ns)
    return False
