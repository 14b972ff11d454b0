"""The agent's log is bounded, and follows no link."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast.errors import StorageError
from holdfast.host import log_file
from holdfast.host.log_file import BoundedHandler


def write(handler: BoundedHandler, count: int) -> None:
    for number in range(count):
        record = logging.LogRecord("a", logging.INFO, "", 0, "line %d", (number,), None)
        handler.emit(record)


def test_a_full_log_is_renamed_and_there_are_two_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "LOG_SIZE_BYTES", 1000)
    handler = BoundedHandler(tmp_path, "agent-h.log")
    write(handler, 1000)
    handler.stream.close()
    paths = sorted((tmp_path / "events").iterdir())
    assert [path.name for path in paths] == ["agent-h.log", "agent-h.log.1"]
    assert all(path.stat().st_size < 1100 for path in paths)
    lines = [line for path in reversed(paths) for line in path.read_text().splitlines()]
    assert lines == [f"line {number}" for number in range(1000 - len(lines), 1000)]
    assert len(lines) > 50


def test_a_log_that_cannot_be_renamed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "LOG_SIZE_BYTES", 100)
    handler = BoundedHandler(tmp_path, "agent-h.log")
    (tmp_path / "events" / "agent-h.log.1").mkdir()
    write(handler, 100)
    handler.stream.close()
    assert (tmp_path / "events" / "agent-h.log").read_text().endswith("line 99\n")


def test_a_log_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "agent-h.log").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="log into"):
        BoundedHandler(tmp_path, "agent-h.log")
    assert not (tmp_path / "precious").exists()
