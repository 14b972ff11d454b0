"""Check which calls of a manager are allowed: none after `close`, and those of one thread only.

A manager has no lock around its calls, so that a step that is not due costs nothing. The thread
that calls first is the training thread; another thread may call once that one has ended. A call is
checked only where it does more than read cells of the control block.
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
            InvalidArgumentError: The manager is closed, or is used by another live thread.
        """
        if self.is_closed:
            raise InvalidArgumentError(
                f"{name}: the manager of {self._directory} is closed; create another one"
            )
        current, owner = threading.current_thread(), self._thread
        if owner is not None and owner is not current and owner.is_alive():
            raise InvalidArgumentError(
                f"{name}: called on thread {current.name!r}, but the manager of {self._directory} "
                f"is used by thread {owner.name!r}; call all its methods on one thread"
            )
        self._thread = current
