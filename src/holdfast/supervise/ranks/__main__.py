"""Run the launcher of one job: `python -m holdfast.supervise.ranks CONFIG CMD…`.

`holdfast run --nproc` starts it, as the command that it supervises.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from holdfast.clock import Clock, SystemClock
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.json_codec import decode
from holdfast.peers.config import listen
from holdfast.supervise.command import spawn
from holdfast.supervise.own_folder import own_folder
from holdfast.supervise.ranks.host_list import listening_address
from holdfast.supervise.ranks.launcher import QUIET, Hosts, Launcher
from holdfast.supervise.ranks.launcher_config import LauncherConfig
from holdfast.supervise.ranks.leading import Store

PORT_SECS, PORT_PAUSE_SECS = 15.0, 0.5
"""How long to wait for the port of this host's launcher, and how often to try."""


def _load_stores() -> Callable[[str], Store]:
    # Each connection without a name would be a warning.
    os.environ.setdefault(QUIET, "ERROR")
    from holdfast.adapt.torch.groups import GroupStore

    return GroupStore


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _hosts(config: LauncherConfig, clock: Clock) -> Hosts | None:
    """Listen for the other hosts' launchers.

    Raises:
        HoldfastError: This host's address cannot be listened at.
    """
    if not config.addresses:
        return None
    host, port = config.addresses[config.own]
    address = listening_address(host, os.environ)
    purpose = "listen for the other hosts' `holdfast run` (is another one live on this host?)"
    deadline_secs = clock.monotonic() + PORT_SECS
    while True:
        try:
            listener = listen(address, port, purpose)
            break
        except StorageError:
            # One that was killed may have ranks that still end.
            if clock.monotonic() >= deadline_secs:
                raise
            clock.sleep(PORT_PAUSE_SECS)
    return Hosts(addresses=config.addresses, own=config.own, listener=listener)


def main() -> int:
    """Run the job that the arguments describe, and return its exit code."""
    config = decode(sys.argv[1].encode(), LauncherConfig)
    command = sys.argv[2:]

    def spawn_rank(variables: Mapping[str, str], kept_fd: int) -> int:
        return spawn(command, os.environ | dict(variables), [kept_fd], group=None)

    clock = SystemClock()
    try:
        hosts = _hosts(config, clock)
    except HoldfastError as error:
        _note(f"holdfast run: {error}")
        return 2
    with own_folder() as folder:
        return Launcher(
            spawn_rank, config.settings, _load_stores, clock, _note, folder, hosts
        ).run()


if __name__ == "__main__":
    sys.exit(main())
