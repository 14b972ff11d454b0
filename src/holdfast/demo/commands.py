"""Run Holdfast's commands as a user does."""

from __future__ import annotations

import subprocess
import sys

from holdfast.errors import HoldfastError

_SECS_MAX = 60.0


def run_command(*arguments: str) -> str:
    """Run `holdfast` with these arguments and return what it printed.

    Raises:
        HoldfastError: It failed, or has not ended after a minute.
    """
    command = [sys.executable, "-m", "holdfast", *arguments]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECS_MAX, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise HoldfastError(
            f"`holdfast {' '.join(arguments)}`: has not ended after {_SECS_MAX:.0f} s"
        ) from error
    if ended.returncode != 0:
        raise HoldfastError(
            f"`holdfast {' '.join(arguments)}`: exit code {ended.returncode}, "
            f"output: {(ended.stderr or ended.stdout).strip()[-500:]}"
        )
    return ended.stdout
