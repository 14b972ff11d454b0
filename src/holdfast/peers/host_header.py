"""Read the `Host` of a request, so that no page of another site reaches a server on loopback.

A site whose name leads to 127.0.0.1 (DNS rebinding) makes a browser ask for it by that name.
"""

from __future__ import annotations

import ipaddress
import re

_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9.-]+))(?::[0-9]{1,5})?")


def names_loopback(header: str) -> bool:
    """Return whether a `Host` is exactly a loopback host, with or without a port."""
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
