"""Run the launcher of one job: `python -m holdfast.supervise.ranks SETTINGS CMD…`.

`holdfast run --nproc` starts it, as the command that it supervises.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from holdfast.clock import SystemClock
from holdfast.format.json_codec import decode
from holdfast.supervise.command import spawn
from holdfast.supervise.ranks.launcher import Launcher, Store
from holdfast.supervise.ranks.membership import Settings


def _load_stores() -> Callable[[], Store]:
    from holdfast.adapt.torch.groups import GroupStore

    return GroupStore


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Run the job that the arguments describe, and return its exit code."""
    settings = decode(sys.argv[1].encode(), Settings)
    command = sys.argv[2:]

    def spawn_rank(variables: Mapping[str, str], kept_fd: int) -> int:
        return spawn(command, os.environ | dict(variables), [kept_fd], group=None)

    return Launcher(spawn_rank, settings, _load_stores, SystemClock(), _note).run()


if __name__ == "__main__":
    sys.exit(main())
