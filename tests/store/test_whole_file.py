"""A file is written whole or not at all, and of several that create it one does."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.store.files.whole_file import create_file, replace_file, replacing

WRITERS = 4


def _write_half(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def test_a_write_that_ends_early_leaves_the_old_content_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for old in (None, b"old"):
        if old is not None:
            replace_file(path, old)
        with pytest.raises(KeyboardInterrupt):
            _write_half(path)
        assert [each.read_bytes() for each in tmp_path.iterdir()] == ([old] if old else [])


def test_a_file_is_readable_by_its_user_alone(tmp_path: Path) -> None:
    replace_file(tmp_path / "replaced", b"secret")
    create_file(tmp_path / "created", b"secret", SystemClock())
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}


def test_of_several_creators_one_succeeds_and_the_others_change_nothing(tmp_path: Path) -> None:
    path, barrier = tmp_path / "file", threading.Barrier(WRITERS)

    def create(number: int) -> bool:
        barrier.wait()
        try:
            create_file(path, b"%d" % number * 1000, SystemClock())
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(WRITERS) as pool:
        outcomes = [*pool.map(create, range(WRITERS))]
    assert outcomes.count(True) == 1
    assert path.read_bytes() == b"%d" % outcomes.index(True) * 1000
    assert os.listdir(tmp_path) == ["file"]
