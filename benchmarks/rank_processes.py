"""The ranks of one measurement, each a process of its own, and what each of them measured."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

WAIT_SECS = 600.0
END_SECS = 30.0


def measured_by_ranks(
    count: int, train: Callable[..., None], *arguments: Any
) -> list[dict[str, Any]]:
    """Run `train(address, count, rank, pipe, *arguments)` in a process for each rank.

    `address` is a free one for the ranks' coordinator. Each rank sends one dict through its pipe.

    Raises:
        TimeoutError: A rank sent nothing within `WAIT_SECS`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(count):
        ours, theirs = context.Pipe()
        own = (address, count, rank, theirs, *arguments)
        processes.append(context.Process(target=train, args=own, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    try:
        return [_received(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.join(END_SECS)
            process.kill()
            process.join()


def _received(pipe: Connection) -> dict[str, Any]:
    if not pipe.poll(WAIT_SECS):
        raise TimeoutError(f"a rank sent nothing for {WAIT_SECS:.0f} s")
    received: dict[str, Any] = pipe.recv()
    return received
