"""Leases in a run's folder: for each attempt a small file that its leading host rewrites.

A start on another host reads the age of the newest attempt's lease. The age is the difference of
two times from the file system, that of the lease and that of a file written just now, so that
hosts' clocks are not compared. Where a network file system takes file times from its clients, their
clocks must agree to within seconds.

A lease need not survive the loss of power, and it fences nothing: see decisions/0020.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.clock import Clock
from holdfast.coordination.inputs import LeaseSeen
from holdfast.errors import HoldfastError, ObjectNotFoundError
from holdfast.format.json_codec import decode
from holdfast.format.names import LEASES, lease_key
from holdfast.store.file_system import LOCAL
from holdfast.store.object_folder import UNFINISHED, ObjectFolder, translated
from holdfast.store.run_directory import RunDirectory

NANOSECONDS = 1e9

log = logging.getLogger(__name__)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file; `incarnation` and `counter` differ after each renewal.

    `pid` is the process of the lowest rank on the host. `run_id` distinguishes a run's own leases
    from those copied with its directory.
    """

    run_id: str
    attempt: int
    host: str
    pid: int
    incarnation: int
    counter: int


class Leases:
    """The leases of one run. Thread-safe."""

    def __init__(self, directory: RunDirectory, run_id: str, clock: Clock) -> None:
        self._directory = directory
        self._run_id = run_id
        self._clock = clock

    @property
    def _folder(self) -> ObjectFolder:
        # Bypasses the injected FileSystem: no crash guarantee depends on leases.
        return ObjectFolder(self._directory.current(), self._clock, LOCAL, durable=False)

    def write(self, lease: Lease) -> None:
        """Write a lease, replacing the previous one atomically.

        Raises:
            StorageError: the previous lease is unchanged.
        """
        with self._folder.writing(self._folder.path(lease_key(lease.attempt))) as unfinished:
            self._write(unfinished, msgspec.json.encode(lease))

    def remove(self, attempt: int) -> None:
        """Remove an attempt's lease, if it exists.

        Raises:
            StorageError: the lease may remain.
        """
        self._folder.delete(lease_key(attempt))

    def remove_before(self, attempt: int) -> None:
        """Remove the leases of older attempts, which are not read any more.

        Raises:
            StorageError: any of them may remain.
        """
        keys = [stored.key for stored in self._folder.list(LEASES)]
        self._folder.delete(*(key for key in keys if key < lease_key(attempt)))

    def read(self, attempt: int) -> LeaseSeen | None:
        """Return an attempt's lease and its age, or None if this run has none.

        Raises:
            StorageError: it cannot be read, or the file system's time cannot.
        """
        path = self._folder.path(lease_key(attempt))
        # Write the new file first, so that a network file system refreshes its view of the folder.
        now_ns = self._now_ns(path.parent)
        try:
            with self._folder.opened(lease_key(attempt)) as reader:
                written_ns = os.fstat(reader.fd).st_mtime_ns
                data = bytearray(reader.size_bytes)
                reader.read_into(0, memoryview(data))
        except ObjectNotFoundError:
            return None
        age_secs = (now_ns - written_ns) / NANOSECONDS
        try:
            lease = decode(bytes(data), Lease)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning("%s is not a valid lease, only its time is used: %s", path, error)
            return LeaseSeen(host="unknown", pid=0, stamp=str(written_ns), age_secs=age_secs)
        if lease.run_id != self._run_id:
            return None
        stamp = f"{lease.incarnation}.{lease.counter}.{written_ns}"
        return LeaseSeen(host=lease.host, pid=lease.pid, stamp=stamp, age_secs=age_secs)

    def _now_ns(self, folder: Path) -> int:
        """Return the file system's current time, from a file written now."""
        probe = folder / f".probe.{self._clock.token()}{UNFINISHED}"
        with translated("read the time of", folder):
            try:
                self._write(probe, b"\n")
                return probe.stat().st_mtime_ns
            finally:
                with contextlib.suppress(FileNotFoundError):
                    self._folder.files.unlink(probe)

    def _write(self, path: Path, data: bytes) -> None:
        fd = self._folder.create(path, 0)
        try:
            self._folder.write_all(fd, memoryview(data))
        finally:
            self._folder.files.close(fd)


class LeaseWriter:
    """Writes one host's leases, from one thread. A failure is logged once and not raised."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._has_failed = False

    def write(self, lease: Lease) -> None:
        """Write a lease."""
        with self._logged(f"the lease of attempt {lease.attempt} is not written"):
            self._leases.write(lease)

    def remove(self, attempt: int) -> None:
        """Remove an attempt's lease."""
        with self._logged(f"the lease of attempt {attempt} is not removed"):
            self._leases.remove(attempt)

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        try:
            yield
        except HoldfastError as error:
            if not self._has_failed:
                log.warning("%s; a start on another host may take the run over: %s", what, error)
            self._has_failed = True
        else:
            self._has_failed = False
