"""JAX arrays in devices' memory: fixed for a save, and copied to the host.

A save fixes them by a copy on their own device, in the order of its queue: a later step with
donated buffers writes after the copy has read them. If a device has no room for the copy, the
arrays are borrowed: the training waits until they are in the host's memory.

Holdfast owns the copies: they are not donated, and live until they are released. So Holdfast's own
stream may read a copy as soon as XLA has computed it, which `block_until_ready` awaits on the saver
thread. XLA reports the device address of such an array, and its layout. See docs/decisions/0008.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from holdfast.adapt.jax.internals import device_layout
from holdfast.errors import DeviceError
from holdfast.format.grid import Region, contiguous_start, region_shape, slices_within

RESERVE_SHARE = 1 / 32
"""The share of a device's memory that stays free besides the known use by steps and copies."""

XlaError: type[Exception] = jax.errors.JaxRuntimeError
"""The error class of XLA, for stand-ins that raise the same."""

log = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """A kind of device's memory, as XLA manages it."""

    def memory_stats(self, device: Any) -> Mapping[str, int] | None:
        """Return `jax.Device.memory_stats`: bytes in use, their peak, their limit."""
        ...

    def device_copies(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Return copies of arrays of one device, computed in the order of its queue.

        Raises:
            JaxRuntimeError: RESOURCE_EXHAUSTED, if there is no room.
        """
        ...

    def wait(self, arrays: list[jax.Array]) -> None:
        """Wait until XLA has computed the arrays.

        Raises:
            JaxRuntimeError: the computation failed.
        """
        ...


class XlaMemory:
    """XLA's own memory management."""

    def memory_stats(self, device: Any) -> Mapping[str, int] | None:
        stats: Mapping[str, int] | None = device.memory_stats()
        return stats

    def device_copies(self, arrays: list[jax.Array]) -> list[jax.Array]:
        copies: list[jax.Array] = _device_copies(arrays)
        return copies

    def wait(self, arrays: list[jax.Array]) -> None:
        for array in arrays:
            array.block_until_ready()


@jax.jit
def _device_copies(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(a) for a in arrays]


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The runtime and memory management for devices of one JAX platform name."""

    open_runtime: Callable[[], DeviceRuntime]
    memory: DeviceMemory


_CUDA = Platform(open_runtime=open_cuda, memory=XlaMemory())
_OTHER: dict[str, Platform] = {}


@contextmanager
def serving(name: str, platform: Platform) -> Iterator[None]:
    """Use `platform` for devices of JAX's platform `name` within the context."""
    _OTHER[name] = platform
    is_host = name in jax_arrays.HOST_PLATFORMS
    jax_arrays.HOST_PLATFORMS.discard(name)
    try:
        yield
    finally:
        del _OTHER[name]
        if is_host:
            jax_arrays.HOST_PLATFORMS.add(name)


def _platform_of(device: Any) -> Platform | None:
    if device.platform in _OTHER:
        return _OTHER[device.platform]
    # AMD's devices have the platform name "gpu" too.
    is_cuda = device.platform == "gpu" and "cuda" in device.client.platform_version.lower()
    return _CUDA if is_cuda else None


class JaxDevices:
    """The state of one process about the devices that hold its states."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._training_peak_bytes: dict[Any, int] = {}
        self._alive_bytes: dict[Any, int] = {}
        self._alive_peak_bytes: dict[Any, int] = {}
        self._is_out_of_memory = False
        self._logged: set[str] = set()
        self._device: Any = None
        self._streams: Streams | None = None
        self._has_fallen_back = False

    def fix_arrays(self, arrays: Mapping[int, jax.Array]) -> DeviceArrays:
        """Fix those of `arrays` that are on devices, by their keys; for the training thread.

        CPU arrays are in the host's memory and are skipped, unless a test is `serving` the CPU.
        """
        kept = {key: array for key, array in arrays.items() if jax_arrays.is_on_device(array)}
        pieces = _Pieces(kept)
        sizes = pieces.sizes_bytes()
        memory = self._memory(pieces)
        copied = None
        if sizes and self._has_room(sizes, memory):
            copied = self._copied(pieces, memory)
        if copied is None:
            return DeviceArrays(self, memory, pieces, {})
        self._count(sizes, 1)
        self._log_once(logging.INFO, "copied", f"states are copied on {_names(sizes)} when saved")
        return DeviceArrays(self, memory, copied, sizes)

    def expect(self, arrays: Sequence[jax.Array]) -> None:
        """Let `pin` register memory for the device of the first of `arrays` that is on one."""
        for array in arrays:
            if jax_arrays.is_on_device(array) and array.addressable_shards:
                self._device = array.addressable_shards[0].device
                return

    def pin(self, memory: memoryview) -> RegisteredMemory | None:
        """Register memory; see `holdfast.adapt.contract.Snapshot.pin`."""
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
            self._fall_back(str(error))
            return None

    def _fall_back(self, reason: str) -> None:
        """Copy states to the host through NumPy from now on."""
        self._has_fallen_back = True
        self._log_once(
            logging.WARNING,
            "numpy",
            "states are copied from their devices through NumPy, at the rate of memory that is not "
            f"page-locked: {reason}",
        )

    @property
    def is_in_use(self) -> bool:
        """Whether devices copy into registered memory directly: no failure so far."""
        if not self._has_fallen_back and self._streams is not None and self._streams.failure:
            self._fall_back(str(self._streams.failure))
        return not self._has_fallen_back

    def released(self, sizes: Mapping[Any, int]) -> None:
        """Record that copies of these sizes were released."""
        self._count(sizes, -1)

    def ran_out(self) -> None:
        """Record that a copy found no room, although there seemed to be some."""
        self._is_out_of_memory = True

    def _memory(self, pieces: _Pieces) -> DeviceMemory:
        """Return the memory management of the pieces' devices, which are all of one kind."""
        platform = None
        for piece in pieces.all()[:1]:
            self._device = jax_arrays.device_of(piece)
            platform = _platform_of(self._device)
        return platform.memory if platform is not None else XlaMemory()

    def _copied(self, pieces: _Pieces, memory: DeviceMemory) -> _Pieces | None:
        try:
            return pieces.copied_pieces(memory)
        except XlaError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.ran_out()
            self._log_no_room(f"{_names(pieces.sizes_bytes())}: {str(error)[:200]}")
            return None

    def _has_room(self, sizes: Mapping[Any, int], memory: DeviceMemory) -> bool:
        """Return whether copies fit besides the training's peak use, on every device."""
        if self._is_out_of_memory:
            self._log_no_room(_names(sizes))
            return False
        for device, size_bytes in sizes.items():
            stats = memory.memory_stats(device) or {}
            limit_bytes = stats.get("bytes_limit", 0)
            if not limit_bytes:
                # No limit is known; the allocator raises if there is no room.
                continue
            used_bytes = self._most_used(device, stats)
            if used_bytes + size_bytes > limit_bytes * (1 - RESERVE_SHARE):
                self._log_no_room(
                    f"{device}: {used_bytes} of {limit_bytes} bytes are in use at the peak, and a "
                    f"copy takes {size_bytes}"
                )
                return False
        return True

    def _most_used(self, device: Any, stats: Mapping[str, int]) -> int:
        """Return the training's peak use plus the live copies; XLA's peak includes old copies."""
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

    def _log_no_room(self, reason: str) -> None:
        self._log_once(
            logging.WARNING,
            "borrowed",
            "no room for a copy of the state on its device, so each save blocks the training "
            f"while the state is copied to the host's memory ({reason})",
        )

    def _log_once(self, level: int, what: str, message: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            log.log(level, message)


class DeviceArrays:
    """The arrays of one state on devices. Threads may use it one after another."""

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
        self.is_borrowed = bool(pieces.array_keys()) and not copied_bytes

    def keys(self) -> list[int]:
        """Return the keys of the arrays."""
        return self._pieces.array_keys()

    def wait(self) -> None:
        """Wait until XLA has computed the arrays in the devices' memory.

        Raises:
            DeviceError: the computation failed.
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
        """Return the device range of `region` of piece `shard`, if its bytes fit an image as is."""
        piece = self._pieces.for_key(key).get(shard)
        before = contiguous_start(region, shard)
        if piece is None or before is None or not self._devices.is_in_use or not _is_plain(piece):
            return None
        return DeviceRange(
            device=_number(jax_arrays.device_of(piece)),
            address=piece.unsafe_buffer_pointer() + before * piece.dtype.itemsize,
            size_bytes=math.prod(region_shape(region)) * piece.dtype.itemsize,
            offset_bytes=offset_bytes,
        )

    def view_within(self, key: int, shard: Region, region: Region) -> np.ndarray:
        """Return `region` of piece `shard` in the host's memory; copy only that region.

        Raises:
            DeviceError: the copy failed.
        """
        piece, first = self._pieces.for_key(key)[shard], slices_within(region, shard)
        try:
            # One compiled program slices all regions of one shape, wherever they start.
            cut = jax.lax.dynamic_slice(piece, [s.start for s in first], region_shape(region))
            return np.asarray(cut)
        except XlaError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                # The device has no room for the slice: copy the whole piece.
                return self.views(key)[shard][first]
            raise DeviceError(f"bring a state to the host: {error}") from error

    def views(self, key: int) -> dict[Region, np.ndarray]:
        """Return the pieces in the host's memory, copied through NumPy.

        Raises:
            DeviceError: the copy failed.
        """
        try:
            return self._pieces.on_host(key)
        except XlaError as error:
            raise DeviceError(f"bring a state to the host: {error}") from error

    def release(self) -> None:
        """Release the arrays."""
        copied_bytes, self._copied_bytes = self._copied_bytes, {}
        self._devices.released(copied_bytes)
        self._pieces = _Pieces({})
        self.is_borrowed = False


class _Pieces:
    """Arrays as pieces on single devices: one piece per region, without replicas.

    Only shape and sharding of the arrays themselves are stored, so that copies do not keep memory
    alive that the training releases.
    """

    def __init__(self, arrays: Mapping[int, jax.Array]) -> None:
        self._forms = {key: (array.shape, array.sharding) for key, array in arrays.items()}
        load: dict[Any, int] = {}
        self._pieces = {key: _split(array, load) for key, array in arrays.items()}

    def array_keys(self) -> list[int]:
        """Return the keys of the arrays."""
        return list(self._pieces)

    def for_key(self, key: int) -> dict[Any, jax.Array]:
        """Return the pieces of an array by region; by position if its shards are no chunks."""
        return self._pieces[key]

    def all(self) -> list[jax.Array]:
        """Return all pieces."""
        return [piece for pieces in self._pieces.values() for piece in pieces.values()]

    def sizes_bytes(self) -> dict[Any, int]:
        """Return the bytes of the pieces on each device."""
        sizes: dict[Any, int] = {}
        for piece in self.all():
            device = jax_arrays.device_of(piece)
            sizes[device] = sizes.get(device, 0) + piece.nbytes
        return sizes

    def copied_pieces(self, memory: DeviceMemory) -> _Pieces:
        """Return copies of all pieces, by one call per device, which involves no other process."""
        places: dict[Any, list[tuple[int, Any]]] = {}
        for key, pieces in self._pieces.items():
            for place, piece in pieces.items():
                places.setdefault(jax_arrays.device_of(piece), []).append((key, place))
        result = _Pieces({})
        result._forms = self._forms
        result._pieces = {key: dict(pieces) for key, pieces in self._pieces.items()}
        for of_device in places.values():
            copies = memory.device_copies([self._pieces[key][place] for key, place in of_device])
            for (key, place), copy in zip(of_device, copies, strict=True):
                result._pieces[key][place] = copy
        return result

    def on_host(self, key: int) -> dict[Region, np.ndarray]:
        """Return the pieces of an array in the host's memory."""
        (shape, sharding), pieces = self._forms[key], self._pieces[key]
        if any(isinstance(place, int) for place in pieces):
            whole = ((0,) * len(shape), tuple(shape))
            shards = list(pieces.values())
            array_on_host = jax.make_array_from_single_device_arrays(shape, sharding, shards)
            return {whole: np.asarray(array_on_host)}
        return {region: np.asarray(piece) for region, piece in pieces.items()}


def _split(array: jax.Array, load: dict[Any, int]) -> dict[Any, jax.Array]:
    """Return an array's pieces; of replicas, the one on the device with the least load."""
    if len(array.sharding.device_set) == 1:
        whole = ((0,) * array.ndim, tuple(array.shape))
        return {whole: array}
    shards = [shard.data for shard in array.addressable_shards]
    regions = _regions(array.sharding, array.shape, array.is_fully_addressable)
    if regions is None:
        return dict(enumerate(shards))
    by_device = {jax_arrays.device_of(shard): shard for shard in shards}
    pieces: dict[Any, jax.Array] = {}
    for region, devices in regions:
        device = min(devices, key=lambda device: load.get(device, 0))
        pieces[region] = by_device[device]
        load[device] = load.get(device, 0) + by_device[device].nbytes
    return pieces


_Regions = tuple[tuple[Region, tuple[Any, ...]], ...]


@lru_cache(maxsize=4096)
def _regions(sharding: Any, shape: tuple[int, ...], addressable: bool) -> _Regions | None:
    """Return this process's chunks with the devices of each; None if shards are no chunks."""
    by_region: dict[Region, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        by_region.setdefault(jax_arrays.region_of(index, shape), []).append(device)
    chunks = jax_arrays.chunk_regions(sharding, shape, addressable)
    if not by_region.keys() <= chunks:
        return None
    return tuple((region, tuple(devices)) for region, devices in by_region.items())


def _number(device: Any) -> int:
    """Return the device's index among this process's devices of its kind."""
    number = device.local_hardware_id
    return int(device.id if number is None else number)


def _is_plain(piece: jax.Array) -> bool:
    """Return whether the device's bytes equal those of a C-ordered NumPy array."""
    layout = device_layout(piece)
    return (
        layout is not None
        and layout.major_to_minor == tuple(range(piece.ndim))
        and not layout.tiling
        and not _is_packed(np.dtype(piece.dtype))
        and piece.on_device_size_in_bytes() == piece.nbytes
        and piece.sharding.memory_kind in (None, _main_memory(jax_arrays.device_of(piece)))
    )


@lru_cache(maxsize=256)
def _main_memory(device: Any) -> str:
    """Return the kind of a device's own memory."""
    return str(device.default_memory().kind)


@lru_cache(maxsize=256)
def _is_packed(dtype: np.dtype) -> bool:
    """Return whether elements are below a byte: devices may pack them without reporting it."""
    if dtype.itemsize > 1 or dtype == np.bool_:
        return False
    kind: Any = ml_dtypes.iinfo if jnp.issubdtype(dtype, jnp.integer) else ml_dtypes.finfo
    return bool(kind(dtype).bits < 8)


def _names(devices: Mapping[Any, int]) -> str:
    return ", ".join(f"{device} ({size} bytes)" for device, size in devices.items())
