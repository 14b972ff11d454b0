"""Read the list of a job's hosts, and find this host in it.

The list is the same on all hosts, so that all number them alike.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil

from holdfast import launchers
from holdfast.environment import HOST_VARIABLE, INTERFACE_VARIABLE
from holdfast.errors import InvalidArgumentError
from holdfast.local_agent.place import host_name

PORT = 29517
"""The port of a launcher whose host names none."""
FROM_LAUNCHER = "auto"
"""The list is that of Slurm's step."""

Address = tuple[str, int]


def parse_hosts(text: str, environment: Mapping[str, str]) -> tuple[Address, ...]:
    """Return host and port of each launcher.

    Args:
        text: `HOST[:PORT],…`, an IPv6 address in brackets; or `auto`.
        environment: The variables of the process, for `auto`.

    Raises:
        InvalidArgumentError: A port is none, a host is twice in the list, or nothing names hosts.
    """
    if text == FROM_LAUNCHER:
        text = ",".join(_hosts_of_launcher(environment))
    addresses = tuple(_parse_host(word) for word in text.split(","))
    twice = [host for host, port in addresses if addresses.count((host, port)) > 1]
    if twice:
        raise InvalidArgumentError(f"--hosts: expected each host once, found {twice[0]} twice")
    return addresses


def _parse_host(word: str) -> Address:
    host, colon, port = word.strip().rpartition(":")
    if not colon or word.strip().endswith("]"):
        host, port = word.strip(), str(PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise InvalidArgumentError(f"--hosts: expected HOST or HOST:PORT, found {word!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _hosts_of_launcher(environment: Mapping[str, str]) -> tuple[str, ...]:
    for launcher in launchers.launch_of(environment, {}).launchers:
        if launcher.hosts:
            return launcher.hosts
    raise InvalidArgumentError(
        "--hosts auto: expected a step of Slurm, which lists its hosts, found none "
        "(SLURM_STEP_NODELIST is not set); name the hosts: --hosts a,b,c"
    )


def own_place(addresses: tuple[Address, ...], environment: Mapping[str, str]) -> int:
    """Return the place of this host in the list.

    Raises:
        InvalidArgumentError: It is not there, or more than once.
    """
    interface = environment.get(INTERFACE_VARIABLE, "")
    own = {interface} | {each.address for each in psutil.net_if_addrs().get(interface, ())}
    names = {environment.get(HOST_VARIABLE) or host_name(), socket.gethostname()}
    local = {a.address for each in psutil.net_if_addrs().values() for a in each}
    resolved = [_resolve(host) for host, _ in addresses]
    # The most certain first: an interface that was named, a name, any address of this host.
    for places in (
        [i for i, found in enumerate(resolved) if interface and found & own],
        [i for i, (host, _) in enumerate(addresses) if host in names],
        [i for i, found in enumerate(resolved) if found & local],
    ):
        if len(places) == 1:
            return places[0]
        if places:
            hosts = ", ".join(f"{addresses[i][0]}:{addresses[i][1]}" for i in places)
            raise InvalidArgumentError(
                f"--hosts: {hosts} are all this host; set {INTERFACE_VARIABLE} to its address"
            )
    raise InvalidArgumentError(
        f"--hosts: none of {', '.join(host for host, _ in addresses)} is this host "
        f"({', '.join(sorted(names))}); use its name or an address of it, or set "
        f"{INTERFACE_VARIABLE} or {HOST_VARIABLE}"
    )


def listening_address(host: str, environment: Mapping[str, str]) -> str:
    """Return the address, or the interface, at which this host's launcher listens.

    Raises:
        InvalidArgumentError: Its name has no address that other hosts can reach.
    """
    if interface := environment.get(INTERFACE_VARIABLE):
        return interface
    addresses = sorted(_resolve(host))
    reachable = [each for each in addresses if not each.startswith("127.") and each != "::1"]
    if host in addresses or reachable:
        return host if host in addresses else reachable[0]
    found = addresses[0] if addresses else "no address"
    raise InvalidArgumentError(
        f"--hosts: {host} is {found} on this host, which other hosts cannot reach; set "
        f"{INTERFACE_VARIABLE} to the address or interface that they can"
    )


def _resolve(host: str) -> set[str]:
    """Return the addresses of a host; none, if its name is not known yet."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
