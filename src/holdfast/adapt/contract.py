"""What the manager needs of a framework."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.format.layout import Chunk
from holdfast.format.paths import Path
from holdfast.format.placement import Placement, Target
from holdfast.format.records import CheckpointSpec, Container, SavedValue

Mark = weakref.ReferenceType[Any] | None
"""Leads to an array object that cannot change; None for one of a kind that can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayOutline:
    """One array of a state, without its bytes."""

    path: Path
    placement: Placement
    prng_impl: str | None
    scalar: bool


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Outline:
    """A state without its bytes. States of one structure and sharding give the same object.

    `is_on_host` tells whether all bytes are in the host's memory, so that copying them waits for no
    device.
    """

    arrays: tuple[ArrayOutline, ...]
    containers: tuple[Container, ...]
    process_values: tuple[Path, ...]
    is_on_host: bool


class Snapshot(Protocol):
    """A state, fixed: what the training thread does from now on does not change it."""

    outline: Outline
    values: tuple[SavedValue, ...]
    process_values: tuple[SavedValue, ...]
    marks: tuple[Mark, ...]
    """For each array of the outline; the same object again has the same bytes."""

    def chunk_bytes(self, chunk: Chunk) -> memoryview:
        """The bytes of a chunk that this process holds: contiguous, C order, little-endian."""
        ...

    def release(self) -> None:
        """Lets go of the memory that the snapshot holds."""
        ...


class Restoration(Protocol):
    """A state in the making: fill the targets, then finish."""

    targets: Sequence[Target]

    def finish(self, process_values: Mapping[Path, object]) -> object:
        """The state; the targets are filled and are the state's own from now on.

        `process_values` are the states of the objects that keep one, by path. Only here do they
        take it, so that a restore that fails changes nothing.
        """
        ...


class Processes(Protocol):
    """The processes of one training job."""

    rank: int
    count: int

    def agree(self, name: str, value: str) -> str:
        """Rank 0's `value`, on every rank; each `name` serves once."""
        ...


class Framework(Protocol):
    """A framework: how it holds states, and who its processes are."""

    def processes(self) -> Processes: ...

    def snapshot(self, state: object) -> Snapshot:
        """Fixes `state`. Called on the training thread, and costs it as little as can be.

        Raises:
            UnsupportedLeafError: a leaf cannot be saved; its path and type are told.
        """
        ...

    def outline(self, state: object) -> Outline:
        """The outline that a snapshot of `state` would have.

        Raises:
            UnsupportedLeafError: as `snapshot`.
        """
        ...

    def restoration(self, spec: CheckpointSpec, like: object) -> Restoration:
        """Prepares a state like `like`; with None, nested dicts of NumPy arrays.

        Raises:
            StructureMismatchError: `like` is not what was saved; all differences are told.
        """
        ...
