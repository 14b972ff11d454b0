"""Record what a program has imported by its second step, for `holdfast run --standby`.

The supervisor names a folder in the environment. A standby process imports the recorded modules, as
the program did, before the next attempt begins. See docs/decisions/0056.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

import msgspec

from holdfast.environment import STANDBY_VARIABLE

_UNRECORDED = frozenset(("__main__", "__mp_main__", "sitecustomize", "usercustomize"))
_SUPERVISORS = ("HOLDFAST_", "PYTHONPATH=")
"""How variables begin that the supervisor changes itself."""

log = logging.getLogger(__name__)


class ImportRecord(msgspec.Struct, frozen=True):
    """What one attempt had imported.

    Attributes:
        modules: The names of its modules, in the order in which their imports began.
        paths: Its `sys.path`.
        changed: The variables of the environment that are not as at its start; None if removed.
    """

    modules: list[str]
    paths: list[str]
    changed: dict[str, str | None]


def record_path(folder: Path, pid: int) -> Path:
    """Return the path of the record of the process `pid`."""
    return folder / f"imports-{pid}.json"


def is_recorded() -> bool:
    """Return whether a supervisor asks for the record of this process."""
    return STANDBY_VARIABLE in os.environ


def record_if(is_due: bool) -> None:
    """Write the record of this process if it is due."""
    if is_due:
        record_imports()


def record_imports() -> None:
    """Write the record of this process. A supervisor that has ended needs none."""
    path = record_path(Path(os.environ[STANDBY_VARIABLE]), os.getpid())
    main = getattr(sys.modules["__main__"], "__spec__", None)
    own = _UNRECORDED | ({main.name} if main is not None else set())
    record = ImportRecord(
        modules=[
            name
            for name, module in list(sys.modules.items())
            if name not in own and getattr(getattr(module, "__spec__", None), "name", None) == name
        ],
        paths=[entry for entry in sys.path if isinstance(entry, str)],
        changed=_changed(),
    )
    unfinished = path.with_suffix(".unfinished")
    try:
        with contextlib.suppress(FileNotFoundError):
            unfinished.write_bytes(msgspec.json.encode(record))
            os.replace(unfinished, path)
    except OSError as error:
        log.warning("write %s, for the next standby process: %s", path, error.strerror)


def _changed() -> dict[str, str | None]:
    start = Path("/proc/self/environ").read_bytes().split(b"\0")
    before = dict(os.fsdecode(entry).split("=", 1) for entry in start if b"=" in entry)
    names = [name for name in before | os.environ if not f"{name}=".startswith(_SUPERVISORS)]
    return {
        name: os.environ.get(name) for name in names if os.environ.get(name) != before.get(name)
    }
