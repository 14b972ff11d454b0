"""Run an agent whose storage fails for as long as a file asks for it.

Arguments: that file, and the agent's config as JSON. The file holds JSON: what fails (`path`,
`operations`) and how (the members of a `Fault`). Where there is no file, nothing fails.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from pathlib import Path

from holdfast.host import process
from tests.store.failing_files import FailingFileSystem, Fault, Operation


class Switch:
    """A plan that is read again for each operation."""

    def __init__(self, control: Path) -> None:
        self._control = control

    def __call__(self, operation: Operation) -> Fault | None:
        try:
            said = json.loads(self._control.read_text())
        except FileNotFoundError:
            return None
        path, operations = said.pop("path"), said.pop("operations")
        matches = fnmatch.fnmatchcase(str(operation.path), path) and operation.name in operations
        return Fault(**said) if matches else None


if __name__ == "__main__":
    files = FailingFileSystem(Switch(Path(sys.argv[1])))
    sys.exit(process.main(sys.argv[2], lambda code: None, files))
