"""The names of all files and folders in a run's directory: making and parsing them.

Invariant: each object has exactly one name; `parse(make(x)) == x`, and no other string parses.
Names from outside are matched whole, so that no name can lead out of the run's folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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

_CHECKPOINT = re.compile(r"([0-9]{9,16})\.([1-9][0-9]{0,8})")
_MANIFEST = re.compile(r"([0-9]{16})-([0-9]{9,16}\.[1-9][0-9]{0,8})\.json")
_ATTEMPT = re.compile(r"([0-9]{9})(?:\.copy)?\.json")
_PART = re.compile(r"part-([0-9]{5,7})-of-([0-9]{5,7})\.json")
_REUSED = re.compile(
    r"image-([0-9]{5,7})-of-([0-9]{5,7})\.from-([0-9]{9,16}\.[1-9][0-9]{0,8})\.safetensors"
)


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """One checkpoint: the step whose result it holds, and the attempt that took it."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return checkpoint_name(self)


def checkpoint_name(checkpoint: CheckpointId) -> str:
    """Return the name of a checkpoint: `000000120.3` for step 120 of attempt 3."""
    return f"{checkpoint.step:09d}.{checkpoint.attempt}"


def parse_checkpoint_name(name: str) -> CheckpointId | None:
    """Return the checkpoint of that name, or None for any other string."""
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        return None
    found = CheckpointId(int(match[1]), int(match[2]))
    in_bounds = found.step <= STEP_MAX and found.attempt <= ATTEMPT_MAX
    return found if in_bounds and checkpoint_name(found) == name else None


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
    found = parse_checkpoint_name(match[2]) if match is not None else None
    return found if found is not None and manifest_key(found) == key else None


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


def attempt_keys(attempt: int) -> tuple[str, str]:
    """Return the keys of an attempt's record and of its copy."""
    return f"{ATTEMPTS}/{attempt:09d}.json", f"{ATTEMPTS}/{attempt:09d}.copy.json"


def lease_key(attempt: int) -> str:
    """Return the key of an attempt's lease."""
    return f"{LEASES}/{attempt:09d}.json"


def parse_attempt_name(name: str) -> int | None:
    """Return the attempt whose record, or copy of it, has this file name, or None."""
    match = _ATTEMPT.fullmatch(name)
    return int(match[1]) or None if match else None
