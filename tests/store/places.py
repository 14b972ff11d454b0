"""Places for stores to be tested in, and how a process opens a store there."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore
from holdfast.store.slots import SLOTS, SlotPool

REFUSING = Path(__file__).with_name("refusing_calls.py")


def open_disk(root: Path) -> DiskStore:
    root.mkdir(parents=True, exist_ok=True)
    return DiskStore(root, SystemClock())


def open_disk_directly(root: Path) -> DiskStore:
    root.mkdir(parents=True, exist_ok=True)
    return DiskStore(root, SystemClock(), reads_directly=True)


def open_ram(root: Path) -> RamStore:
    root.mkdir(parents=True, exist_ok=True)
    return RamStore(root, SlotPool(root, None, SystemClock()).reserve, SystemClock())


def slots(root: Path) -> list[str]:
    """The names of all slots of a RAM tier."""
    return sorted(os.listdir(root / SLOTS))


@contextlib.contextmanager
def mounted(kind: str, folder: Path, options: str = "") -> Iterator[Path]:
    """A file system of its own in `folder`, or a skipped test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip(f"only root may mount a {kind}")
    folder.mkdir()
    option = ["-o", options] if options else []
    command = ["mount", "-t", kind, *option, "none", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def linkless(folder: Path, refusal: str = "EOPNOTSUPP") -> Iterator[Path]:
    """A FUSE mount in `folder`, of a folder beside it, that has no hard links.

    It also refuses `renameat2` with a flag, as gcsfuse and most other FUSE file systems do. It has
    one thread: with several, a rename and a removal of its folder can wait for each other for ever
    in libfuse.
    """
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed (Debian package bindfs)")
    backing = folder.with_name(f"{folder.name}-backing")
    backing.mkdir()
    folder.mkdir()
    refused = f"link={refusal},linkat={refusal},renameat2=EINVAL"
    command = [sys.executable, REFUSING, refused, "bindfs", backing, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"bindfs without hard links: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
