"""Where a peer serves: an address, and its text form. Pure, so that importing it loads no HTTP."""

from __future__ import annotations

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
