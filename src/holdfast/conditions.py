"""A condition variable that an exception on the training thread cannot leave locked.

Python runs signal handlers, and so raises KeyboardInterrupt, when a function written in Python
starts. `threading.Condition.__exit__` is such a function: an exception raised at its start leaves
the lock acquired, and every other thread blocks on it. See CPython's issue 29988.
"""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING


class Condition(threading.Condition):
    """A `threading.Condition` whose `with` statement acquires and releases the lock directly.

    The `with` statement looks up both methods of the lock before it acquires the lock. Both are C
    code, in which no signal handler runs.
    """

    if not TYPE_CHECKING:
        __enter__ = property(operator.attrgetter("_lock.__enter__"))
        __exit__ = property(operator.attrgetter("_lock.__exit__"))
