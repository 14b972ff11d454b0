"""Files of a run that are replaced often and need not survive the loss of power: its leases.

Each call uses the directory where it is at that time. The injected file system of crash tests is
bypassed: no crash guarantee depends on these files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from holdfast.clock import Clock
from holdfast.errors import ObjectNotFoundError, translated
from holdfast.store.contract import StoredObject
from holdfast.store.durable import TimedObject
from holdfast.store.files.file_system import LOCAL
from holdfast.store.files.whole_file import beside
from holdfast.store.object_folder import ObjectFolder
from holdfast.store.run_directory import RunDirectory


class FleetingFiles:
    """A `FleetingStore` in a run's directory. Thread-safe.

    Where a network file system takes file times from its clients, the clocks of hosts must agree
    to within seconds.
    """

    def __init__(self, directory: RunDirectory, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock

    @property
    def _folder(self) -> ObjectFolder:
        return ObjectFolder(self._directory.current_folder(), self._clock, LOCAL, durable=False)

    def put(self, key: str, data: bytes) -> None:
        folder = self._folder
        with folder.writing(folder.path(key)) as unfinished:
            _write(folder, unfinished, data)

    def read_timed(self, key: str) -> TimedObject | None:
        folder = self._folder
        # Write the new file first, so that a network file system refreshes its view of the folder.
        now_ns = self._now_ns(folder, folder.path(key))
        try:
            with folder.opened(key) as reader:
                written_ns = os.fstat(reader.fd).st_mtime_ns
                data = bytearray(reader.size_bytes)
                reader.read_into(0, memoryview(data))
        except ObjectNotFoundError:
            return None
        return TimedObject(bytes(data), written_ns, now_ns)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return self._folder.list(prefix)

    def delete(self, *keys: str) -> None:
        self._folder.delete(*keys)

    def _now_ns(self, folder: ObjectFolder, path: Path) -> int:
        """Return the current time of the file system of `path`, from a file written now."""
        token = self._clock.new_token()
        with translated("read the time of", path.parent), beside(path, token) as probe:
            _write(folder, probe, b"\n")
            return probe.stat().st_mtime_ns


def _write(folder: ObjectFolder, path: Path, data: bytes) -> None:
    fd = folder.create_file(path, 0)
    try:
        folder.write_all(fd, memoryview(data))
    finally:
        folder.files.close(fd)
