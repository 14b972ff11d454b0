"""Where a peer serves: an address, and its text form; and whether a request names loopback.

Pure, so that importing it loads no HTTP.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.errors import InvalidArgumentError

_ADDRESS = re.compile(
    r"(?:\[([0-9A-Fa-f:.%]{2,100})\]|([^\[\]:/\s]{1,255})):([0-9]{1,5})(?: since ([0-9]{1,18}))?"
)


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a peer serves; `host` is an address or a name.

    `since` tells a later address of a host from an earlier one: it grows with each agent there, and
    is 0 where it is not known.
    """

    host: str
    port: int
    since: int = 0

    @property
    def authority(self) -> str:
        """As it stands in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.authority} since {self.since}" if self.since else self.authority


def parse_address(text: str) -> PeerAddress:
    """The address that `str` of one gave.

    Raises:
        InvalidArgumentError: it is none.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise InvalidArgumentError(
            f"address {text[:200]!r}: expected HOST:PORT, with [] around an IPv6 address"
        )
    return PeerAddress(match[1] or match[2], int(match[3]), int(match[4] or 0))


def parsed_addresses(texts: Mapping[str, str]) -> dict[str, PeerAddress]:
    """The addresses of hosts, each as `str` of one gave it; errors as `parse_address`."""
    return {host: parse_address(text) for host, text in texts.items()}


_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9.-]+))(?::[0-9]{1,5})?")


def names_loopback(header: str) -> bool:
    """Return whether a request's `Host` is exactly a loopback host, with or without a port.

    A site whose name leads to 127.0.0.1 (DNS rebinding) makes a browser ask for it by that name, so
    a server on loopback refuses other hosts.
    """
    match = _HOST.fullmatch(header)
    if match is None:
        return False
    if match["name"] is not None and match["name"].lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(match["v6"] or match["name"])
    except ValueError:
        return False
    return address.is_loopback and (address.version == 6) == (match["v6"] is not None)
