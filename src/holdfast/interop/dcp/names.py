"""The names and the place of a DCP checkpoint in Holdfast's format."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.building import local_path
from holdfast.errors import InvalidArgumentError
from holdfast.reading import Checkpoint

METADATA = ("__dcp_metadata__",)
"""The path of DCP's metadata, pickled."""


def checkpoint_directory(path: str | os.PathLike[str]) -> Path:
    """Return the absolute directory that a user has named; refuse a URL."""
    directory = local_path(path)
    if directory is None:
        raise InvalidArgumentError(
            f"use {path}: expected a path, found a URL; DCP's checkpoints are directories"
        )
    return directory


def is_of_dcp(checkpoint: Checkpoint) -> bool:
    """Return whether `HoldfastWriter` wrote the checkpoint."""
    return METADATA in checkpoint.values


def shard_name(start: tuple[int, ...]) -> str:
    """Return the name of a shard that is an array of its own."""
    return "at " + ",".join(map(str, start))
