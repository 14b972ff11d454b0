"""The calls of CUDA's runtime as `cuda.bindings.runtime` has them, on the host's own memory.

Each returns a tuple whose first item is the error; names and the order of arguments are those of
the package, and what is not of the right kind is refused as the package does.
"""

# ruff: noqa: N801, N802, N815 - the names are the package's
from __future__ import annotations

import ctypes
import enum
from typing import Any


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorInsufficientDriver = 35
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700
    cudaErrorHostMemoryAlreadyRegistered = 712


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


SUCCESS = cudaError_t.cudaSuccess


class FakeCuda:
    """One process's runtime; `failing` maps a call's name to the error that it returns."""

    cudaError_t = cudaError_t
    cudaMemcpyKind = cudaMemcpyKind
    cudaHostRegisterPortable = 1
    cudaStreamNonBlocking = 1
    cudaEventDisableTiming = 2

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.current = 0
        self.last_error = SUCCESS
        self.failing: dict[str, cudaError_t] = {}
        self.registered: dict[int, tuple[int, int, int]] = {}
        self.streams: list[tuple[int, int]] = []
        self.events: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.recorded: list[tuple[int, int]] = []
        self.awaited: list[tuple[int, int]] = []
        self.is_ready = True

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        failing = super().__getattribute__("__dict__").get("failing", {})
        if name not in failing:
            return found

        def fails(*arguments: Any) -> tuple[Any, ...]:
            self.last_error = failing[name]
            return (failing[name], None)[: 1 if name.endswith(("Query", "Async")) else 2]

        return fails

    def cudaGetDeviceCount(self):
        return SUCCESS, self.devices

    def cudaGetDevice(self):
        return SUCCESS, self.current

    def cudaSetDevice(self, device: int):
        self.current = int(device)
        return (SUCCESS,)

    def cudaGetLastError(self):
        found, self.last_error = self.last_error, SUCCESS
        return (found,)

    def cudaGetErrorString(self, error: cudaError_t):
        return SUCCESS, error.name.encode()

    def cudaHostRegister(self, ptr: int, size: int, flags: int):
        self.registered[ptr] = (size, flags, self.current)
        return (SUCCESS,)

    def cudaHostUnregister(self, ptr: int):
        del self.registered[ptr]
        return (SUCCESS,)

    def cudaStreamCreateWithFlags(self, flags: int):
        self.streams.append((flags, self.current))
        return SUCCESS, len(self.streams) - 1

    def cudaEventCreateWithFlags(self, flags: int):
        self.events.append((flags, self.current))
        return SUCCESS, len(self.events) - 1

    def cudaEventRecord(self, event: int, stream: int):
        self.recorded.append((event, stream))
        return (SUCCESS,)

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int):
        assert flags == 0
        self.awaited.append((event, stream))
        return (SUCCESS,)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: cudaMemcpyKind, stream: int):
        assert kind is cudaMemcpyKind.cudaMemcpyDeviceToHost
        ctypes.memmove(dst, src, count)
        self.copies.append((count, stream))
        return (SUCCESS,)

    def cudaEventQuery(self, event: int):
        return (SUCCESS if self.is_ready else cudaError_t.cudaErrorNotReady,)

    def cudaStreamQuery(self, stream: int):
        return (SUCCESS if self.is_ready else cudaError_t.cudaErrorNotReady,)
