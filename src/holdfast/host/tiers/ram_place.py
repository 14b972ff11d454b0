"""The place of the run whose checkpoints are in this host's RAM, as its last agent knew it.

RAM is found by the run's id. A directory that was moved to another file system has another inode
there, as a copy has. So an agent notes its directory beside the RAM tier, and a start elsewhere
finds out from that whether the run has moved (`trainer.opening.moved_runs`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

import msgspec

from holdfast.clock import Clock
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.format.json_codec import decode
from holdfast.format.names import CheckpointId, age_of
from holdfast.store.durable import RunHome
from holdfast.store.files.whole_file import replace_file
from holdfast.store.ram import RamStore

PLACE = "place"
NAMED_MAX = 10
"""How many of the newest steps a message names."""


class RamPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a run.

    Attributes:
        path: the path or the URL.
        identity: as `RunHome.identity_text`. RAM does not outlive the host's boot, so its device
            number is comparable.
        is_gone: the agent saw that the directory no longer exists.
    """

    path: str
    identity: str
    is_gone: bool = False

    def is_at(self, home: RunHome) -> bool:
        """Return whether it is this place: the same path, and the same directory."""
        return (self.path, self.identity) == (home.location_text, home.identity_text)


def note_place(folder: Path, place: RamPlace) -> None:
    """Note in the agent's folder the place of the run that its agent works on.

    Raises:
        OSError: It cannot be written.
    """
    replace_file(folder / PLACE, msgspec.json.encode(place))


def place_of(home: RunHome, *, is_gone: bool = False) -> RamPlace:
    """Return the place of a run's home."""
    return RamPlace(path=home.location_text, identity=home.identity_text, is_gone=is_gone)


def noted_place(folder: Path) -> RamPlace | None:
    """Return the place of the run that the folder's last agent worked on, if it is noted."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return decode((folder / PLACE).read_bytes(), RamPlace)
    return None


def whole_in(ram_root: Path, clock: Clock) -> list[CheckpointId]:
    """Return the whole checkpoints in a RAM tier, the newest last.

    Raises:
        StorageError: It cannot be listed.
    """
    listed = list_checkpoints(RamStore(ram_root, _reads_only, clock))
    return sorted((c for c in listed if listed[c].is_complete), key=age_of)


def _reads_only(size_bytes: int) -> str:
    raise AssertionError("nothing is written here")


def steps_text(checkpoints: Collection[CheckpointId]) -> str:
    """Return the newest of the steps in words, ascending; there is at least one."""
    *others, newest = sorted({checkpoint.step for checkpoint in checkpoints})[-NAMED_MAX:]
    if not others:
        return f"step {newest}"
    return f"steps {', '.join(map(str, others))} and {newest}"


def kept_text(folder: Path, checkpoints: Collection[CheckpointId]) -> str:
    """Return what stays in RAM of a run whose directory is gone, and how to get it or free it."""
    return (
        f"This host's RAM ({folder}) keeps {steps_text(checkpoints)}, which may be nowhere else: "
        "if the run was moved, start again at its new place, which continues from there; `holdfast "
        "clean --all` frees the RAM"
    )
