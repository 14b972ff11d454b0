"""Two runs of the tests at once are given different ports."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.ports import COUNT, free_port, free_ports


def test_another_process_is_given_other_ports() -> None:
    own = set(free_ports(COUNT // 2))
    code = f"from tests.ports import free_ports; print(*free_ports({COUNT // 2}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(own) == COUNT // 2
    assert own.isdisjoint(map(int, other.stdout.split()))


def test_a_port_that_something_listens_on_is_not_given() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        taken = server.getsockname()[1]
        assert taken not in free_ports(COUNT)
