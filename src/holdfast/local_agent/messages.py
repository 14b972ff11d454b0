"""The messages of an agent's calls, and what it notes in its folder: msgspec's structs as JSON.

`decode` returns one, and is safe from any thread.
"""

from __future__ import annotations

import msgspec

from holdfast.format.json_codec import decode as decode


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An error, by the name of its class."""

    error: str
    message: str
