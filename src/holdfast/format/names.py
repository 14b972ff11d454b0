"""The names of all files and folders in a run's directory: making and parsing them.

Invariant: each object has exactly one name; `parse(make(x)) == x`, and no other string parses.
Names from outside are matched whole, so that no name can lead out of the run's folder.

See docs/decisions/0029 and docs/decisions/0038.
"""

from __future__ import annotations

import re
import zlib
from typing import Annotated

import msgspec

RUN_FILE = "holdfast.json"
REMOTE_FILE = "remote.json"
CHECKPOINTS = "checkpoints"
ATTEMPTS = "attempts"
LEASES = "leases"
EVENTS = "events"
COPIES = "copies"
MANIFESTS = f"{CHECKPOINTS}/manifests"
EXCHANGE = "exchange"
"""The folder of a RAM tier with what ranks pass on to each other during a restore."""

STEP_MAX = 10**15
ATTEMPT_MAX = 10**9 - 1
PART_COUNT_MAX = 10**6

TOKEN_CHARS = 8
"""The length of an attempt's token."""

_NAME = r"[0-9]{9,16}\.[1-9][0-9]{0,8}-[0-9a-f]{8}"
_CHECKPOINT = re.compile(r"([0-9]{9,16})\.([1-9][0-9]{0,8})-([0-9a-f]{8})")
_ATTEMPT_ID = re.compile(r"([1-9][0-9]{0,8})-([0-9a-f]{8})")
_MANIFEST = re.compile(rf"([0-9]{{16}})-({_NAME})\.json")
_ATTEMPT = re.compile(r"([0-9]{9})(?:\.copy)?\.json")
_PART = re.compile(r"part-([0-9]{5,7})-of-([0-9]{5,7})\.json")
_REUSED = re.compile(rf"image-([0-9]{{5,7}})-of-([0-9]{{5,7}})\.from-({_NAME})\.safetensors")


class AttemptId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One attempt: its number, which orders the attempts of a run, and a random token.

    A number is given twice if a run's directory is put back to an earlier state. The tokens of two
    such attempts differ, so neither takes the other's checkpoints for its own. `str` gives the
    number alone, which is what people see; `name` is part of the names of checkpoints.
    """

    number: Annotated[int, msgspec.Meta(ge=0, le=ATTEMPT_MAX)]
    token: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{8})?\Z")]

    @classmethod
    def of_start(cls, number: int, start: str) -> AttemptId:
        """Return the id of an attempt; `start` is the random token that its processes share."""
        return cls(number, f"{zlib.crc32(start.encode()):0{TOKEN_CHARS}x}")

    @property
    def name(self) -> str:
        """The number and the token: `3-9f2c41ab`."""
        return f"{self.number}-{self.token}"

    @property
    def is_valid(self) -> bool:
        """Whether this can be the id of an attempt, so no `NO_ATTEMPT`."""
        return 1 <= self.number <= ATTEMPT_MAX and len(self.token) == TOKEN_CHARS

    def __bool__(self) -> bool:
        return self.number > 0

    def __str__(self) -> str:
        return str(self.number)


NO_ATTEMPT = AttemptId(0, "")
"""Stands for the attempt where there is none: false, and older than every attempt."""


class CheckpointId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One checkpoint: the step whose result it holds, and the attempt that took it.

    The order is that of the steps, and of the attempts for one step.
    """

    step: Annotated[int, msgspec.Meta(ge=0, le=STEP_MAX)]
    attempt: AttemptId

    @property
    def age(self) -> Age:
        """The sort key of when checkpoints were taken: attempt, then step."""
        return self.attempt, self.step

    @property
    def is_valid(self) -> bool:
        """Whether this can be the id of a checkpoint."""
        return 0 <= self.step <= STEP_MAX and self.attempt.is_valid

    def __str__(self) -> str:
        return checkpoint_name(self)


Age = tuple[AttemptId, int]
"""`CheckpointId.age`."""

NO_AGE: Age = (NO_ATTEMPT, -1)
"""An age below that of every checkpoint."""


def age_of(checkpoint: CheckpointId | None) -> Age:
    """Return the age of a checkpoint; `NO_AGE` for None."""
    return checkpoint.age if checkpoint is not None else NO_AGE


def checkpoint_name(checkpoint: CheckpointId) -> str:
    """Return the name of a checkpoint: `000000120.3-9f2c41ab` for step 120 of that attempt 3."""
    return f"{checkpoint.step:09d}.{checkpoint.attempt.name}"


def parse_checkpoint_name(name: str) -> CheckpointId | None:
    """Return the checkpoint of that name, or None for any other string."""
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        return None
    checkpoint = CheckpointId(int(match[1]), AttemptId(int(match[2]), match[3]))
    is_name = checkpoint.is_valid and checkpoint_name(checkpoint) == name
    return checkpoint if is_name else None


def checkpoint_folder(checkpoint: CheckpointId) -> str:
    """Return the key of a checkpoint's folder, without a slash at the end."""
    return f"{CHECKPOINTS}/{checkpoint_name(checkpoint)}"


def image_key(checkpoint: CheckpointId, rank: int, part_count: int) -> str:
    """Return the key of the image that `rank` contributes."""
    return f"{checkpoint_folder(checkpoint)}/image-{rank:05d}-of-{part_count:05d}.safetensors"


def reused_image_key(
    checkpoint: CheckpointId, rank: int, part_count: int, origin: CheckpointId
) -> str:
    """Return the key in RAM of an image that `rank` wrote for `origin` and `checkpoint` reuses."""
    own = image_key(checkpoint, rank, part_count).removesuffix(".safetensors")
    return f"{own}.from-{checkpoint_name(origin)}.safetensors"


def part_key(checkpoint: CheckpointId, rank: int, part_count: int) -> str:
    """Return the key of the record beside that image."""
    return f"{checkpoint_folder(checkpoint)}/part-{rank:05d}-of-{part_count:05d}.json"


def manifest_key(checkpoint: CheckpointId) -> str:
    """Return the key of the commit record.

    All manifests are in one folder, so that a listing has nothing else. The name begins with the
    step, subtracted from the highest one: stores list by name, and so list the newest ones first.
    """
    return f"{MANIFESTS}/{STEP_MAX - checkpoint.step:016d}-{checkpoint_name(checkpoint)}.json"


def parse_manifest_key(key: str) -> CheckpointId | None:
    """Return the checkpoint of a manifest's key, or None for another key."""
    match = _MANIFEST.fullmatch(key.removeprefix(f"{MANIFESTS}/"))
    checkpoint = parse_checkpoint_name(match[2]) if match is not None else None
    return checkpoint if checkpoint is not None and manifest_key(checkpoint) == key else None


def parse_part_name(name: str) -> tuple[int, int] | None:
    """Return (rank, part count) of a part record's file name, or None for another name."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    rank, count = int(match[1]), int(match[2])
    whole = f"part-{rank:05d}-of-{count:05d}.json" == name
    return (rank, count) if whole and rank < count <= PART_COUNT_MAX else None


def parse_reused_image_name(name: str) -> tuple[int, int, CheckpointId] | None:
    """Return (rank, part count, origin) of a reused image's file name, or None for another name."""
    match = _REUSED.fullmatch(name)
    origin = parse_checkpoint_name(match[3]) if match is not None else None
    if match is None or origin is None:
        return None
    rank, count = int(match[1]), int(match[2])
    whole = name.startswith(f"image-{rank:05d}-of-{count:05d}.from-")
    return (rank, count, origin) if whole and rank < count <= PART_COUNT_MAX else None


def parse_object_key(key: str) -> tuple[CheckpointId, str] | None:
    """Return (checkpoint, file name) of the key of an object of a checkpoint, or None."""
    folder, _, name = key.removeprefix(f"{CHECKPOINTS}/").partition("/")
    checkpoint = parse_checkpoint_name(folder)
    return (checkpoint, name) if checkpoint is not None and name and "/" not in name else None


def parse_attempt_id(name: str) -> AttemptId | None:
    """Return the attempt whose `name` this is, or None for any other string."""
    match = _ATTEMPT_ID.fullmatch(name)
    return AttemptId(int(match[1]), match[2]) if match is not None else None


def attempt_keys(number: int) -> tuple[str, str]:
    """Return the keys of the record of the attempt with that number, and of its copy.

    The names have no token: of two starts that want one number, the store lets one have it.
    """
    return f"{ATTEMPTS}/{number:09d}.json", f"{ATTEMPTS}/{number:09d}.copy.json"


def lease_key(number: int) -> str:
    """Return the key of the lease of the attempt with that number."""
    return f"{LEASES}/{number:09d}.json"


def parse_attempt_name(name: str) -> int | None:
    """Return the number of the attempt whose record, or copy of it, has this file name, or None."""
    match = _ATTEMPT.fullmatch(name)
    return int(match[1]) or None if match else None
