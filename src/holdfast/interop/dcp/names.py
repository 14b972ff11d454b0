"""The names and the place of a DCP checkpoint in Holdfast's format."""

from __future__ import annotations

import os

from holdfast.building import local_path
from holdfast.errors import InvalidArgumentError
from holdfast.reading import Checkpoint

METADATA = ("__dcp_metadata__",)
"""The path of DCP's metadata, pickled."""


def checkpoint_place(path: str | os.PathLike[str]) -> str:
    """Return the absolute path that a user has named, or the URL of a bucket.

    Raises:
        InvalidArgumentError: it is neither.
    """
    directory = local_path(path)
    return str(path) if directory is None else str(directory)


def is_place(path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint can be at `path`, which DCP asks of an id."""
    try:
        checkpoint_place(path)
    except InvalidArgumentError:
        return False
    return True


def is_of_dcp(checkpoint: Checkpoint) -> bool:
    """Return whether `HoldfastWriter` wrote the checkpoint."""
    return METADATA in checkpoint.values


def shard_name(start: tuple[int, ...]) -> str:
    """Return the name of a shard that is an array of its own."""
    return "at " + ",".join(map(str, start))
