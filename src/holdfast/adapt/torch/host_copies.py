"""Copy what was restored into ordinary tensors in the host's memory, all together.

PyTorch's own copy costs more in Python than in memory for a small tensor. For a large one it wakes
a thread per core, and on a machine that has other work they wait for each other. So the memory is
copied here: small tensors by the calling thread, large ones by a few threads in pieces.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast.adapt.torch import tensors
from holdfast.format.grid import Region

PIECE_SIZE_BYTES = 4 * 1024 * 1024
THREAD_COUNT_MAX = 4
"""More threads do not copy faster: these saturate the memory bandwidth."""

_Copy = tuple[int, int, int]
"""The address to copy to, the one to copy from, and the number of bytes."""


class HostCopies:
    """Copies that are queued, and made by `run`. Owned by the thread that restores.

    Tensors that share memory get equal elements there (`memory.differences`), so that the order of
    the copies has no effect.
    """

    def __init__(self) -> None:
        self._queued: list[tuple[torch.Tensor, np.ndarray]] = []

    def queue(self, into: Any, buffers: dict[Region, np.ndarray]) -> bool:
        """Queue a copy of what was restored into a tensor.

        Returns:
            False if the tensor is not in one contiguous piece of the host's memory, or needs more
            than a copy of bytes; nothing is queued then.
        """
        if len(buffers) != 1 or not _is_in_one_piece(into):
            return False
        (buffer,) = buffers.values()
        if buffer.nbytes != into.nbytes or not buffer.flags.c_contiguous:
            return False
        self._queued.append((into, buffer))
        return True

    def run(self) -> None:
        """Make the copies. After an exception, an unknown part of them was made."""
        queued, self._queued = self._queued, []
        # Autograd reports a tensor that it needs for a backward pass and that was changed.
        torch.autograd.graph.increment_version([into for into, _ in queued])
        pieces: deque[_Copy] = deque()
        for into, buffer in queued:
            to, of = into.data_ptr(), buffer.__array_interface__["data"][0]
            size_bytes = buffer.nbytes
            if size_bytes < PIECE_SIZE_BYTES:
                ctypes.memmove(to, of, size_bytes)
                continue
            for start in range(0, size_bytes, PIECE_SIZE_BYTES):
                piece_bytes = min(PIECE_SIZE_BYTES, size_bytes - start)
                pieces.append((to + start, of + start, piece_bytes))
        if pieces:
            count = min(len(os.sched_getaffinity(0)), THREAD_COUNT_MAX, len(pieces))
            run_together(partial(_copy_until_none, pieces), count, pieces.clear)


def _is_in_one_piece(tensor: Any) -> bool:
    return (
        tensors.is_plain(tensor)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def run_together(work: Callable[[], None], thread_count: int, end: Callable[[], None]) -> None:
    """Run `work` on this thread and on others, until it has returned on all of them.

    Args:
        work: Takes a piece of the work after the other until none is left.
        thread_count: The number of threads; this one is one of them.
        end: Lets `work` find no more pieces.
    """
    with ThreadPoolExecutor(max(thread_count - 1, 1), "holdfast-restore") as pool:
        helping: list[Future[None]] = []
        try:
            # When the interpreter exits, and at a limit of threads, none can be started.
            with contextlib.suppress(RuntimeError):
                for _ in range(thread_count - 1):
                    helping.append(pool.submit(work))
            work()
            for help_ in helping:
                help_.result()
        finally:
            # Also after a Ctrl-C: no thread writes to the tensors when the restore has ended.
            end()


def _copy_until_none(pieces: deque[_Copy]) -> None:
    while pieces:
        # Another thread may have taken the last one.
        with contextlib.suppress(IndexError):
            ctypes.memmove(*pieces.popleft())
