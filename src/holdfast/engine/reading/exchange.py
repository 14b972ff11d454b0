"""Exchange what one rank has read from a bucket with the other ranks that want it, through RAM.

A reader gives each rank that waits a name of one file on its host's tmpfs: a hard link in that
rank's folder. The taker removes its name, and with the last one the memory is free. A taker on
another host reads the file from the reader's agent, which removes the name once it was sent whole.
So every byte is read from the bucket once, crosses the network once for each other host, where one
rank relays it, and is in RAM until its slowest taker has it.

Invariants:
- Nothing here can fail a restore. A taker that does not get a span reads it from the bucket.
- Every wait is bounded: by the end of the partner (its lock is free, its host does not answer, the
  agents report a lost rank), else by `STALL_SECS` without anything from it.
- A rank has at most `GIVEN_MAX_BYTES` in RAM of what it has read, and as much of what it relays.
  No wait for room can wait for itself: every rank reads and takes spans in the same order.
- The bytes are not trusted: a taker checks the digest of each block.

See docs/decisions/0036.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import Clock
from holdfast.engine.reading.spans import SharedRange, Span
from holdfast.errors import StorageError
from holdfast.format.names import EXCHANGE
from holdfast.store.contract import ReadableStore
from holdfast.store.files.file_lock import is_file_locked
from holdfast.store.files.memory_limit import memory_left_bytes

STALL_SECS = 120.0
"""A partner that gives or takes nothing for so long is not waited for any more."""
GIVEN_MAX_BYTES = 256 * 1024 * 1024
ROOM_SHARE = 4
"""A span is put into RAM only if that has room for so many of its size."""
POLL_SECS_MIN = 0.002
POLL_SECS_MAX = 0.05
PEER_POLL_SECS = 0.05
LINK_TRIES = 10
RANKS = "ranks"
"""The folder of the ranks' locks: a rank that reads holds its own."""


class Role(NamedTuple):
    """What this rank does with a shared span: `source` gives it to it; None: it reads the bucket.

    `takers` are the ranks to which it gives the span then.
    """

    source: int | None
    takers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePlace:
    """Where a rank exchanges.

    Attributes:
        rank: This rank.
        ram_folder: The RAM tier of its host.
        hosts: The host of each rank.
        peers: The RAM of the other hosts, by host; may lack some.
        is_lost: Whether a rank of the job is known to have ended.
    """

    rank: int
    ram_folder: Path
    hosts: Sequence[str]
    peers: Mapping[str, ReadableStore] = field(default_factory=dict)
    is_lost: Callable[[], bool] = lambda: False


def role_of(span_number: int, ranks: Sequence[int], rank: int, hosts: Sequence[str]) -> Role:
    """Return the role of `rank`, one of the `ranks` that want a span; a pure function.

    Readers take turns by the number of the span, and so do the relays of each host.
    """
    reader = ranks[span_number % len(ranks)]
    relays: dict[str, int] = {hosts[reader]: reader}
    own: list[int] = []
    for host in {hosts[member]: None for member in ranks}:
        on_host = [member for member in ranks if hosts[member] == host]
        relays.setdefault(host, on_host[span_number % len(on_host)])
        if host == hosts[rank]:
            own = on_host
    relay = relays[hosts[rank]]
    if rank != relay:
        return Role(relay, ())
    takers = [member for member in own if member != rank]
    if rank != reader:
        return Role(reader, tuple(takers))
    takers += [member for host, member in relays.items() if host != hosts[rank]]
    return Role(None, tuple(takers))


class Exchange:
    """One rank's part in the exchange of one round of a restore; thread-safe.

    Args:
        place: This rank's place.
        name: A name of the round that no other round has, the same on all ranks.
        clock: The clock for waits.
    """

    def __init__(self, place: ExchangePlace, name: str, clock: Clock) -> None:
        self._place = place
        self._clock = clock
        self._key = f"{EXCHANGE}/{name}"
        self._folder = place.ram_folder / EXCHANGE / name
        self._lock_fd: int | None = None
        self._shared: Mapping[int, Sequence[SharedRange]] = {}
        self._read = _Given(self, "read")
        self._relayed = _Given(self, "relayed")
        self._given_up: set[int] = set()
        self._progress: dict[int, float] = {}
        self._listed: dict[str, tuple[float, dict[str, int]]] = {}
        self._lock = threading.Lock()
        self._problems: list[str] = []
        self.has_begun = self._begin()

    def _begin(self) -> bool:
        """Create this rank's folder and lock; without them it takes no part."""
        rank = str(self._place.rank)
        try:
            # Not the agent's folder: an agent that has ended has removed it.
            above = (self._place.ram_folder, self._folder.parent, self._folder)
            for folder in (*above, self._folder / RANKS, self._to(self._place.rank), self._from):
                folder.mkdir(0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock_fd = os.open(self._folder / RANKS / rank, flags, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.note_problem(f"exchange in {self._folder}: {error}")
            return False
        return True

    def share(self, shared: Mapping[int, Sequence[SharedRange]]) -> None:
        """Set what the ranks want together, by part."""
        self._shared = shared if self.has_begun else {}

    def ranges_of(self, part: int) -> list[tuple[int, SharedRange]]:
        """Return the shared ranges of a part that this rank wants, each with its number."""
        ranges = enumerate(self._shared.get(part, ()))
        return [(number, piece) for number, piece in ranges if self._place.rank in piece.ranks]

    def role(self, span_number: int, ranks: Sequence[int]) -> Role:
        """Return what this rank does with a span that `ranks` want."""
        return role_of(span_number, ranks, self._place.rank, self._place.hosts)

    @property
    def problems(self) -> list[str]:
        """Why spans were not given or taken; each reason once."""
        return [*self._problems]

    def await_room(self, span: Span, *, is_relayed: bool) -> bool:
        """Wait until there is room to give a span; return whether there is.

        Spans are passed to it in their order, one at a time for each value of `is_relayed`.
        """
        return (self._relayed if is_relayed else self._read).await_room(span.size_bytes)

    def give(
        self, span: Span, data: memoryview | None, takers: Sequence[int], *, is_relayed: bool
    ) -> None:
        """Give the bytes of a span to ranks; None: they have to read it themselves."""
        spans = self._relayed if is_relayed else self._read
        if data is not None and not self._has_room(span.size_bytes):
            self.note_problem(
                f"exchange in {self._folder}: no room in RAM; other ranks read on their own"
            )
            data = None
        path = self._from / span.file_name
        fd = None
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _write_all(fd, data)
            except OSError as error:
                os.ftruncate(fd, 0)
                self.note_problem(
                    f"exchange in {self._folder}: {error}; other ranks read on their own"
                )
            for taker in takers:
                self._link(path, taker, span.file_name)
        except OSError as error:
            self.note_problem(f"exchange in {self._folder}: {error}; other ranks read on their own")
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            spans.track(fd, span.size_bytes)

    def _link(self, path: Path, taker: int, name: str) -> None:
        """Give a file one more name, in the folder of a taker."""
        target = self._to(taker) / name
        is_here = self._place.hosts[taker] == self._place.hosts[self._place.rank]
        for _ in range(LINK_TRIES):
            try:
                os.link(path, target)
                return
            except FileNotFoundError:
                # A rank of this host removes its folder when it has ended. That of a rank of
                # another host is removed by the agent whenever it is empty.
                if is_here:
                    return
                target.parent.mkdir(0o700, exist_ok=True)

    def _has_room(self, size_bytes: int) -> bool:
        with contextlib.suppress(OSError):
            tmpfs = os.statvfs(self._folder)
            left_bytes = tmpfs.f_bavail * tmpfs.f_frsize
            limit_bytes = memory_left_bytes()
            if limit_bytes is not None:
                left_bytes = min(left_bytes, limit_bytes)
            return left_bytes >= ROOM_SHARE * size_bytes
        return False

    def take_span(self, span: Span, source: int, target: memoryview) -> bool:
        """Fill `target` with a span that `source` gives; return whether it was given.

        The bytes have to be checked. After False they are undefined.
        """
        is_own_host = self._place.hosts[source] == self._place.hosts[self._place.rank]
        take = self._take_here if is_own_host else self._take_from_peer
        began_secs = self._clock.monotonic()
        pause_secs = POLL_SECS_MIN
        while True:
            if source in self._given_up or not self.has_begun:
                return False
            # Noted before the look, so that what was given just before the end is found.
            reason = self._end_of(source, began_secs, is_own_host=is_own_host)
            is_given = take(span, source, target)
            if is_given is not None:
                self._progress[source] = self._clock.monotonic()
                return is_given
            if reason is not None:
                self._give_up(source, reason)
                return False
            self._clock.sleep(pause_secs)
            pause_secs = min(pause_secs * 1.5, POLL_SECS_MAX)

    def _end_of(self, source: int, began_secs: float, *, is_own_host: bool) -> str | None:
        """Return why a wait since `began_secs` for `source` is over; None if it is not."""
        if is_own_host and not self._is_reading(source):
            return "it has ended"
        if not is_own_host and self._place.is_lost():
            return "a rank of the job has ended"
        since_secs = max(began_secs, self._progress.get(source, began_secs))
        waited_secs = self._clock.monotonic() - since_secs
        return f"it gave nothing for {STALL_SECS:.0f} s" if waited_secs > STALL_SECS else None

    def _is_reading(self, rank: int) -> bool:
        """Return whether a rank of this host holds its lock."""
        with contextlib.suppress(OSError):
            return is_file_locked(self._folder / RANKS / str(rank))
        return False

    def _take_here(self, span: Span, source: int, target: memoryview) -> bool | None:
        path = self._to(self._place.rank) / span.file_name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.note_problem(f"exchange with rank {source}: {error}")
            return False
        try:
            return _read_all(fd, target)
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                path.unlink()

    def _take_from_peer(self, span: Span, source: int, target: memoryview) -> bool | None:
        host = self._place.hosts[source]
        peer = self._place.peers.get(host)
        if peer is None:
            self._give_up(source, f"the RAM of {host} is not known")
            return False
        prefix = f"{self._key}/to-{self._place.rank}"
        try:
            size_bytes = self._names_at(host, peer, prefix).get(span.file_name)
            if size_bytes is None:
                return None
            if size_bytes != span.size_bytes:
                return False
            with peer.open(f"{prefix}/{span.file_name}") as reader:
                reader.read_into(0, target)
        except StorageError as error:
            self._give_up(source, str(error))
            return False
        return True

    def _names_at(self, host: str, peer: ReadableStore, prefix: str) -> dict[str, int]:
        """Return what a host has for this rank; asked once for all threads, at most so often."""
        with self._lock:
            asked_secs, names = self._listed.get(host, (-PEER_POLL_SECS, {}))
            if self._clock.monotonic() - asked_secs >= PEER_POLL_SECS:
                names = {
                    stored.key.rpartition("/")[2]: stored.size_bytes for stored in peer.list(prefix)
                }
                self._listed[host] = self._clock.monotonic(), names
            return names

    def _give_up(self, source: int, reason: str) -> None:
        if source not in self._given_up:
            self._given_up.add(source)
            self.note_problem(
                f"exchange with rank {source}: {reason}; its spans are read from the bucket"
            )

    def note_problem(self, problem: str) -> None:
        """Keep a problem for the report, once."""
        with self._lock:
            if problem not in self._problems:
                self._problems.append(problem)

    def forget_ended(self) -> bool:
        """Remove the folders of takers of this host that have ended; return whether any was."""
        has_any = False
        for folder in self._folder.glob("to-*"):
            taker = int(folder.name.removeprefix("to-"))
            is_here = self._place.hosts[taker] == self._place.hosts[self._place.rank]
            if is_here and not self._is_reading(taker):
                shutil.rmtree(folder, ignore_errors=True)
                has_any = True
        return has_any

    @property
    def has_ended(self) -> bool:
        """Whether nothing is waited for any more."""
        return not self.has_begun or self._place.is_lost()

    @property
    def clock(self) -> Clock:
        """The clock for waits."""
        return self._clock

    def end_waits(self) -> None:
        """End the waits of this rank's threads."""
        self.has_begun = False

    def end(self) -> None:
        """Take and give nothing any more; what was given stays. Idempotent."""
        self.has_begun = False
        for spans in (self._read, self._relayed):
            spans.close()
        shutil.rmtree(self._to(self._place.rank), ignore_errors=True)
        if self._lock_fd is not None:
            # A process that was forked meanwhile has the descriptor too.
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            os.close(self._lock_fd)
            self._lock_fd = None

    def remove_files(self) -> None:
        """Remove all that is left on this host; called when all ranks have ended the round."""
        self.end()
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._folder.parent.rmdir()

    def _to(self, rank: int) -> Path:
        return self._folder / f"to-{rank}"

    @property
    def _from(self) -> Path:
        return self._folder / f"from-{self._place.rank}"


class _Given:
    """The spans that a rank has given and that have not been taken by all.

    Owned by the threads of one restore; each span has an open descriptor, by which the number of
    names that are left is seen.
    """

    def __init__(self, of: Exchange, name: str) -> None:
        self._of = of
        self._name = name
        self._lock = threading.Lock()
        self._open: list[tuple[int, int]] = []
        self._reserved_bytes = 0
        self._is_stalled = False

    def await_room(self, size_bytes: int) -> bool:
        """Reserve room for a span; `track` is called for it in any case."""
        clock = self._of.clock
        until_secs = clock.monotonic() + STALL_SECS
        left_bytes = -1
        pause_secs = POLL_SECS_MIN
        while True:
            with self._lock:
                self._drop_taken()
                used_bytes = self._reserved_bytes + sum(size for _, size in self._open)
                if not used_bytes or used_bytes + size_bytes <= GIVEN_MAX_BYTES:
                    self._reserved_bytes += size_bytes
                    return True
                self._is_stalled |= clock.monotonic() > until_secs or self._of.has_ended
                if self._is_stalled:
                    self._reserved_bytes += size_bytes
                    return False
            if used_bytes != left_bytes:
                left_bytes, until_secs = used_bytes, clock.monotonic() + STALL_SECS
            if not self._of.forget_ended():
                clock.sleep(pause_secs)
            pause_secs = min(pause_secs * 1.5, POLL_SECS_MAX)

    def track(self, fd: int | None, size_bytes: int) -> None:
        """Track a span that was given, for which room was reserved."""
        with self._lock:
            self._reserved_bytes -= size_bytes
            if fd is not None:
                self._open.append((fd, size_bytes))
            self._drop_taken()

    def _drop_taken(self) -> None:
        left = []
        for fd, size_bytes in self._open:
            if os.fstat(fd).st_nlink:
                left.append((fd, size_bytes))
            else:
                os.close(fd)
        self._open = left

    def close(self) -> None:
        """Close the descriptors; the names stay."""
        with self._lock:
            for fd, _ in self._open:
                os.close(fd)
            self._open = []


def remove_old(ram_folder: Path, is_old: Callable[[str], bool]) -> None:
    """Remove what rounds have left whose ranks were all killed; `is_old` is called with names."""
    with contextlib.suppress(OSError):
        for folder in (ram_folder / EXCHANGE).iterdir():
            if is_old(folder.name):
                shutil.rmtree(folder, ignore_errors=True)


def _write_all(fd: int, data: memoryview | None) -> None:
    at = 0
    while data is not None and at < len(data):
        at += os.write(fd, data[at:])


def _read_all(fd: int, target: memoryview) -> bool:
    """Fill `target` with all bytes of a file; return whether it has as many."""
    if os.fstat(fd).st_size != len(target):
        return False
    at = 0
    while at < len(target):
        count = os.preadv(fd, [target[at:]], at)
        if not count:
            return False
        at += count
    return True
