"""Bound each call of the job's key-value service, which may not answer.

The service ends with its process, which the frameworks report. If that process or its host is
suspended instead, a call of PyTorch's store blocks in C++ for as long as it is: no deadline of this
thread would be checked, and no signal handled. So each call runs on a thread of its own, and after
`ANSWER_SECS` its result is not waited for. Every later call fails at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from holdfast.adapt.contract import KeyValues
from holdfast.errors import ProcessLostError

ANSWER_SECS = 30.0
T = TypeVar("T")


class BoundedEntries:
    """A key-value service whose calls are bounded; see `holdfast.adapt.contract.KeyValues`."""

    def __init__(self, entries: KeyValues, answer_secs: float = ANSWER_SECS) -> None:
        self._entries = entries
        self._answer_secs = answer_secs
        self._is_silent = False

    def put_if_absent(self, key: str, value: str) -> bool:
        return self._call(lambda: self._entries.put_if_absent(key, value))

    def get(self, key: str) -> str | None:
        return self._call(lambda: self._entries.get(key))

    def get_many(self, folder: str, names: Sequence[str]) -> dict[str, str]:
        return self._call(lambda: self._entries.get_many(folder, names))

    def delete(self, folder: str, names: Sequence[str]) -> None:
        self._call(lambda: self._entries.delete(folder, names))

    def _call(self, call: Callable[[], T]) -> T:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # passed on to the waiting thread
                future.set_exception(error)

        if not self._is_silent:
            threading.Thread(target=run, name="holdfast-entries", daemon=True).start()
            try:
                return future.result(self._answer_secs)
            except TimeoutError:
                self._is_silent = True
        raise ProcessLostError(
            "ask the key-value service of the job: no answer for "
            f"{self._answer_secs:g} s. Rank 0's process, or torchrun on the first host, holds it: "
            "it or its host is suspended or cut off; see its log, stop this process and restart "
            "the job"
        )
