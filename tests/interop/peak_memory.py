"""The most memory that this process takes while a block runs."""

from __future__ import annotations

import re
import threading
from pathlib import Path

MEBI = 1024 * 1024


def anonymous_bytes() -> int:
    """The process's memory that no file has: the kernel cannot drop it."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


class Peak:
    """Samples this process's memory while a block runs: `bytes` is what it took on top."""

    def __enter__(self) -> Peak:
        self._before = self._most = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = self._most - self._before

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self._most = max(self._most, anonymous_bytes())
