"""Processes that use a store and race or are killed, for `holdfast.testing.store_suite`.

They are spawned, not forked, since the parent may have threads. `opener` is called in the process,
so it must be picklable.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from holdfast.store.contract import Store
from holdfast.testing.block_source import BlockSource

WAIT_SECS = 60.0

Opener = Callable[[], Store]


def race_put_if_absent(opener: Opener, keys: Sequence[str], process_count: int) -> list[list[bool]]:
    """Put each key if absent in several processes at once; return each call's result, by process.

    Process number i writes the digits of i.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(process_count)]
    processes = [
        context.Process(target=_put_each, args=(opener, keys, number, theirs), daemon=True)
        for number, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        ours = [end for end, _ in pipes]
        for pipe in ours:
            _answer(pipe)
        for pipe in ours:
            pipe.send("go")
        return [_answer(pipe) for pipe in ours]
    finally:
        for process in processes:
            process.kill()
            process.join()
        _close(pipes)


def kill_midway_through_put(opener: Opener, key: str, data: bytes) -> None:
    """Start a process that puts half of `data` under `key`, and kill it with SIGKILL."""
    context = multiprocessing.get_context("spawn")
    pipe = context.Pipe()
    process = context.Process(target=_put_half, args=(opener, key, data, pipe[1]), daemon=True)
    process.start()
    try:
        _answer(pipe[0])
    finally:
        process.kill()
        process.join()
        _close([pipe])


def _put_each(opener: Opener, keys: Sequence[str], number: int, pipe: Connection) -> None:
    store = opener()
    pipe.send("ready")
    pipe.recv()
    pipe.send([store.put_if_absent(key, b"%d" % number) for key in keys])


def _put_half(opener: Opener, key: str, data: bytes, pipe: Connection) -> None:
    middle, lock = len(data) // 2, threading.Lock()

    def stop_midway(offset_bytes: int) -> None:
        if offset_bytes >= middle:
            # Held until the process is killed: a store may request several blocks at once.
            with lock:
                pipe.send("midway")
                pipe.recv()

    opener().put(key, BlockSource([data[:middle], data[middle:]], on_block=stop_midway))


def _answer(pipe: Connection) -> list[bool]:
    if not pipe.poll(WAIT_SECS):
        raise TimeoutError(f"a process of the suite did not answer for {WAIT_SECS} s")
    answer: list[bool] = pipe.recv()
    return answer


def _close(pipes: Sequence[tuple[Connection, Connection]]) -> None:
    for pipe in pipes:
        for end in pipe:
            end.close()
