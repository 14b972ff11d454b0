"""Ports that nothing listens on, each for one test alone, also beside other runs of the tests.

The system gives a port anew as soon as the socket that it was given to is closed. Where a server
uses the number of such a socket, two jobs that start at once may share one, and so one coordinator.
"""

from __future__ import annotations

import functools
import itertools
import socket
from collections.abc import Iterator
from contextlib import closing

FIRST, LAST, COUNT = 10_000, 32_000, 200
"""The ports, below those that Linux gives to sockets by default, and how many a process has."""


def free_port() -> int:
    """A port of this process that nothing listens on."""
    _, ports = _claimed()
    port = next(filter(_is_free, itertools.islice(ports, COUNT)), None)
    assert port is not None, f"something listens on each of {COUNT} ports"
    return port


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@functools.cache
def _claimed() -> tuple[socket.socket, Iterator[int]]:
    """Claim ports for the life of this process, by a name that it has in the network namespace."""
    for first in range(FIRST, LAST, COUNT):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0holdfast-test-ports-{first}")
        except OSError:
            claim.close()
            continue
        return claim, itertools.cycle(range(first, first + COUNT))
    raise RuntimeError(f"no ports: {(LAST - FIRST) // COUNT} processes have claimed them all")
