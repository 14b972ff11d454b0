"""What the attempts of a program import, which each writes down as it reaches its second step."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from holdfast.format.json_codec import decode
from holdfast.trainer.process.imports import ImportRecord, record_path


class AttemptImports:
    """The imports of one program's attempts, and those of an earlier `holdfast run` of it.

    Args:
        folder: Where the attempts write them.
        cache: The folder of the program's files, in which they are kept for the next
            `holdfast run`.

    Attributes:
        record: The newest that are known; None: none are.
        has_trained: Whether the present attempt has reached its second step.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder = folder
        self._kept = cache / "imports.json"
        self._attempts: list[int] = []
        self.record = _read_record(self._kept)
        self.has_trained = False

    @property
    def has_attempts(self) -> bool:
        """Whether any attempt was started."""
        return bool(self._attempts)

    @property
    def has_foreign(self) -> bool:
        """Whether processes that are no attempts have written imports."""
        own = {record_path(self._folder, pid) for pid in self._attempts}
        return not own.issuperset(self._folder.glob("imports-*.json"))

    @property
    def has_begun(self) -> bool:
        """Whether Python's startup in an attempt has imported what can stop before the program."""
        return any((self._folder / f"started-{pid}").exists() for pid in self._attempts)

    def add_attempt(self, pid: int) -> None:
        """Add the process of a new attempt, which is the present one."""
        self._attempts.append(pid)
        self.has_trained = False

    def read(self, pid: int) -> ImportRecord | None:
        """Return what an attempt has imported; None: it has not reached its second step."""
        record = _read_record(record_path(self._folder, pid))
        if record is not None:
            self.record, self.has_trained = record, True
        return record

    def keep(self, record: ImportRecord) -> None:
        """Keep imports for the next `holdfast run` of the program.

        Raises:
            OSError: They cannot be written.
        """
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._kept.parent, delete=False) as file:
            file.write(msgspec.json.encode(record))
        os.replace(file.name, self._kept)


def _read_record(path: Path) -> ImportRecord | None:
    try:
        return decode(path.read_bytes(), ImportRecord)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return None
