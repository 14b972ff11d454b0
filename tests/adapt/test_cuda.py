"""CUDA's runtime behind the interface, against a fake of its calls; no GPU is needed here."""

from __future__ import annotations

import importlib.util
import itertools
import mmap
import sys

import numpy as np
import pytest

from holdfast.adapt.contract import DeviceRange
from holdfast.adapt.devices import cuda
from holdfast.adapt.devices.cuda import CudaRuntime, open_cuda
from holdfast.adapt.devices.transfers import PIECE_SIZE_BYTES, RegisteredMemory, Streams
from holdfast.adapt.jax import devices
from holdfast.errors import DeviceError
from tests.adapt.fake_cuda import FakeCuda, cudaError_t

HAS_BINDINGS = "cuda" in sys.modules or importlib.util.find_spec("cuda") is not None


def test_a_transfer_by_cuda_copies_what_it_should() -> None:
    fake = FakeCuda()
    runtime = CudaRuntime(fake)
    pages = mmap.mmap(-1, 10_000)
    source = np.random.default_rng(3).integers(0, 256, 9000, np.uint8)
    pinned = RegisteredMemory(Streams(runtime), memoryview(pages), 1)
    ((size, flags, device),) = fake.registered.values()
    assert (size, flags, device) == (10_000, fake.cudaHostRegisterPortable, 1)
    ranges = [
        DeviceRange(device=i, address=source.ctypes.data + at, size_bytes=n, offset_bytes=at)
        for i, at, n in [(0, 0, 4000), (1, 4000, 5000)]
    ]
    fake.is_ready = False
    transfer = pinned.queue_copies(ranges)
    assert not transfer.has_arrived(9000)
    assert pinned.is_busy
    fake.is_ready = True
    assert transfer.has_arrived(9000)
    assert transfer.is_over()
    assert pages[:9000] == source.tobytes()
    # Each device has streams and an event of its own, none of which waits or takes the time.
    assert fake.streams == [(fake.cudaStreamNonBlocking, device) for device in (0, 0, 1, 1)]
    assert fake.events == [(fake.cudaEventDisableTiming, 0), (fake.cudaEventDisableTiming, 1)]
    assert fake.recorded == [(0, 0), (1, 2)]
    assert not fake.awaited
    pinned.queue_copies(ranges).is_over()
    assert len(fake.events) == 2, "events were not used again"
    pinned.close()
    assert not fake.registered


def test_two_streams_of_a_device_take_turns_and_keep_the_order() -> None:
    fake = FakeCuda()
    pages = mmap.mmap(-1, 3 * PIECE_SIZE_BYTES + 100)
    source = np.random.default_rng(3).integers(0, 256, len(pages), np.uint8)
    pinned = RegisteredMemory(Streams(CudaRuntime(fake)), memoryview(pages), 0)
    # The first two are one turn, since they are small.
    cuts = [0, 100, PIECE_SIZE_BYTES, len(pages)]
    transfer = pinned.queue_copies(
        [
            DeviceRange(
                device=0,
                address=source.ctypes.data + start,
                size_bytes=stop - start,
                offset_bytes=start,
            )
            for start, stop in itertools.pairwise(cuts)
        ]
    )
    assert [stream for _, stream in fake.copies] == [0, 0, 1, 0, 1]
    # The event of each turn is recorded behind it, and the next turn waits for it.
    assert fake.recorded == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert fake.awaited == [(0, 1), (1, 0), (2, 1)]
    assert transfer.is_over()
    assert pages[:] == source.tobytes()
    pinned.close()


def test_what_has_arrived_stays_so_while_its_events_serve_the_next_transfer() -> None:
    fake = FakeCuda()
    pages = mmap.mmap(-1, 1000)
    source = np.arange(100, dtype=np.uint8)
    pinned = RegisteredMemory(Streams(CudaRuntime(fake)), memoryview(pages), 0)
    one = DeviceRange(device=0, address=source.ctypes.data, size_bytes=100, offset_bytes=0)
    first = pinned.queue_copies([one])
    assert first.is_over()
    fake.is_ready = False
    second = pinned.queue_copies([one])
    assert fake.recorded == [(0, 0), (0, 0)]
    assert first.has_arrived(100)
    assert not second.has_arrived(100)
    fake.is_ready = True
    assert second.is_over()
    pinned.close()


def test_the_current_device_of_the_thread_stays_what_it_was() -> None:
    fake = FakeCuda()
    runtime = CudaRuntime(fake)
    fake.current = 1
    runtime.page_lock(4096, 10, 0)
    runtime.open_stream(0).record_mark()
    assert fake.current == 1
    fake.failing["cudaHostRegister"] = cudaError_t.cudaErrorInvalidValue
    with pytest.raises(DeviceError):
        runtime.page_lock(8192, 10, 0)
    assert fake.current == 1


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cudaHostRegister", lambda r: r.page_lock(4096, 10, 0)),
        ("cudaHostUnregister", lambda r: r.page_unlock(4096)),
        ("cudaStreamCreateWithFlags", lambda r: r.open_stream(0)),
        ("cudaMemcpyAsync", lambda r: r.open_stream(0).copy(4096, 8192, 1)),
        ("cudaEventCreateWithFlags", lambda r: r.open_stream(0).record_mark()),
        ("cudaEventRecord", lambda r: r.open_stream(0).record_mark()),
        ("cudaStreamWaitEvent", lambda r: r.open_stream(0).wait_for(0)),
        ("cudaEventQuery", lambda r: r.open_stream(0).has_passed(0)),
        ("cudaStreamQuery", lambda r: r.open_stream(0).is_idle()),
    ],
)
def test_an_error_of_cuda_is_told_with_its_call_and_code(name: str, call) -> None:
    fake = FakeCuda()
    fake.failing[name] = cudaError_t.cudaErrorIllegalAddress
    with pytest.raises(DeviceError, match=rf"{name}: .* error 700 \(cudaErrorIllegalAddress\)"):
        call(CudaRuntime(fake))


def test_an_error_is_not_left_for_the_next_one_who_asks() -> None:
    fake = FakeCuda()
    fake.failing["cudaHostRegister"] = cudaError_t.cudaErrorInvalidValue
    with pytest.raises(DeviceError):
        CudaRuntime(fake).page_lock(4096, 10, 0)
    assert fake.last_error is cudaError_t.cudaSuccess


def test_without_the_bindings_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.runtime"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DeviceError, match=r"install holdfast-checkpoint\[cuda\]"):
        open_cuda()


@pytest.mark.skipif(not HAS_BINDINGS, reason="the package cuda-bindings is not installed")
def test_the_real_bindings_take_the_calls() -> None:
    """Without a driver each call returns an error, and so proves that its arguments fit."""
    from cuda.bindings import runtime as bindings

    code, count = bindings.cudaGetDeviceCount()
    if code == bindings.cudaError_t.cudaSuccess and count:
        pytest.skip("there is a device: benchmarks/gpu.py runs the calls for real")
    runtime = CudaRuntime(bindings)
    stream = cuda.CudaStream(runtime, bindings.cudaStream_t(0), 0)
    event = bindings.cudaEvent_t(0)
    for call in (
        open_cuda,
        lambda: runtime.page_unlock(4096),
        lambda: runtime.call("cudaHostRegister", 4096, 10, bindings.cudaHostRegisterPortable),
        lambda: runtime.call("cudaStreamCreateWithFlags", bindings.cudaStreamNonBlocking),
        lambda: runtime.call("cudaEventCreateWithFlags", bindings.cudaEventDisableTiming),
        lambda: runtime.call("cudaSetDevice", 0),
        lambda: runtime.record_event(event, bindings.cudaStream_t(0)),
        lambda: stream.copy(4096, 8192, 1),
        lambda: stream.wait_for(event),
        lambda: stream.has_passed(event),
        stream.is_idle,
    ):
        with pytest.raises(DeviceError, match="expected success, found error"):
            call()


class _Client:
    def __init__(self, platform_version: str) -> None:
        self.platform_version = platform_version


class _Device:
    def __init__(self, platform: str, platform_version: str) -> None:
        self.platform = platform
        self.client = _Client(platform_version)


@pytest.mark.parametrize(
    ("platform", "version", "is_served"),
    [
        ("gpu", "PJRT C API\ncuda 13000", True),
        ("gpu", "rocm 60300", False),
        ("tpu", "PJRT C API\nTFRT TPU v4", False),
        ("cpu", "cpu", False),
    ],
)
def test_nvidias_devices_are_served_by_cuda_and_no_others(
    platform: str, version: str, is_served: bool
) -> None:
    found = devices._platform_of(_Device(platform, version))
    assert (found is not None and found.open_runtime is open_cuda) == is_served
