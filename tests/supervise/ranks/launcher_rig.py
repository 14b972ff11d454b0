"""Run the launcher of one of several hosts, with processes of a few lines: see `test_launchers`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from holdfast.clock import SystemClock
from holdfast.format.json_codec import decode
from holdfast.peers.config import listen
from holdfast.supervise.command import spawn
from holdfast.supervise.own_folder import own_folder
from holdfast.supervise.ranks.launcher import Hosts, Launcher
from holdfast.supervise.ranks.launcher_config import LauncherConfig

MEMBER = """
import json, os, socket, sys, time
link = socket.socket(fileno=int(os.environ["HOLDFAST_MEMBER"]))
lines = link.makefile("r")
does, host = json.loads(sys.argv[1]), sys.argv[2]

def report(kind, **fields):
    link.sendall(json.dumps({"type": kind, **fields}).encode() + b"\\n")

def say(event, **fields):
    line = {"event": event, "host": host, "pid": os.getpid(), "secs": time.monotonic(), **fields}
    os.write(1, json.dumps(line).encode() + b"\\n")

report("Ready")
for line in lines:
    order = json.loads(line)
    if order["type"] == "Released":
        say("released")
        sys.exit(0)
    if order["type"] == "Broken":
        step = 10 + order["generation"]
        report("Left", generation=order["generation"], last_step=step, text="closed by peer")
        say("left", generation=order["generation"])
    if order["type"] == "Assigned":
        names = ("generation", "rank", "world_size", "seat", "lost", "store")
        say("assigned", **{name: order[name] for name in names})
        if order["generation"] >= does["last"]:
            report("Finished", generation=order["generation"])
"""


class Store:
    """A store that nobody asks."""

    def __init__(self, address: str) -> None:
        self.address = f"{address}:1"

    def close(self) -> None:
        pass


if __name__ == "__main__":
    config = decode(sys.argv[1].encode(), LauncherConfig)
    address, port = config.addresses[config.own]
    words = [sys.executable, "-S", "-c", MEMBER, sys.argv[2], str(config.own)]

    def start(variables: Mapping[str, str], kept_fd: int) -> int:
        return spawn(words, os.environ | dict(variables), [kept_fd], group=None)

    hosts = Hosts(
        addresses=config.addresses, own=config.own, listener=listen(address, port, "listen")
    )
    with own_folder() as folder:
        launcher = Launcher(
            start,
            config.settings,
            lambda: Store,
            SystemClock(),
            lambda text: print(text, file=sys.stderr, flush=True),
            folder,
            hosts,
        )
        sys.exit(launcher.run())
