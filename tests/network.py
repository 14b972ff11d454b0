"""Hosts with networks of their own: network namespaces on one bridge, made and removed by a test.

Each host has a second cable, for the job's own coordinator, which is never cut.

Root only. A cable is cut by taking it down, a pair of hosts by isolating their ports on the bridge,
and a slow cable has a token bucket: what the kernel drops is dropped in silence, as in the world.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.hosts import Host, host
from tests.switch import TUN, Switch

INTERFACE = "eth0"
COORDINATOR_INTERFACE = "eth1"

_numbers = itertools.count()


def why_not(*, has_switch: bool = False) -> str | None:
    """Why no network can be made here; None where it can."""
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    if shutil.which("ip") is None:
        return "`ip` (iproute2), which makes network namespaces, is not installed"
    if has_switch and not os.path.exists(TUN):
        return f"there is no {TUN}, which makes TAP devices"
    tag = f"{os.getpid()}x"
    try:
        _ip("netns", "add", f"hf{tag}")
        _ip("link", "add", f"hf{tag}", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"this system gives no network namespaces or bridges: {error.stderr.strip()}"
    finally:
        _ip_quietly("link", "delete", f"hf{tag}")
        _ip_quietly("netns", "delete", f"hf{tag}")
    return None


@dataclass
class Network:
    """Hosts on one bridge; `hosts[i]` has the address `addresses[i]`.

    By the second cable it has the address `uncut_addresses[i]`.
    """

    tag: str
    hosts: list[Host] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    uncut_addresses: list[str] = field(default_factory=list)

    def port(self, index: int) -> str:
        """The host's port on the bridge."""
        return f"hf{self.tag}p{index}"

    def cut(self, index: int) -> None:
        """The host reaches nobody any more."""
        _ip("link", "set", self.port(index), "down")

    def heal(self, index: int) -> None:
        """Its cable is back."""
        _ip("link", "set", self.port(index), "up")

    def separate(self, *indices: int) -> None:
        """These hosts reach all others, but not one another."""
        for index in indices:
            _ip("link", "set", self.port(index), "type", "bridge_slave", "isolated", "on")

    def join(self, *indices: int) -> None:
        """They reach one another again."""
        for index in indices:
            _ip("link", "set", self.port(index), "type", "bridge_slave", "isolated", "off")

    @contextlib.contextmanager
    def slow(self, index: int, kilobits: int) -> Iterator[None]:
        """What the host sends goes at that rate a second within."""
        where = ("netns", "exec", self.hosts[index].prefix[3])
        _ip(*where, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf",
            "rate", f"{kilobits}kbit", "burst", "32kbit", "latency", "500ms")  # fmt: skip
        try:
            yield
        finally:
            _ip(*where, "tc", "qdisc", "delete", "dev", INTERFACE, "root")


@contextlib.contextmanager
def network(count: int, switch: Switch | None = None) -> Iterator[Network]:
    """A bridge and hosts on it, all of which are gone on leaving.

    With a `switch`, the hosts' first cables end there and not on the bridge.
    """
    tag = f"{os.getpid()}{next(_numbers)}"
    made = Network(tag)
    bridge, second = f"hf{tag}", f"hf{tag}c"
    with contextlib.ExitStack() as stack:
        for one_bridge in (bridge, second):
            _ip("link", "add", one_bridge, "type", "bridge")
            stack.callback(_ip_quietly, "link", "delete", one_bridge)
            _ip("link", "set", one_bridge, "up")
        for index, name in enumerate("abcdefghijklmnopqrstuvwxyz"[:count]):
            space, port, address = f"hf{tag}n{index}", made.port(index), f"10.123.0.{index + 1}"
            _ip("netns", "add", space)
            stack.callback(_ip_quietly, "netns", "delete", space)
            uncut = f"10.124.0.{index + 1}"
            for end, inner, on, ip in (
                (port, INTERFACE, bridge, address),
                (f"hf{tag}q{index}", COORDINATOR_INTERFACE, second, uncut),
            ):
                if switch is not None and inner == INTERFACE:
                    switch.add_port(end)
                    _ip("link", "set", end, "netns", space, "name", inner)
                else:
                    # Connections that linger would keep the namespace, and the cable with it.
                    stack.callback(_ip_quietly, "link", "delete", end)
                    _ip("link", "add", end, "type", "veth", "peer", "name", inner, "netns", space)
                    _ip("link", "set", end, "master", on, "up")
                _ip("-n", space, "addr", "add", f"{ip}/24", "dev", inner)
                _ip("-n", space, "link", "set", inner, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            one = stack.enter_context(host(f"host-{name}"))
            one.prefix = ("ip", "netns", "exec", space)
            one.variables["HOLDFAST_INTERFACE"] = INTERFACE
            made.hosts.append(one)
            made.addresses.append(address)
            made.uncut_addresses.append(uncut)
        if switch is not None:
            stack.enter_context(switch.running())
        yield made


def _ip(*arguments: str) -> None:
    subprocess.run(
        ["ip", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=20,
        stdin=subprocess.DEVNULL,
    )


def _ip_quietly(*arguments: str) -> None:
    with contextlib.suppress(subprocess.SubprocessError):
        _ip(*arguments)
