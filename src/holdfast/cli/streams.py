"""Make the standard output fit for commands: whatever its encoding, and also where it is closed."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys

_ERRORS = "holdfast-plain"
_PLAIN = {
    "█": "#",
    "·": "-",
    "…": "...",
    "→": "->",
    "–": "-",
    **dict.fromkeys("▁▂▃", "."),
    **dict.fromkeys("▄▅▆▇", ":"),
}
OF_OUTPUT = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE)
)
"""Errors of a write to an output. They have no file name, which those of other files have."""


class ClosedOutput(io.TextIOBase):
    """The output of a process that was started without one."""

    def write(self, text: str) -> int:
        """Fail as a write to a closed descriptor does."""
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def prepare() -> None:
    """Replace characters that the output's encoding lacks; give a closed output an error."""
    codecs.register_error(_ERRORS, _plain)
    if sys.stdout is None:
        sys.stdout = ClosedOutput()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Return what stands for the characters that cannot be encoded."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_PLAIN.get(char, "?") for char in missing), error.end


def discard_rest() -> None:
    """Discard what the output still holds, so that the end of the process reports nothing more."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
    finally:
        if null != 1:
            os.close(null)
