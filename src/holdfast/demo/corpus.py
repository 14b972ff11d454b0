"""Provide text that every machine has: the source files of Python's standard library, as bytes.

Invariant: the corpus depends only on the Python installation. The files are read in the order of
their paths, so that two processes on one machine, and an interrupted run and its continuation, read
the same bytes.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import StorageError

# Tests and third-party packages differ between installations; `encodings` is tables, not text.
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
    """Return the folder of the standard library's source files."""
    return Path(sysconfig.get_path("stdlib"))


def load_corpus(folder: Path | None = None, *, limit_bytes: int = 4 << 20) -> NDArray[np.uint8]:
    """Read the Python source files below a folder, in the order of their paths.

    Args:
        folder: The folder; None selects the standard library.
        limit_bytes: Where to stop, possibly in the middle of a file.

    Returns:
        The bytes, uint8 of shape (n,), with n at most `limit_bytes`.

    Raises:
        StorageError: There is too little text to train on, or a file cannot be read.
    """
    folder = standard_library() if folder is None else folder
    corpus = bytearray()
    try:
        for path in _source_files(folder):
            corpus += path.read_bytes()
            if len(corpus) >= limit_bytes:
                break
    except OSError as error:
        raise StorageError(f"read source files below {folder}: {error}") from error
    if len(corpus) < min(_LEAST_BYTES, limit_bytes):
        raise StorageError(
            f"read source files below {folder}: expected at least {_LEAST_BYTES} bytes of .py "
            f"files, found {len(corpus)}; use a Python that ships its library as source"
        )
    return np.frombuffer(bytes(corpus[:limit_bytes]), dtype=np.uint8)


def _source_files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        # Changed in place, so that os.walk descends in this order.
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(parent, name)
