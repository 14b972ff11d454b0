"""The configuration of a launcher, as `holdfast run` passes it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.supervise.ranks.host_list import Address
from holdfast.supervise.ranks.membership import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """What the launcher is to run.

    Attributes:
        addresses: Host and port of each host's launcher; empty: this host alone.
        own: The place of this host among them.
    """

    settings: Settings
    addresses: tuple[Address, ...] = ()
    own: int = 0
