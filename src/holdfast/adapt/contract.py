"""What the manager needs of a framework."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.errors import DeviceError
from holdfast.format.layout import Chunk
from holdfast.format.paths import Path
from holdfast.format.placement import Placement, RestoreTarget
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
    """A state without its bytes. States of one structure and sharding give the same object."""

    arrays: tuple[ArrayOutline, ...]
    containers: tuple[Container, ...]
    process_values: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRange:
    """Contiguous bytes in a device's memory, and where in the host's memory they belong."""

    device: int
    address: int
    size_bytes: int
    offset_bytes: int


class Transfer(Protocol):
    """Copies from devices into the host's memory that are on their way. Nothing here waits."""

    def has_arrived(self, stop_bytes: int) -> bool:
        """Whether all of it that belongs below `stop_bytes` is there; stops only ever grow.

        Raises:
            DeviceError: some of it will never arrive.
        """
        ...

    def fail(self, error: DeviceError) -> None:
        """Counts as failed from here on, and so does the way that it takes: it does not move."""
        ...

    def is_over(self) -> bool:
        """Whether no device writes any more, be it that all arrived or that some of it failed."""
        ...


class PinnedMemory(Protocol):
    """Host memory that devices write into by themselves, at their full rate."""

    @property
    def is_busy(self) -> bool:
        """Whether a device may still write into it."""
        ...

    def start(self, ranges: Sequence[DeviceRange]) -> Transfer:
        """Queues the copies of `ranges`, which stand in the order of their places.

        The devices' memory is to be kept as it is until the transfer is over. What was refused is
        told by the transfer.
        """
        ...

    def close(self) -> None:
        """Lets go of the memory; to be called before it is unmapped, and not while it is busy."""
        ...


Pinning = Callable[[memoryview], PinnedMemory | None]
"""Makes host memory one that devices copy into; None where none does, or that is refused."""


class Snapshot(Protocol):
    """A state, fixed: what the training thread does from now on does not change it."""

    outline: Outline
    values: tuple[SavedValue, ...]
    process_values: tuple[SavedValue, ...]
    marks: tuple[Mark, ...]
    """For each array of the outline; the same object again has the same bytes."""
    is_on_host: bool
    """Whether all bytes are in the host's memory, so that copying them waits for no device."""
    pin: Pinning
    """For memory that this state, or one like it, is to be copied into."""

    @property
    def is_borrowed(self) -> bool:
        """Whether some bytes are the training's, to be copied before the training goes on."""
        ...

    def chunk_bytes(self, chunk: Chunk) -> memoryview:
        """The bytes of a chunk that this process holds: contiguous, C order, little-endian."""
        ...

    def device_ranges(self, chunks: Sequence[Chunk]) -> dict[Chunk, DeviceRange]:
        """Where those of `chunks` are that a device can copy as they are; waits until they are.

        Raises:
            DeviceError: the device did not make them.
        """
        ...

    def bring_to_host(self) -> None:
        """Copies into the host's memory what is on devices; then nothing is borrowed.

        Where a device fails, `chunk_bytes` tells.
        """
        ...

    def release(self) -> None:
        """Lets go of the memory that the snapshot holds."""
        ...


class Restoration(Protocol):
    """A state in the making: fill the targets, then finish.

    `process_values` are the paths of the objects in it that keep a state of their own.
    """

    targets: Sequence[RestoreTarget]
    process_values: Sequence[Path]

    def finish(self, process_values: Mapping[Path, object]) -> object:
        """The state; the targets are filled and are the state's own from now on.

        `process_values` are the states of the objects that keep one, by path. Only here do they
        take it, so that a restore that fails changes nothing.
        """
        ...


class KeyValues(Protocol):
    """Words that every process of a job can put and read: the framework's own service.

    Keys are names with slashes between them. Every call ends by itself, and waits for no process.

    Raises:
        ProcessLostError: the service does not answer; so from every call.
    """

    def put_if_absent(self, key: str, value: str) -> bool:
        """Puts a word that is never changed; False where one stands already."""
        ...

    def get(self, key: str) -> str | None:
        """The word, None where there is none (yet)."""
        ...

    def below(self, folder: str) -> dict[str, str]:
        """All words whose keys begin with `folder` and a slash, by what follows that."""
        ...

    def delete(self, folder: str) -> None:
        """Removes all words whose keys begin with `folder` and a slash; there may be none."""
        ...


class Processes(Protocol):
    """The processes of one training job.

    Attributes:
        rank: this process's index, from 0.
        count: how many there are.
        slice_index: the slice of this process's devices; None where the job has one slice only, or
            the devices do not tell.
    """

    rank: int
    count: int

    @property
    def slice_index(self) -> int | None: ...

    def key_values(self) -> KeyValues:
        """The words that the processes share.

        Raises:
            InvalidArgumentError: the framework's service was not started.
        """
        ...


class Framework(Protocol):
    """A framework: how it holds states."""

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

        `like` may leave out objects that keep a state, and nothing else.

        Raises:
            StructureMismatchError: `like` is not what was saved; all differences are told.
        """
        ...
