"""What a trainer's callbacks do with a manager."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch cannot be had here", exc_type=ImportError)

from holdfast.errors import StorageError
from holdfast.interop.trainers.trainer_session import TrainerSession
from tests.hosts import Host


def test_an_error_of_the_training_is_not_hidden_by_one_of_the_close(
    one_host: Host,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RAM", str(one_host.folder)), ("HOST", one_host.name)):
        monkeypatch.setenv(f"HOLDFAST_{name}", value)

    def close() -> None:
        session = TrainerSession(tmp_path / "run", {})
        session._manager._progress.report_error(StorageError("of the save"))
        session.close(finishes=False)

    def train() -> None:
        try:
            raise ValueError("of the training")
        finally:
            close()

    with pytest.raises(StorageError):
        close()
    with pytest.raises(ValueError, match="of the training"):
        train()
    assert "of the save" in caplog.text
