"""The interface between the manager and a framework."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from holdfast.errors import DeviceError, InvalidArgumentError
from holdfast.format.grid import Placement, RestoreTarget
from holdfast.format.layout import Chunk
from holdfast.format.paths import NO_PREFIXES, Path, PathPrefixes
from holdfast.format.records import Alias, CheckpointSpec, Container, SavedValue
from holdfast.format.renaming import NO_RENAMING, Renaming

Mark = weakref.ReferenceType[Any] | None
"""A weak reference to an immutable array object; None for an array of a mutable kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayOutline:
    """One array of a state, without its bytes.

    `is_everywhere`: each process has an array of its own there, all assumed to be equal.
    """

    path: Path
    placement: Placement
    prng_impl: str | None
    scalar: bool
    weak_type: bool = False
    is_everywhere: bool = False


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Outline:
    """A state without its bytes. States of equal structure and sharding share one object."""

    arrays: tuple[ArrayOutline, ...]
    containers: tuple[Container, ...]
    process_values: tuple[Path, ...]
    aliases: tuple[Alias, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRange:
    """Contiguous bytes in a device's memory, and their offset in the host's memory."""

    device: int
    address: int
    size_bytes: int
    offset_bytes: int


class Transfer(Protocol):
    """Queued copies from devices into the host's memory. No method blocks."""

    def has_arrived(self, stop_bytes: int) -> bool:
        """Return whether all bytes below `stop_bytes` have arrived; callers pass ascending values.

        Raises:
            DeviceError: some of the bytes will never arrive.
        """
        ...

    def fail(self, error: DeviceError) -> None:
        """Mark the transfer, and its streams for later transfers, as failed: it is stuck."""
        ...

    def is_over(self) -> bool:
        """Return whether no device writes any more: all arrived or the rest failed."""
        ...


class PinnedMemory(Protocol):
    """Host memory that devices write into directly, at their full rate."""

    @property
    def is_busy(self) -> bool:
        """Whether a device may still write into it."""
        ...

    def queue_copies(self, ranges: Sequence[DeviceRange]) -> Transfer:
        """Queue the copies of `ranges`, which are sorted by their offset in the host's memory.

        The devices' memory must not change until the transfer is over. A copy that the device
        refuses is reported by the transfer.
        """
        ...

    def close(self) -> None:
        """Unregister the memory. Call it before unmapping, and not while it is busy."""
        ...


Pinning = Callable[[memoryview], PinnedMemory | None]
"""Registers host memory for devices; returns None if no device needs that or it fails."""


class Hold(Enum):
    """Where the bytes of a snapshot are, and for how long they stay as they are."""

    HOST = "host bytes"
    """All are in the host's memory, and unchanged until the snapshot is released."""
    DEVICE = "device bytes"
    """Some are in devices' memory; all are unchanged until the snapshot is released."""
    BORROWED = "borrowed"
    """Some belong to the training: copy or secure them before it passes the fence."""


class Snapshot(Protocol):
    """A fixed state: later changes by the training thread do not affect it.

    The fence of a borrowed state is the point up to which the training leaves the bytes unchanged.
    It is the end of the call that takes the snapshot, or a later one; see `at_fence`. Threads may
    use a snapshot one after another.

    Attributes:
        outline: the state without its bytes.
        values: the plain Python values.
        process_values: the states of stateful objects.
        marks: one mark per array of the outline; the same object has the same bytes again.
        hold: what the snapshot guarantees at present; `copy_borrowed` changes it.
        on_devices: the arrays, by their index in the outline, that were in a device's memory when
            the snapshot was taken. Comparing them by digest would need a copy to the host.
        pin: registers memory that this state, or one like it, will be copied into.
    """

    outline: Outline
    values: tuple[SavedValue, ...]
    process_values: tuple[SavedValue, ...]
    marks: tuple[Mark, ...]
    on_devices: frozenset[int]
    pin: Pinning

    @property
    def hold(self) -> Hold: ...

    def chunk_bytes(self, chunk: Chunk) -> memoryview:
        """Return the bytes of a chunk that this process holds: C order, little-endian.

        For an array in a device's memory this waits for a copy to the host.
        """
        ...

    def device_ranges(self, chunks: Sequence[Chunk]) -> dict[Chunk, DeviceRange]:
        """Return the device ranges of those `chunks` that a device can copy unchanged.

        Waits until the device has computed them: streams that wait for no other stream may read
        the ranges from then on, until the snapshot is released or the fence is passed.

        Raises:
            DeviceError: the device failed to compute them.
        """
        ...

    def check_unchanged(self) -> None:
        """Check that what a later fence guards is unchanged, as far as the framework reports it.

        Call it when the devices have copied the ranges.

        Raises:
            DeviceError: the training changed an array before the fence; the message has its path.
        """
        ...

    def copy_borrowed(self) -> None:
        """Copy what is borrowed into host memory of the snapshot's own; then nothing is borrowed.

        A failed device is reported by `chunk_bytes`.
        """
        ...

    def at_fence(self, finish: Callable[[], None]) -> bool:
        """Call `finish` on the training thread before it passes the fence of a borrowed state.

        `finish` returns when the state is copied or secured, perhaps by another thread.

        Returns:
            False if there is no fence after the end of the call that took the snapshot; `finish`
            is not called then.
        """
        ...

    def release(self) -> None:
        """Release the memory that the snapshot holds. Idempotent."""
        ...


class HeldState(Protocol):
    """The state of one step, by reference: nothing is copied, and it may change."""

    def change(self) -> str:
        """Return what forbids to use it as the state of its step; empty: it is unchanged."""
        ...

    def snapshot(self) -> Snapshot:
        """Return the state as it was; the values are those of the step."""
        ...


class ArraysOf(Enum):
    """Whose arrays a restore without `like` returns."""

    NUMPY = auto()
    FRAMEWORK = auto()
    """The framework's. It is an error if there is an array that the framework cannot have."""
    EITHER = auto()
    """The framework's, and NumPy's for NumPy scalars and for dtypes that the framework lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What a caller wants of a checkpoint.

    Attributes:
        like: gives structure, dtypes and sharding; None: nested dicts of arrays.
        only: the subtrees to read; None: all. Leaves of `like` elsewhere are kept as they are.
        partial: where `like` and the checkpoint may differ: a leaf that the checkpoint lacks, or
            has with another shape or kind, is kept from `like`; one that `like` lacks is ignored.
        cast: whether arrays are converted to the dtypes of `like`.
        arrays: whose arrays are returned where there is no `like`.
        renaming: new names for what the checkpoint has; the other members mean these.
        call: the caller's name, for messages.
    """

    like: object = None
    only: PathPrefixes | None = None
    partial: PathPrefixes = NO_PREFIXES
    cast: bool = False
    arrays: ArraysOf = ArraysOf.NUMPY
    renaming: Renaming = NO_RENAMING
    call: str = "restore"

    def wants(self, path: Path) -> bool:
        """Return whether `path` is in the part of the tree to read."""
        return self.only is None or self.only.covers(path)


EVERYTHING = RestoreRequest()
"""The whole checkpoint, as nested dicts of NumPy arrays."""


class Restoration(Protocol):
    """A state being restored: fill the targets, convert, then finish.

    Attributes:
        targets: the buffers to fill.
        process_values: the paths of the objects in the state that keep a state of their own.
        divided: those of `process_values` whose objects take the states of all processes that
            saved (`leaves.ProcessStates`), where that is another number of processes.
        pipelines: what those of `process_values` that are iterators read (`pipelines`), by path.
        kept: the paths of the leaves of `like` that stay as they are, because the checkpoint lacks
            them or has them in another shape or kind.
    """

    targets: Sequence[RestoreTarget]
    process_values: Sequence[Path]
    divided: Sequence[Path]
    pipelines: Mapping[Path, Sequence[str]]
    kept: Sequence[Path]

    def convert_dtypes(self) -> None:
        """Convert the filled buffers to the dtypes that were asked for.

        Raises:
            StructureMismatchError: an integer does not fit the dtype asked for.
        """
        ...

    def finish(self, process_values: Mapping[Path, object]) -> object:
        """Return the state. The targets must be filled; their buffers belong to the state now.

        `process_values` are the states of stateful objects, by path. They are set only here, so
        that a failed restore changes nothing.
        """
        ...


class KeyValues(Protocol):
    """The framework's key-value service, shared by all processes of a job.

    Keys are names separated by slashes. Every call is bounded and waits for no other process.

    Raises:
        ProcessLostError: the service does not answer; every call may raise it.
    """

    def put_if_absent(self, key: str, value: str) -> bool:
        """Put a value that is never changed; return False if the key has one already."""
        ...

    def get(self, key: str) -> str | None:
        """Return the value, or None if there is none (yet)."""
        ...

    def get_many(self, folder: str, names: Sequence[str]) -> dict[str, str]:
        """Return those values whose keys are `folder`, a slash and one of `names`, by name."""
        ...

    def delete(self, folder: str, names: Sequence[str]) -> None:
        """Remove the values whose keys are `folder`, a slash and one of `names`, as far as any."""
        ...


class Processes(Protocol):
    """The processes of one training job.

    Attributes:
        rank: this process's index, from 0.
        count: the number of processes.
        slice_index: the slice of this process's devices; None where the job has one slice only, or
            the devices do not report it.
    """

    rank: int
    count: int

    @property
    def slice_index(self) -> int | None: ...

    def key_values(self) -> KeyValues:
        """Return the key-value service that the processes share.

        Raises:
            InvalidArgumentError: the framework's service was not started.
        """
        ...


class OwnProcess:
    """The `Processes` of a job of one."""

    rank = 0
    count = 1
    slice_index = None

    def key_values(self) -> KeyValues:
        raise InvalidArgumentError(
            "share values between processes: expected a job of several processes, found one"
        )


class Framework(Protocol):
    """A framework: its representation of states, and its processes."""

    def processes(self) -> Processes: ...

    def snapshot(self, state: object) -> Snapshot:
        """Fix `state`. Called on the training thread, so it must be fast.

        Raises:
            UnsupportedLeafError: a leaf cannot be saved; the message has its path and type.
        """
        ...

    def outline(self, state: object) -> Outline:
        """Return the outline that a snapshot of `state` would have.

        Raises:
            UnsupportedLeafError: as `snapshot`.
        """
        ...

    def hold(self, state: object) -> HeldState:
        """Keep `state` by reference.

        Raises:
            UnsupportedLeafError: as `snapshot`.
        """
        ...

    def pinning(self, state: object) -> Pinning:
        """Return what registers memory that states like `state` will be copied into.

        Raises:
            UnsupportedLeafError: as `snapshot`.
        """
        ...

    def watch_compilations(self, report: Callable[[float], None]) -> Callable[[], None]:
        """Call `report` with the seconds of each compilation on this thread, when that has ended.

        A framework that reports no compilations does nothing.

        Returns:
            What ends that; may be called again, and in a forked child.
        """
        ...

    def restoration(self, spec: CheckpointSpec, request: RestoreRequest) -> Restoration:
        """Prepare a state as `request` describes it.

        Raises:
            StructureMismatchError: `like` differs from what was saved, outside of
                `request.partial`; or `request.only` names a subtree that was not saved. The
                message lists all differences by path.
        """
        ...
