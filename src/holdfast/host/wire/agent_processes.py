"""Find the processes of agents on this host, also of agents that do not answer yet."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import msgspec
import psutil

from holdfast.format.json_codec import decode
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.launch import MODULE


def agent_processes() -> Iterator[tuple[psutil.Process, AgentConfig]]:
    """Yield each process of an agent with the configuration with which it was started.

    An agent that starts is two processes for a moment. Those are left out whose arguments cannot be
    read, or have the configuration of another version.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, msgspec.DecodeError):
            command = process.cmdline()
            if command[1:-1] == ["-m", MODULE]:
                config = decode(os.fsencode(command[-1]), AgentConfig)
                yield process, config
