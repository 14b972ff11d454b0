"""The one type for a stretch of bytes that is passed along without being copied."""

from __future__ import annotations

import mmap
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap
