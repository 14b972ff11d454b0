"""Leases of a run: for each attempt a small object that the agent that leads it rewrites.

A start that cannot ask that agent reads the age of the newest attempt's lease. The age is the
difference of two times from the store, that of the lease and that of an object written just now, so
that hosts' clocks are not compared.

A lease need not survive the loss of power, and it fences nothing: see decisions/0020.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec

from holdfast.coordination.lease_seen import LeaseSeen
from holdfast.errors import HoldfastError
from holdfast.format.json_codec import decode
from holdfast.format.names import LEASES, AttemptId, lease_key
from holdfast.store.durable import FleetingStore

NANOSECONDS = 1e9

log = logging.getLogger(__name__)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the object; `incarnation` and `counter` differ after each renewal.

    `pid` is the process of the lowest rank on the host, and `user` the name of the agent's user.
    `is_storing`: the trainers have ended, and `pid` is the agent, which stores what they have left.
    `run_id` distinguishes a run's own leases from those copied with its directory.
    """

    run_id: str
    attempt: AttemptId
    host: str
    pid: int
    user: str
    incarnation: int
    counter: int
    is_storing: bool = False


class Leases:
    """The leases of one run. Thread-safe."""

    def __init__(self, store: FleetingStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id

    def write(self, lease: Lease) -> None:
        """Write a lease, replacing the previous one atomically.

        Raises:
            StorageError: the previous lease is unchanged.
        """
        self._store.put(lease_key(lease.attempt.number), msgspec.json.encode(lease))

    def remove(self, number: int) -> None:
        """Remove the lease of the attempt with that number, if it exists.

        Raises:
            StorageError: the lease may remain.
        """
        self._store.delete(lease_key(number))

    def remove_before(self, number: int) -> None:
        """Remove the leases of older attempts, which are not read any more.

        Raises:
            StorageError: any of them may remain.
        """
        keys = [stored.key for stored in self._store.list(LEASES)]
        self._store.delete(*(key for key in keys if key < lease_key(number)))

    def read(self, number: int) -> LeaseSeen | None:
        """Return the lease of the attempt with that number, and its age, or None if it has none.

        Raises:
            StorageError: it cannot be read, or the store's time cannot.
        """
        key = lease_key(number)
        read = self._store.read_timed(key)
        if read is None:
            return None
        written_ns = read.written_ns
        age_secs = (read.now_ns - written_ns) / NANOSECONDS
        try:
            lease = decode(read.data, Lease)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning("%s is not a valid lease, only its time is used: %s", key, error)
            return LeaseSeen(
                host="unknown", pid=0, user="unknown", stamp=str(written_ns), age_secs=age_secs
            )
        if lease.run_id != self._run_id:
            return None
        stamp = f"{lease.incarnation}.{lease.counter}.{written_ns}"
        return LeaseSeen(
            host=lease.host,
            pid=lease.pid,
            user=lease.user,
            stamp=stamp,
            age_secs=age_secs,
            is_storing=lease.is_storing,
        )


def newest_lease(tiers: Iterable[Leases], number: int) -> LeaseSeen | None:
    """Return the lease of an attempt that was renewed last in any of a run's durable tiers.

    Each tier has a clock of its own, so ages are compared. The stamp is that of all tiers together:
    of two leases of about one age now one and now the other is the younger one, and neither was
    renewed by that.

    Raises:
        StorageError: one of the tiers cannot be read.
    """
    seen = [lease for leases in tiers if (lease := leases.read(number)) is not None]
    if not seen:
        return None
    youngest = min(seen, key=lambda lease: lease.age_secs)
    return replace(youngest, stamp=" ".join(lease.stamp for lease in seen))


class LeaseWriter:
    """Writes one host's leases to one tier. A failure is logged once and not raised."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._has_failed = False

    def write(self, lease: Lease) -> None:
        """Write a lease."""
        with self._logged(f"the lease of attempt {lease.attempt} is not written"):
            self._leases.write(lease)

    def remove(self, attempt: AttemptId) -> None:
        """Remove an attempt's lease."""
        with self._logged(f"the lease of attempt {attempt} is not removed"):
            self._leases.remove(attempt.number)

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        try:
            yield
        except HoldfastError as error:
            if not self._has_failed:
                log.warning("%s; a start elsewhere may take the run over: %s", what, error)
            self._has_failed = True
        else:
            self._has_failed = False
