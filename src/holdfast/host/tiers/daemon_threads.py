"""Run calls that may take minutes on threads that do not delay the end of the process.

A service that does not answer holds a request for as long. The threads of an executor are awaited
when the process ends, and these are not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from holdfast import waits

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call that may take long on a thread that does not delay the end of the process."""
    return await asyncio.wrap_future(waits.begin_call(call))
