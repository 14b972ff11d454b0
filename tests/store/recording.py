"""A file system that records all changes made through it, to compute the states after a crash.

A `RecordingFileSystem` wraps a real one and is passed to the stores in its place. It records what
a crash can lose: nodes (files and folders) separately from their names, bytes separately from
sizes, and which of them were synced. `tests.store.crash_states` computes from this `Log` the
states that a crash can leave.

Example, for a store of your own that takes a `holdfast.store.files.file_system.FileSystem`:

    recorder = RecordingFileSystem({"disk": root})
    recorder.make_folder(root / "run")
    store = MyStore(root / "run", files=recorder)
    store.put("a", b"x")
    recorder.add_mark("put a")
    for state in power_losses(recorder.log, ["disk"]):
        with tempfile.TemporaryDirectory() as fresh:
            materialise(state.tree, {"disk": Path(fresh)})
            left = MyStore(Path(fresh) / "run")
            if "put a" in recorder.log.marks(state.done_count):
                assert left.get("a") == b"x", state.description

Assumes that all changes below the recorded folders pass through it. Changes outside of them are
refused; reads and syncs there are passed through and not recorded. A failed operation is not
recorded, so it must not have changed anything.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.store.files.file_system import LOCAL, FileSystem


@dataclass(frozen=True, slots=True, kw_only=True)
class NameChange:
    """Sets `name` in the folder to `node`; None removes the name."""

    folder: int
    name: str
    node: int | None
    is_folder: bool = False


@dataclass(frozen=True, slots=True)
class NameTable:
    """Names that change together: one name, or the old and the new one of a rename."""

    changes: tuple[NameChange, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """A write of bytes to a file."""

    node: int
    offset_bytes: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Resize:
    """A truncation of a file, or its extension with zeros."""

    node: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Sync:
    """A sync: earlier changes of this file's bytes, or of this folder's names, are durable."""

    node: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A note of a guarantee or a request of the recorded program at this point."""

    value: object


Operation = NameTable | Write | Resize | Sync | Mark


@dataclass(slots=True)
class RecordedTree:
    """Names and bytes: `folders[node][name]` is a node, `files[node]` are a file's bytes.

    `roots` are the initial nodes by key. Two names of one node are hard links.
    """

    roots: dict[str, int]
    folders: dict[int, dict[str, int]]
    files: dict[int, bytes]

    def copy(self) -> RecordedTree:
        """Return an independent copy."""
        folders = {node: dict(names) for node, names in self.folders.items()}
        return RecordedTree(self.roots, folders, dict(self.files))

    def apply(self, operation: Operation) -> None:
        """Apply `operation`."""
        if isinstance(operation, NameTable):
            for change in operation.changes:
                self._rename(change)
        elif isinstance(operation, Write):
            old, start = self.files.get(operation.node, b""), operation.offset_bytes
            stop = start + len(operation.data)
            self.files[operation.node] = (
                old[:start].ljust(start, b"\0") + operation.data + old[stop:]
            )
        elif isinstance(operation, Resize):
            old, size = self.files.get(operation.node, b""), operation.size_bytes
            self.files[operation.node] = old[:size].ljust(size, b"\0")

    def _rename(self, change: NameChange) -> None:
        names = self.folders.setdefault(change.folder, {})
        if change.node is None:
            names.pop(change.name, None)
            return
        names[change.name] = change.node
        if change.is_folder:
            self.folders.setdefault(change.node, {})
        else:
            self.files.setdefault(change.node, b"")


class Log:
    """The operations in order; `roots` are the nodes of the recorded folders by key."""

    def __init__(self, roots: Mapping[str, int], operations: list[Operation]) -> None:
        self.roots = dict(roots)
        self.operations = operations

    def __len__(self) -> int:
        return len(self.operations)

    def prefix(self, count: int) -> Log:
        """Return a log of the first `count` operations, which can be continued differently."""
        return Log(self.roots, self.operations[:count])

    def marks(self, count: int | None = None) -> list[object]:
        """Return the marks among the first `count` operations; None: all."""
        return [o.value for o in self.operations[:count] if isinstance(o, Mark)]

    def tree(self) -> RecordedTree:
        """Return the contents after all operations."""
        tree = RecordedTree(self.roots, {node: {} for node in self.roots.values()}, {})
        for operation in self.operations:
            tree.apply(operation)
        return tree


class RecordingFileSystem:
    """A thread-safe `FileSystem` that delegates to `inner` and records all changes.

    `log` grows; read it only while no operation is in progress.
    """

    def __init__(
        self, folders: Mapping[str, Path], inner: FileSystem = LOCAL, log: Log | None = None
    ) -> None:
        """Record changes below `folders`, which are distinguished by key.

        The folders must exist. They are empty, or have the contents of `log`, which is continued.
        """
        self._inner = inner
        self._folders = {key: Path(folder) for key, folder in folders.items()}
        self.log = log or Log({key: node for node, key in enumerate(self._folders)}, [])
        # Only the names in it are updated.
        self._tree = self.log.tree()
        self._next_node = max([*self._tree.folders, *self._tree.files]) + 1
        self._nodes: dict[int, int] = {}
        self._lock = threading.Lock()

    def add_mark(self, value: object) -> None:
        """Add a mark to the log: a guarantee or a request at this point."""
        with self._lock:
            self.log.operations.append(Mark(value))

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        with self._lock:
            if not self._is_recorded(path) and not flags & (os.O_ACCMODE | os.O_CREAT):
                return self._inner.open(path, flags, mode)
            # Looked up before the open: afterwards a new file looks like an existing one.
            node = self._node(path)
            if flags & os.O_CREAT:
                self._known(path.parent)
            fd = self._inner.open(path, flags, mode)
            if node is None:
                if not flags & os.O_CREAT:
                    self._inner.close(fd)
                    raise ValueError(
                        f"open {path}: it was created without the recording file system"
                    )
                node = self._new_node()
                self._change((path, node))
            elif flags & os.O_TRUNC:
                self._add(Resize(node, 0))
            self._nodes[fd] = node
            return fd

    def read(self, fd: int, target: memoryview, offset_bytes: int) -> int:
        return self._inner.read(fd, target, offset_bytes)

    def write(self, fd: int, data: memoryview) -> int:
        with self._lock:
            taken = self._inner.write(fd, data)
            # Read after the write, so that it is correct in append mode.
            stop = os.lseek(fd, 0, os.SEEK_CUR)
            self._add(Write(self._nodes[fd], stop - taken, bytes(data[:taken])))
            return taken

    def fill_pages(self, fd: int, pages: mmap.mmap, offset_bytes: int, data: memoryview) -> None:
        with self._lock:
            self._inner.fill_pages(fd, pages, offset_bytes, data)
            self._add(Write(self._nodes[fd], offset_bytes, bytes(data)))

    def truncate(self, fd: int, size_bytes: int) -> None:
        with self._lock:
            self._inner.truncate(fd, size_bytes)
            self._add(Resize(self._nodes[fd], size_bytes))

    def allocate(self, fd: int, size_bytes: int) -> None:
        with self._lock:
            self._inner.allocate(fd, size_bytes)
            self._add(Resize(self._nodes[fd], max(size_bytes, os.fstat(fd).st_size)))

    def sync(self, fd: int) -> None:
        with self._lock:
            self._inner.sync(fd)
            if fd in self._nodes:
                self._add(Sync(self._nodes[fd]))

    def close(self, fd: int) -> None:
        with self._lock:
            self._nodes.pop(fd, None)
            self._inner.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._rename(source, target, self._inner.rename)

    def rename_to_new(self, source: Path, target: Path) -> None:
        self._rename(source, target, self._inner.rename_to_new)

    def _rename(self, source: Path, target: Path, act: Callable[[Path, Path], None]) -> None:
        with self._lock:
            node = self._known(source)
            act(source, target)
            if node != self._node(target):
                self._change((source, None), (target, node))

    def link(self, source: Path, target: Path) -> None:
        with self._lock:
            node = self._known(source)
            self._inner.link(source, target)
            self._change((target, node))

    def unlink(self, path: Path) -> None:
        self._one_name(path, self._inner.unlink, is_made=False)

    def make_folder(self, path: Path) -> None:
        self._one_name(path, self._inner.make_folder, is_made=True)

    def remove_folder(self, path: Path) -> None:
        self._one_name(path, self._inner.remove_folder, is_made=False)

    def _one_name(self, path: Path, act: Callable[[Path], None], *, is_made: bool) -> None:
        with self._lock:
            act(path)
            node = self._new_node() if is_made else None
            if node is not None:
                self._tree.folders[node] = {}
            self._change((path, node))

    def _add(self, operation: Operation) -> None:
        self.log.operations.append(operation)

    def _change(self, *names: tuple[Path, int | None]) -> None:
        changes = []
        for path, node in names:
            folder = self._known(path.parent)
            is_folder = node in self._tree.folders
            change = NameChange(folder=folder, name=path.name, node=node, is_folder=is_folder)
            changes.append(change)
        operation = NameTable(tuple(changes))
        self._tree.apply(operation)
        self._add(operation)

    def _new_node(self) -> int:
        self._next_node += 1
        return self._next_node - 1

    def _known(self, path: Path) -> int:
        node = self._node(path)
        if node is None:
            # Raise the system's own error if there is one; it is more precise.
            os.stat(path, follow_symlinks=False)
            raise ValueError(f"use {path}: it was created without the recording file system")
        return node

    def _is_recorded(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self._folders.values())

    def _node(self, path: Path) -> int | None:
        """Return the node at `path`, or None."""
        for key, folder in self._folders.items():
            if path.is_relative_to(folder):
                node: int | None = self.log.roots[key]
                for name in path.relative_to(folder).parts:
                    node = self._tree.folders.get(node, {}).get(name) if node is not None else None
                return node
        raise ValueError(f"use {path}: it is in none of {sorted(map(str, self._folders.values()))}")
