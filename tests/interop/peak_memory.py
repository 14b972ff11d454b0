"""The most memory that this process takes while a block or a command runs.

A process of its own needs this module alone for it, and of other frameworks what a command imports.
"""

from __future__ import annotations

import importlib
import re
import threading
from pathlib import Path

from holdfast.cli.main import main
from holdfast.interop import safetensors_export, scratch_memory

MEBI = 1024 * 1024
PIECE_BYTES = 4 * MEBI


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


def peak_bytes(*arguments: str) -> int:
    """Runs a command with small pieces in this process; returns the memory that it took on top."""
    if "--torch" in arguments:
        # PyTorch itself takes more than what is measured.
        importlib.import_module("holdfast.interop.torch_files")
    safetensors_export.PIECE_SIZE_BYTES = scratch_memory.GROUP_SIZE_BYTES = PIECE_BYTES
    with Peak() as peak:
        assert main([*arguments]) == 0
    return peak.bytes


def orbax_peaks_bytes(folder: Path) -> dict[str, int]:
    """Imports a directory of Orbax, and exports it again, each in this process, in small groups."""
    scratch_memory.GROUP_SIZE_BYTES = 4 * PIECE_BYTES
    commands = (
        ("import", str(folder / "orbax"), str(folder / "run")),
        ("export", str(folder / "run"), "1", "--orbax", str(folder / "back")),
    )
    peaks = {}
    for arguments in commands:
        with Peak() as peak:
            assert main([*arguments]) == 0
        peaks[arguments[0]] = peak.bytes
    return peaks
