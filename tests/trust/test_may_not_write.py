"""A user who may not write a run reads it with all that reads, and is told why with all else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.errors import InvalidArgumentError, StorageError

NOBODY = 65534
Refusing = Callable[[Path], AbstractContextManager[Path]]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes others, and mounts")


@pytest.fixture
def run() -> Iterator[Path]:
    """A run that others may read, in a folder that they may search."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "run"
        holdfast.save(path, {"w": np.arange(4.0)})
        yield path


@contextlib.contextmanager
def as_nobody(run: Path) -> Iterator[Path]:
    os.seteuid(NOBODY)
    try:
        yield run
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def read_only_mount(run: Path) -> Iterator[Path]:
    place = run.with_name("mounted")
    place.mkdir()
    done = subprocess.run(["mount", "--bind", run, place], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"mount: {done.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


REASONS = {
    as_nobody: f"user {NOBODY} may write, found one of user 0 with mode 755",
    read_only_mount: "found a file system that is mounted read-only",
}


@pytest.mark.parametrize("refusing", REASONS, ids=lambda refusing: refusing.__name__)
def test_readers_work_and_others_are_told_the_reason(
    refusing: Refusing,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOLDFAST_RAM", str(run.with_name("ram")))
    reason = REASONS[refusing]
    with refusing(run) as place:
        assert holdfast.load(place)["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
        for reads in ("ls", "verify", "status", "report"):
            assert main([reads, str(place)]) == 0, capsys.readouterr()
        assert main(["rm", str(place), "0", "--yes"]) == 1
        assert reason in capsys.readouterr().err
        with pytest.raises(StorageError, match=reason):
            holdfast.CheckpointManager(place, framework="numpy")
        with pytest.raises((StorageError, InvalidArgumentError)):
            holdfast.save(place, {"w": np.zeros(1)}, overwrite=True)
    assert holdfast.load(run)["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
