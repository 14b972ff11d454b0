"""A condition that an exception on the training thread cannot leave locked.

Python runs a signal's handler, and so raises KeyboardInterrupt, when a function written in Python
begins. `threading.Condition.__exit__` is one: raised there, the exception leaves the lock taken,
and every other thread waits for it. See CPython's issue 29988.
"""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING


class Condition(threading.Condition):
    """`threading.Condition`, whose `with` statement enters and leaves the lock itself.

    Both methods of the lock are looked up before it is taken, and both are C code, in which no
    handler runs.
    """

    if not TYPE_CHECKING:
        __enter__ = property(operator.attrgetter("_lock.__enter__"))
        __exit__ = property(operator.attrgetter("_lock.__exit__"))
