"""The names of `orbax.checkpoint.v1.multihost`: the processes of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.shortcuts import sync_global_processes as sync_global_processes


def process_index() -> int:
    """Return the number of this process."""
    return int(jax.process_index())


def process_count() -> int:
    """Return how many processes the job has."""
    return int(jax.process_count())


def is_primary_host(primary_host: int | None) -> bool:
    """Return whether this process is the primary one; with None, each is."""
    return primary_host is None or primary_host == jax.process_index()


def is_pathways_backend() -> bool:
    """Return False: Pathways is not supported."""
    return False


if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("v1.multihost")
