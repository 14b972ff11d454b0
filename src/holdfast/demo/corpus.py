"""Text that every machine has: the source files of Python's standard library, as bytes.

The corpus depends on the Python installation and on nothing else: the files are taken in the order
of their paths, so that two processes on one machine, and an interrupted run and its continuation,
see the same bytes.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import StorageError

# Tests and other people's packages differ between installations; `encodings` is tables, not text.
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "site-packages",
        "test",
        "tests",
    }
)
_LEAST_BYTES = 1 << 18


def standard_library() -> Path:
    """The folder that holds the standard library's source files."""
    return Path(sysconfig.get_path("stdlib"))


def load_corpus(folder: Path | None = None, *, limit_bytes: int = 4 << 20) -> NDArray[np.uint8]:
    """Reads the Python source files below a folder, one after the other.

    Args:
        folder: where to look; the standard library unless told otherwise.
        limit_bytes: where to stop, in the middle of a file if need be.

    Returns:
        The bytes, uint8 of shape (n,), n at most `limit_bytes`.

    Raises:
        StorageError: there is too little text to train on, or a file cannot be read.
    """
    folder = standard_library() if folder is None else folder
    corpus = bytearray()
    try:
        for path in _source_files(folder):
            corpus += path.read_bytes()
            if len(corpus) >= limit_bytes:
                break
    except OSError as error:
        raise StorageError(f"reading source files below {folder}: {error}") from error
    if len(corpus) < min(_LEAST_BYTES, limit_bytes):
        raise StorageError(
            f"reading source files below {folder}: expected at least {_LEAST_BYTES} bytes of .py "
            f"files, found {len(corpus)}; use a Python that ships its library as source"
        )
    return np.frombuffer(bytes(corpus[:limit_bytes]), dtype=np.uint8)


def _source_files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        # Sorted in place: os.walk then descends in this order.
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(parent, name)
