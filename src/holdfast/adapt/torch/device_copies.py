"""Copy what was restored into tensors on GPUs, all together.

A device copies from page-locked memory at several times the rate of other memory, and to page-lock
what was restored takes longer than to copy it. So a few threads copy it, in pieces, into
page-locked memory of their own, from which the device copies a piece while its thread fills the
next one.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from typing import Any

import numpy as np
import torch

from holdfast.adapt.torch import tensors
from holdfast.adapt.torch.host_copies import run_together
from holdfast.errors import DeviceError
from holdfast.format.grid import Region

PIECE_SIZE_BYTES = 8 * 1024 * 1024
THREAD_COUNT_MAX = 12
"""They copy in the host's memory: on 16 cores, 12 threads 29 GB/s, 8 threads 25, and 16 no more."""

_Copy = tuple[torch.Tensor, int, int]
"""The bytes to copy to, the address to copy from, and the number of bytes."""
_Piece = list[_Copy]
"""Copies of `PIECE_SIZE_BYTES` at most."""


class DeviceCopies:
    """Copies that are queued, and made by `run`. Owned by the thread that restores."""

    def __init__(self) -> None:
        self._queued: dict[torch.device, list[tuple[torch.Tensor, np.ndarray]]] = {}

    def queue(self, into: Any, buffers: dict[Region, np.ndarray]) -> bool:
        """Queue a copy of what was restored into a tensor, or into this process's piece of it.

        Returns:
            False if that is not in one contiguous piece of a GPU's memory, or needs more than a
            copy of bytes; nothing is queued then.
        """
        held = tensors.local(into)
        if len(buffers) != 1 or not _is_in_one_piece(held):
            return False
        (buffer,) = buffers.values()
        if not buffer.nbytes or buffer.nbytes != held.nbytes or not buffer.flags.c_contiguous:
            return False
        self._queued.setdefault(held.device, []).append((held, buffer))
        return True

    def run(self) -> None:
        """Make the copies. After an exception, an unknown part of them was made.

        Raises:
            DeviceError: A device failed.
        """
        queued, self._queued = self._queued, {}
        for device, copies in queued.items():
            try:
                _copy_to(device, _pieces_of(copies))
            except RuntimeError as error:
                raise DeviceError(f"copy what was restored to {device}: {error}") from error


def _is_in_one_piece(held: torch.Tensor) -> bool:
    return (
        tensors.is_plain(held)
        and _is_on_gpu(held)
        and held.layout is torch.strided
        and not held.is_nested
        and held.is_contiguous()
        and not held.is_conj()
        and not held.is_neg()
    )


def _is_on_gpu(held: torch.Tensor) -> bool:
    return bool(held.is_cuda)


def _pieces_of(copies: list[tuple[torch.Tensor, np.ndarray]]) -> deque[_Piece]:
    """Divide copies into pieces: a large tensor has several, and small ones have one together."""
    pieces: deque[_Piece] = deque()
    free_bytes = 0
    for held, buffer in copies:
        target = tensors.bytes_of(held)
        source = buffer.__array_interface__["data"][0]
        done = 0
        while done < buffer.nbytes:
            if not free_bytes:
                pieces.append([])
                free_bytes = PIECE_SIZE_BYTES
            size = min(buffer.nbytes - done, free_bytes)
            pieces[-1].append((target[done : done + size], source + done, size))
            done += size
            free_bytes -= size
    return pieces


def _copy_to(device: torch.device, pieces: deque[_Piece]) -> None:
    # What the program has queued may still read the tensors.
    before = torch.cuda.Event()
    before.record(torch.cuda.current_stream(device))
    count = min(len(os.sched_getaffinity(0)), THREAD_COUNT_MAX, len(pieces))
    run_together(lambda: _Lane(device, before).copy_all(pieces), count, pieces.clear)


def _locked_memory(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


class _Lane:
    """One thread's page-locked memory, of two halves in turn, and its stream."""

    def __init__(self, device: torch.device, after: torch.cuda.Event) -> None:
        self._halves = [_locked_memory(PIECE_SIZE_BYTES) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_event(after)

    def copy_all(self, pieces: deque[_Piece]) -> None:
        """Copy pieces until there are none."""
        try:
            while pieces:
                try:
                    piece = pieces.popleft()
                except IndexError:
                    # Another thread has taken the last one.
                    break
                self._copy(piece)
        finally:
            self._stream.synchronize()

    def _copy(self, piece: _Piece) -> None:
        half, copied = self._halves[0], self._copied[0]
        if copied is not None:
            copied.synchronize()
        done = 0
        with torch.cuda.stream(self._stream):
            for target, source, size in piece:
                ctypes.memmove(half.data_ptr() + done, source, size)
                target.copy_(half[done : done + size], non_blocking=True)
                done += size
            event = torch.cuda.Event()
            event.record(self._stream)
        self._copied[0] = event
        self._halves.reverse()
        self._copied.reverse()
