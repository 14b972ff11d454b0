"""Where a run lies, and where this host keeps its own files of it.

A run lies in a directory, or at a URL of a bucket. What a store keeps there is named by keys
(`holdfast.format.names`); this module names the remaining files, which belong to hosts: events,
the agents' logs, and the agents' token. No other module joins a path of a run.

A run at a URL has no directory for them. They are in a folder of this host and user, one for each
URL, and nobody else may read it.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import xxhash

from holdfast.clock import Clock
from holdfast.environment import STATE_VARIABLE
from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.format.names import EVENTS, RUN_FILE
from holdfast.store.bucket.bucket_home import BucketHome
from holdfast.store.contract import DURABLE
from holdfast.store.disk import DiskStore
from holdfast.store.durable import DurableStore, RunHome
from holdfast.store.files.file_system import LOCAL, FileSystem
from holdfast.store.run_directory import RunDirectory

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_ONE_SLASH = re.compile(r"(s3|gs|az):/(?!/)")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
OUTER_MAX = 8
"""How many prefixes above a URL's own may be of a run that it is inside of."""
SCHEMES = ("s3", "gs", "az")
_REFUSED = '?#%\\{}^`[]"<>~|*'
"""Characters that clients of services encode, each in its own way."""


class RunLocation:
    """The place of one run: a path that is valid now, since a directory may be moved; or a URL."""

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.text = os.fspath(place)

    @classmethod
    def parse(cls, place: object) -> RunLocation:
        """Return the location that a user has given: with an absolute path, or a checked URL.

        Raises:
            InvalidArgumentError: It is neither a path nor a URL of a bucket and a prefix in it.
        """
        if not isinstance(place, str | os.PathLike) or not str(place):
            raise InvalidArgumentError(
                f"open a run: expected a path or a URL, found {place!r} ({type(place).__name__})"
            )
        text = str(os.fspath(place))
        if not _is_path(text):
            raise InvalidArgumentError(
                f"open a run: expected a path, found {text!a}, which no file system can have"
            )
        typo = _ONE_SLASH.match(text)
        if typo is not None:
            raise InvalidArgumentError(
                f"open {text}: expected a URL as {typo[1]}://bucket/runs/name, or a path; found "
                f"{typo[0]} with one slash, which would be a folder; write ./{text} for that"
            )
        url = _URL.fullmatch(text)
        return cls(_checked_url(text, url) if url is not None else os.path.abspath(text))

    def __str__(self) -> str:
        return self.text

    @property
    def is_url(self) -> bool:
        """Whether it is in a bucket."""
        return _URL.fullmatch(self.text) is not None

    @property
    def folder(self) -> Path:
        """The folder with this host's files of the run: the run's directory, if it has one."""
        if not self.is_url:
            return Path(self.text)
        return _state_root() / xxhash.xxh3_128_hexdigest(self.text.encode())

    @property
    def events(self) -> Path:
        """The folder of events and of the agents' logs."""
        return self.folder / EVENTS

    @property
    def record(self) -> Path:
        """The run's record, without which a directory is no run."""
        return self.folder / RUN_FILE

    def bucket_and_prefix(self) -> tuple[str, str]:
        """Return the bucket's URL and the prefix of the run in it; this must be a URL."""
        scheme, _, rest = self.text.partition("://")
        bucket, _, prefix = rest.partition("/")
        return f"{scheme}://{bucket}", prefix

    def outer(self) -> Iterator[RunLocation]:
        """Yield the places that this one is inside of, the nearest first.

        Those of a URL may take a request each, so they are at most `OUTER_MAX`.
        """
        if not self.is_url:
            yield from (RunLocation(str(parent)) for parent in Path(self.text).parents)
            return
        bucket, prefix = self.bucket_and_prefix()
        segments = prefix.split("/")[:-1]
        for count in range(len(segments), max(0, len(segments) - OUTER_MAX), -1):
            yield RunLocation("/".join((bucket, *segments[:count])))

    def overlaps(self, other: RunLocation) -> bool:
        """Return whether the two are one place, or one of them is inside the other."""
        inner, outer = sorted((f"{self.text}/", f"{other.text}/"), key=len, reverse=True)
        return inner.startswith(outer)

    def agent_log(self, host: str) -> Path:
        """Return the log of the agent of `host`."""
        return self.events / f"agent-{host}.log"

    def token(self, run_id: str) -> Path:
        """Return the file with the token by which the agents of a run know each other."""
        return self.folder / f"agents-{run_id}.token"

    def make_folder(self) -> None:
        """Create the folder of a run at a URL, for this user alone.

        Raises:
            StorageError: It cannot be created, or belongs to another user.
        """
        if not self.is_url:
            return
        folder = self.folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = os.lstat(folder)
        except OSError as error:
            raise StorageError(
                f"make {folder}, for this host's events and logs of {self.text}: {error.strerror}; "
                f"set {STATE_VARIABLE} to a folder that can be written"
            ) from error
        if state.st_uid != os.geteuid():
            raise StorageError(
                f"use {folder}, for this host's events and logs of {self.text}: expected a folder "
                f"of user {os.geteuid()}, found one of user {state.st_uid}; set {STATE_VARIABLE}"
            )

    def check_writable(self) -> None:
        """Check that the run's directory can be written, if there is one; ask no service.

        Raises:
            StorageError: It cannot; a reader needs no more.
        """
        if self.is_url or os.access(self.folder, os.W_OK | os.X_OK, effective_ids=True):
            return
        if not os.path.isdir(self.folder):
            return
        if os.statvfs(self.folder).f_flag & os.ST_RDONLY:
            found = "a file system that is mounted read-only; mount it for writing"
        else:
            state = self.folder.stat()
            found = f"one of user {state.st_uid} with mode {stat.S_IMODE(state.st_mode):o}; "
            found += "use it as that user, or change its permissions"
        raise StorageError(
            f"write to {self.folder}: expected a directory that user {os.geteuid()} may write, "
            f"found {found}. To read, holdfast.open_run needs no more"
        )


def open_durable(
    where: str | RunHome,
    clock: Clock,
    files: FileSystem = LOCAL,
    *,
    reads_directly: bool = False,
    tier: str = DURABLE,
) -> DurableStore:
    """Return the store of the run at `where`; nothing is read or written yet.

    Args:
        where: a path, a URL, or the home of another store.
        clock: the time.
        files: the file system, for a run in a directory.
        reads_directly: read around the page cache: no other local process reads the same bytes.
        tier: the name of the tier that it is for the caller.

    Raises:
        InvalidArgumentError: it is a URL, and obstore is not installed or not configured.
    """
    if isinstance(where, RunDirectory):
        return DiskStore(where, clock, files, reads_directly=reads_directly, tier=tier)
    location = RunLocation(where if isinstance(where, str) else where.location_text)
    if location.is_url:
        # Only a run in a bucket needs them.
        from holdfast.store.bucket.bucket import BucketStore
        from holdfast.store.bucket.object_service import connect

        bucket, prefix = location.bucket_and_prefix()
        home = BucketHome(location.text, location.folder)
        return BucketStore(connect(bucket), f"{prefix}/", clock, home=home, tier=tier)
    return DiskStore(Path(location.text), clock, files, reads_directly=reads_directly, tier=tier)


def _is_path(text: str) -> bool:
    """Return whether the operating system takes it for a path at all."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _checked_url(text: str, url: re.Match[str]) -> str:
    scheme, rest = url["scheme"].lower(), url["rest"]
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    example = f"{scheme if scheme in SCHEMES else 's3'}://bucket/runs/name"
    if scheme not in SCHEMES:
        schemes = ", ".join(f"{name}://" for name in SCHEMES)
        raise InvalidArgumentError(
            f"open {text}: expected a URL that begins with one of {schemes}, found {scheme}://"
        )
    if "@" in bucket or ":" in bucket:
        # Not repeated: what is before an @ may be a password.
        raise InvalidArgumentError(
            f"open a run at a {scheme}:// URL: expected a bucket as in {example}, found "
            "credentials or a port; give them by the environment (docs/buckets.md)"
        )
    if not _BUCKET.fullmatch(bucket):
        raise InvalidArgumentError(
            f"open {text}: expected a bucket's name as in {example}, found {bucket!r}"
        )
    if not prefix:
        raise InvalidArgumentError(
            f"open {text}: expected a prefix for the run as in {example}, found a bucket alone"
        )
    bad = next((s for s in prefix.split("/") if not s or s in (".", "..")), None)
    if bad is not None or set(prefix) & set(_REFUSED) or not prefix.isprintable():
        raise InvalidArgumentError(
            f"open {text}: expected a prefix as in {example}, found one with an empty or relative "
            f"segment, or with one of {' '.join(_REFUSED)}"
        )
    return f"{scheme}://{bucket}/{prefix}"


def _state_root() -> Path:
    """Return the folder for this user's files of runs in buckets, on this host."""
    setting = os.environ.get(STATE_VARIABLE)
    if setting:
        return Path(os.path.abspath(setting))
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    # A container's user may have no home: then nothing there can be made.
    if os.path.isabs(home) and os.access(_nearest(Path(home)), os.W_OK | os.X_OK):
        return Path(home) / "holdfast"
    try:
        return Path(tempfile.gettempdir()) / f"holdfast-state-{os.geteuid()}"
    except FileNotFoundError as error:
        raise StorageError(
            "open a run in a bucket: no folder on this host can be written, for its agent's log "
            f"and token; set {STATE_VARIABLE} to one"
        ) from error


def _nearest(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return path if path.exists() or path.parent == path else _nearest(path.parent)
