"""Run an agent's calls on its stores on threads, so that none delays another one, or the end.

A long write must delay neither a commit, nor a start, nor replicas. A service that does not answer
holds a request for minutes; what it holds is abandoned when the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast import waits
from holdfast.coordination.settings import PULLS_MAX
from holdfast.format.names import CheckpointId

CLOSE_SECS = 10.0
T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call that may take minutes on a thread that does not delay the end of the process."""
    return await asyncio.wrap_future(waits.begin_call(call))


class StoreThreads:
    """The threads of one agent. Calls of one kind run one after another, but for `pull`."""

    def __init__(self) -> None:
        self._writing = ThreadPoolExecutor(1, "holdfast-write")
        self._committing = ThreadPoolExecutor(1, "holdfast-commit")
        self._reading = ThreadPoolExecutor(1, "holdfast-read")
        # A busy service answers late: what trainers ask meanwhile must not wait for that.
        self._looking = ThreadPoolExecutor(1, "holdfast-look")
        self._pulling = ThreadPoolExecutor(PULLS_MAX, "holdfast-copies")
        self._changed = threading.Condition()
        self._in_use: set[CheckpointId] = set()

    def close(self) -> None:
        """End the threads after their present operations, which are awaited for `CLOSE_SECS`.

        What is interrupted then, by the end of the process, may be interrupted anywhere.
        """
        ending = threading.Thread(target=self._end, name="holdfast-end", daemon=True)
        ending.start()
        ending.join(CLOSE_SECS)

    def _end(self) -> None:
        pools = self._writing, self._committing, self._reading, self._pulling, self._looking
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in pools:
            pool.shutdown()

    async def query(self, call: Callable[..., T], *arguments: object) -> T:
        """Run a call that reads the stores."""
        return await _run(self._reading, call, *arguments)

    def query_soon(self, call: Callable[..., None], *arguments: object) -> None:
        """Run a call that reads the stores; nothing waits for it."""
        self._reading.submit(call, *arguments)

    async def write(self, call: Callable[..., T], *arguments: object) -> T:
        """Run a call that changes the stores, after those submitted before it."""
        return await _run(self._writing, call, *arguments)

    async def commit(self, call: Callable[..., T], *arguments: object) -> T:
        """Run a call that makes a checkpoint exist, beside longer writes."""
        return await _run(self._committing, call, *arguments)

    async def look(self, call: Callable[..., T], *arguments: object) -> T:
        """Run a call that looks whether the run is still there."""
        return await _run(self._looking, call, *arguments)

    async def pull(self, call: Callable[..., T], *arguments: object) -> T:
        """Run a call that copies from another host, up to `PULLS_MAX` at once."""
        return await _run(self._pulling, call, *arguments)

    @contextlib.contextmanager
    def alone_with(self, checkpoint: CheckpointId) -> Iterator[None]:
        """Exclude other commits and removals of that checkpoint on this agent's threads.

        A commit amid a removal would name bytes that are gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: checkpoint not in self._in_use)
            self._in_use.add(checkpoint)
        try:
            yield
        finally:
            with self._changed:
                self._in_use.discard(checkpoint)
                self._changed.notify_all()


async def _run(pool: ThreadPoolExecutor, call: Callable[..., T], *arguments: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)
