"""The type of a range of bytes that is passed on without a copy."""

from __future__ import annotations

import mmap
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap
