"""Which calls of a manager are allowed now: none after `close`, and one thread's at a time.

A manager has no lock around its calls, so that a step that is not due costs nothing. The training
thread is the one that calls first; another one may follow once that has ended. The checks are made
where a call does more than look at the shared words.
"""

from __future__ import annotations

import threading
from pathlib import Path

from holdfast.errors import InvalidArgumentError


class Calls:
    """The calls of one manager; `directory` names its run in messages."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread: threading.Thread | None = None
        self.is_closed = False

    def check(self, name: str) -> None:
        """Check that the call `name` may be made now, on this thread.

        Raises:
            InvalidArgumentError: the manager is closed, or belongs to another thread that lives.
        """
        if self.is_closed:
            raise InvalidArgumentError(
                f"{name}: the manager of {self._directory} is closed; make another one"
            )
        current, owner = threading.current_thread(), self._thread
        if owner is not None and owner is not current and owner.is_alive():
            raise InvalidArgumentError(
                f"{name}: called on thread {current.name!r}, but the manager of {self._directory} "
                f"is used by thread {owner.name!r}; call its methods on one thread"
            )
        self._thread = current
