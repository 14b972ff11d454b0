"""JAX arrays in devices' memory: fixed for a save, and brought to the host.

A save fixes them by a copy on their own device, in the order of its queue: a later step that takes
donated buffers writes after the copy has read them. Where a device has no room for that, the arrays
are borrowed: the training waits until they are in the host's memory.

A copy is nobody else's: it is not donated, and lives until it is released. So a stream of our own
may read it as soon as XLA says that it is made; `block_until_ready` is that word, on the thread
that saves. XLA tells a device's own address of such an array, and its layout.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from holdfast.adapt.contract import DeviceRange
from holdfast.adapt.devices.cuda import open_cuda
from holdfast.adapt.devices.runtime import DeviceRuntime
from holdfast.adapt.devices.transfers import RegisteredMemory, Streams
from holdfast.adapt.jax import arrays as jax_arrays
from holdfast.errors import DeviceError
from holdfast.format.grid import Region, contiguous_start, region_shape, slices_within

RESERVE_SHARE = 1 / 32
"""Of a device's memory, kept free besides what steps and copies are known to take."""

XlaError: type[Exception] = jax.errors.JaxRuntimeError
"""What XLA raises, so that others can fail as it does."""

log = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """A kind of device's memory, as XLA manages it."""

    def stats(self, device: Any) -> Mapping[str, int] | None:
        """What `jax.Device.memory_stats` tells: bytes in use, their peak, their limit."""
        ...

    def copies(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Copies of arrays of one device, made in the order of its queue.

        Raises:
            JaxRuntimeError: RESOURCE_EXHAUSTED, where there is no room.
        """
        ...

    def wait(self, arrays: list[jax.Array]) -> None:
        """Waits until XLA has made the arrays.

        Raises:
            JaxRuntimeError: it never will.
        """
        ...


class XlaMemory:
    """XLA's own."""

    def stats(self, device: Any) -> Mapping[str, int] | None:
        found: Mapping[str, int] | None = device.memory_stats()
        return found

    def copies(self, arrays: list[jax.Array]) -> list[jax.Array]:
        made: list[jax.Array] = _device_copies(arrays)
        return made

    def wait(self, arrays: list[jax.Array]) -> None:
        for array in arrays:
            array.block_until_ready()


@jax.jit
def _device_copies(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(a) for a in arrays]


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """How the devices that JAX calls by one name are served."""

    open_runtime: Callable[[], DeviceRuntime]
    memory: DeviceMemory


_CUDA = Platform(open_runtime=open_cuda, memory=XlaMemory())
_OTHER: dict[str, Platform] = {}


@contextmanager
def serving(name: str, platform: Platform) -> Iterator[None]:
    """Serves the devices that JAX calls `name` by `platform`, in states seen meanwhile."""
    _OTHER[name] = platform
    try:
        yield
    finally:
        del _OTHER[name]


def _platform_of(device: Any) -> Platform | None:
    if device.platform in _OTHER:
        return _OTHER[device.platform]
    # AMD's devices are called "gpu" too.
    is_cuda = device.platform == "gpu" and "cuda" in device.client.platform_version.lower()
    return _CUDA if is_cuda else None


class JaxDevices:
    """What one process knows of the devices that its states are on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._training_peak_bytes: dict[Any, int] = {}
        self._alive_bytes: dict[Any, int] = {}
        self._alive_peak_bytes: dict[Any, int] = {}
        self._is_out_of_memory = False
        self._told: set[str] = set()
        self._device: Any = None
        self._streams: Streams | None = None
        self._has_given_up = False

    def hold(self, arrays: Mapping[int, jax.Array]) -> DeviceArrays:
        """Fixes those of `arrays` that devices keep, by their keys; called on the training thread.

        A CPU's arrays are in the host's memory and not among them, unless a test says otherwise.
        """
        kept = {key: array for key, array in arrays.items() if is_on_device(array)}
        pieces = _Pieces(kept)
        sizes = pieces.sizes_bytes()
        memory = self._memory(pieces)
        copied = None
        if sizes and self._has_room(sizes, memory):
            copied = self._copied(pieces, memory)
        if copied is None:
            return DeviceArrays(self, memory, pieces, {})
        self._count(sizes, 1)
        self._tell(logging.INFO, "copied", f"states are copied on {_names(sizes)} when saved")
        return DeviceArrays(self, memory, copied, sizes)

    def pin(self, memory: memoryview) -> RegisteredMemory | None:
        """See `holdfast.adapt.contract.Snapshot.pin`."""
        if self._device is None or not memory or not self.is_in_use:
            return None
        try:
            if self._streams is None:
                platform = _platform_of(self._device)
                if platform is None:
                    return None
                self._streams = Streams(platform.open_runtime())
            return RegisteredMemory(self._streams, memory, _number(self._device))
        except DeviceError as error:
            self._give_up(str(error))
            return None

    def _give_up(self, reason: str) -> None:
        """From now on states leave their devices through NumPy."""
        self._has_given_up = True
        self._tell(
            logging.WARNING,
            "numpy",
            "states leave their devices through NumPy, at the rate of memory that is not locked "
            f"in place: {reason}",
        )

    @property
    def is_in_use(self) -> bool:
        """Whether devices copy into registered memory by themselves, as long as none failed."""
        if not self._has_given_up and self._streams is not None and self._streams.failure:
            self._give_up(str(self._streams.failure))
        return not self._has_given_up

    def released(self, sizes: Mapping[Any, int]) -> None:
        """Copies of these sizes are gone."""
        self._count(sizes, -1)

    def ran_out(self) -> None:
        """A copy found no room, although there seemed to be some."""
        self._is_out_of_memory = True

    def _memory(self, pieces: _Pieces) -> DeviceMemory:
        """How the memory is managed where the pieces are; devices of two kinds are not mixed."""
        platform = None
        for piece in pieces.all()[:1]:
            self._device = _device_of(piece)
            platform = _platform_of(self._device)
        return platform.memory if platform is not None else XlaMemory()

    def _copied(self, pieces: _Pieces, memory: DeviceMemory) -> _Pieces | None:
        try:
            return pieces.copied_pieces(memory)
        except XlaError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.ran_out()
            self._tell_no_room(f"{_names(pieces.sizes_bytes())}: {str(error)[:200]}")
            return None

    def _has_room(self, sizes: Mapping[Any, int], memory: DeviceMemory) -> bool:
        """Whether copies fit beside the most that the training took so far, on every device."""
        if self._is_out_of_memory:
            self._tell_no_room(_names(sizes))
            return False
        for device, size_bytes in sizes.items():
            stats = memory.stats(device) or {}
            limit_bytes = stats.get("bytes_limit", 0)
            if not limit_bytes:
                # Nobody knows; the allocator will tell.
                continue
            used_bytes = self._most_used(device, stats)
            if used_bytes + size_bytes > limit_bytes * (1 - RESERVE_SHARE):
                self._tell_no_room(
                    f"{device}: {used_bytes} of {limit_bytes} bytes are in use at the peak, and a "
                    f"copy takes {size_bytes}"
                )
                return False
        return True

    def _most_used(self, device: Any, stats: Mapping[str, int]) -> int:
        """The peak of the training with what is copied now; earlier copies are in XLA's peak."""
        with self._lock:
            in_use_bytes = stats.get("bytes_in_use", 0)
            alive_bytes = self._alive_bytes.get(device, 0)
            of_training = max(
                stats.get("peak_bytes_in_use", 0) - self._alive_peak_bytes.get(device, 0),
                in_use_bytes - alive_bytes,
                self._training_peak_bytes.get(device, 0),
            )
            self._training_peak_bytes[device] = of_training
            return of_training + alive_bytes

    def _count(self, sizes: Mapping[Any, int], sign: int) -> None:
        with self._lock:
            for device, size_bytes in sizes.items():
                alive = self._alive_bytes.get(device, 0) + sign * size_bytes
                self._alive_bytes[device] = alive
                self._alive_peak_bytes[device] = max(alive, self._alive_peak_bytes.get(device, 0))

    def _tell_no_room(self, reason: str) -> None:
        self._tell(
            logging.WARNING,
            "borrowed",
            "no room for a copy of the state on its device, so each save holds the training up "
            f"while the state goes to the host's memory ({reason})",
        )

    def _tell(self, level: int, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.log(level, message)


class DeviceArrays:
    """The arrays of one state that devices keep; threads may use it one after another."""

    def __init__(
        self,
        devices: JaxDevices,
        memory: DeviceMemory,
        pieces: _Pieces,
        copied_bytes: Mapping[Any, int],
    ) -> None:
        self._devices = devices
        self._memory = memory
        self._pieces = pieces
        self._copied_bytes = copied_bytes
        self.is_borrowed = bool(pieces.keys()) and not copied_bytes

    def keys(self) -> list[int]:
        """Return the keys of the arrays."""
        return self._pieces.keys()

    def wait(self) -> None:
        """Waits until the bytes are in the devices' memory: XLA has done what they come from.

        Raises:
            DeviceError: they never will be.
        """
        try:
            self._memory.wait(self._pieces.all())
        except XlaError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                self._devices.ran_out()
            raise DeviceError(f"copy a state on its device: {error}") from error

    def range(
        self, key: int, shard: Region, region: Region, offset_bytes: int
    ) -> DeviceRange | None:
        """Where `region` of the piece `shard` is, if its bytes belong into an image as they are."""
        piece = self._pieces.for_key(key).get(shard)
        before = contiguous_start(region, shard)
        if piece is None or before is None or not self._devices.is_in_use or not _is_plain(piece):
            return None
        return DeviceRange(
            device=_number(_device_of(piece)),
            address=piece.unsafe_buffer_pointer() + before * piece.dtype.itemsize,
            size_bytes=math.prod(region_shape(region)) * piece.dtype.itemsize,
            offset_bytes=offset_bytes,
        )

    def view_within(self, key: int, shard: Region, region: Region) -> np.ndarray:
        """`region` of the piece `shard` in the host's memory; the rest stays where it is.

        Raises:
            DeviceError: the device did not give it.
        """
        piece, first = self._pieces.for_key(key)[shard], slices_within(region, shard)
        try:
            # Regions of one shape are cut out by one program, wherever they start.
            cut = jax.lax.dynamic_slice(piece, [s.start for s in first], region_shape(region))
            return np.asarray(cut)
        except XlaError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                # The device has no room for it twice.
                return self.views(key)[shard][first]
            raise DeviceError(f"bring a state to the host: {error}") from error

    def views(self, key: int) -> dict[Region, np.ndarray]:
        """Return the pieces in the host's memory, by NumPy.

        Raises:
            DeviceError: the device did not give them.
        """
        try:
            return self._pieces.on_host(key)
        except XlaError as error:
            raise DeviceError(f"bring a state to the host: {error}") from error

    def release(self) -> None:
        """Lets go of the arrays."""
        copied_bytes, self._copied_bytes = self._copied_bytes, {}
        self._devices.released(copied_bytes)
        self._pieces = _Pieces({})
        self.is_borrowed = False


class _Pieces:
    """Arrays, each as pieces on single devices: one for each region, none of them twice.

    Of the arrays themselves only shape and sharding stay, so that copies of them keep nothing alive
    of what the training lets go.
    """

    def __init__(self, arrays: Mapping[int, jax.Array]) -> None:
        self._forms = {key: (array.shape, array.sharding) for key, array in arrays.items()}
        load: dict[Any, int] = {}
        self._pieces = {key: _split(array, load) for key, array in arrays.items()}

    def keys(self) -> list[int]:
        """Return the keys of the arrays."""
        return list(self._pieces)

    def for_key(self, key: int) -> dict[Any, jax.Array]:
        """The pieces of an array by region; of one whose shards are no chunks, by position."""
        return self._pieces[key]

    def all(self) -> list[jax.Array]:
        """All pieces."""
        return [piece for pieces in self._pieces.values() for piece in pieces.values()]

    def sizes_bytes(self) -> dict[Any, int]:
        """How much each device keeps."""
        sizes: dict[Any, int] = {}
        for piece in self.all():
            device = _device_of(piece)
            sizes[device] = sizes.get(device, 0) + piece.nbytes
        return sizes

    def copied_pieces(self, memory: DeviceMemory) -> _Pieces:
        """Copies of all pieces, by a call for each device in which no other process has part."""
        places: dict[Any, list[tuple[int, Any]]] = {}
        for key, pieces in self._pieces.items():
            for place, piece in pieces.items():
                places.setdefault(_device_of(piece), []).append((key, place))
        result = _Pieces({})
        result._forms = self._forms
        result._pieces = {key: dict(pieces) for key, pieces in self._pieces.items()}
        for of_device in places.values():
            copies = memory.copies([self._pieces[key][place] for key, place in of_device])
            for (key, place), copy in zip(of_device, copies, strict=True):
                result._pieces[key][place] = copy
        return result

    def on_host(self, key: int) -> dict[Region, np.ndarray]:
        """Return the pieces of an array in the host's memory."""
        (shape, sharding), pieces = self._forms[key], self._pieces[key]
        if any(isinstance(place, int) for place in pieces):
            whole = ((0,) * len(shape), tuple(shape))
            shards = list(pieces.values())
            made = jax.make_array_from_single_device_arrays(shape, sharding, shards)
            return {whole: np.asarray(made)}
        return {region: np.asarray(piece) for region, piece in pieces.items()}


def is_on_device(array: jax.Array) -> bool:
    """Return whether an array is in a device's memory, and not in the host's."""
    device = _device_of(array)
    return device.platform != "cpu" or "cpu" in _OTHER


def _split(array: jax.Array, load: dict[Any, int]) -> dict[Any, jax.Array]:
    """An array's pieces; of replicas, the one on the device that has least so far."""
    if len(array.sharding.device_set) == 1:
        whole = ((0,) * array.ndim, tuple(array.shape))
        return {whole: array}
    shards = [shard.data for shard in array.addressable_shards]
    regions = _regions(array.sharding, array.shape, array.is_fully_addressable)
    if regions is None:
        return dict(enumerate(shards))
    by_device = {_device_of(shard): shard for shard in shards}
    pieces: dict[Any, jax.Array] = {}
    for region, devices in regions:
        device = min(devices, key=lambda one: load.get(one, 0))
        pieces[region] = by_device[device]
        load[device] = load.get(device, 0) + by_device[device].nbytes
    return pieces


_Regions = tuple[tuple[Region, tuple[Any, ...]], ...]


@lru_cache(maxsize=4096)
def _regions(sharding: Any, shape: tuple[int, ...], addressable: bool) -> _Regions | None:
    """The chunks that this process holds, with the devices of each; None: its shards are none."""
    by_region: dict[Region, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        by_region.setdefault(jax_arrays.region_of(index, shape), []).append(device)
    chunks = jax_arrays.chunk_regions(sharding, shape, addressable)
    if not by_region.keys() <= chunks:
        return None
    return tuple((region, tuple(devices)) for region, devices in by_region.items())


def _device_of(piece: jax.Array) -> Any:
    return next(iter(piece.sharding.device_set))


def _number(device: Any) -> int:
    """Return the device's number among those of its kind that this process sees."""
    number = device.local_hardware_id
    return int(device.id if number is None else number)


def _is_plain(piece: jax.Array) -> bool:
    """Return whether the device's bytes are those of a C-ordered array of NumPy's."""
    form: Any = piece
    layout = form.format.layout
    return (
        layout is not None
        and tuple(layout.major_to_minor) == tuple(range(piece.ndim))
        and not layout.tiling
        and not _is_packed(np.dtype(piece.dtype))
        and piece.on_device_size_in_bytes() == piece.nbytes
        and piece.sharding.memory_kind in (None, "device")
    )


@lru_cache(maxsize=256)
def _is_packed(dtype: np.dtype) -> bool:
    """Whether elements are less than a byte: a device may pack them, and its layout tells not."""
    if dtype.itemsize > 1 or dtype == np.bool_:
        return False
    kind: Any = ml_dtypes.iinfo if jnp.issubdtype(dtype, jnp.integer) else ml_dtypes.finfo
    return bool(kind(dtype).bits < 8)


def _names(devices: Mapping[Any, int]) -> str:
    return ", ".join(f"{device} ({size} bytes)" for device, size in devices.items())
