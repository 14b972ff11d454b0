"""The environment variables of Holdfast: one table of their names.

A variable that begins like these and is none of them is most likely misspelt: the first opening in
a process warns about it, since it would be ignored in silence.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from functools import cache

PREFIX = "HOLDFAST_"
HOST_VARIABLE = "HOLDFAST_HOST"
INTERFACE_VARIABLE = "HOLDFAST_INTERFACE"
LAUNCHER_VARIABLE = "HOLDFAST_LAUNCHER"
LOG_VARIABLE = "HOLDFAST_LOG"
MEMBER_VARIABLE = "HOLDFAST_MEMBER"
PROMETHEUS_VARIABLE = "HOLDFAST_PROMETHEUS_PORT"
PROOF_VARIABLE = "HOLDFAST_PROOF"
RAM_VARIABLE = "HOLDFAST_RAM"
RESTART_VARIABLE = "HOLDFAST_RESTART_COUNT"
STANDBY_VARIABLE = "HOLDFAST_STANDBY"
STATE_VARIABLE = "HOLDFAST_STATE"
SUPERVISED_VARIABLE = "HOLDFAST_SUPERVISED"
TOKEN_VARIABLE = "HOLDFAST_PAGE_TOKEN"

VARIABLES = (
    HOST_VARIABLE,
    INTERFACE_VARIABLE,
    LAUNCHER_VARIABLE,
    LOG_VARIABLE,
    MEMBER_VARIABLE,
    PROMETHEUS_VARIABLE,
    PROOF_VARIABLE,
    RAM_VARIABLE,
    RESTART_VARIABLE,
    STANDBY_VARIABLE,
    STATE_VARIABLE,
    SUPERVISED_VARIABLE,
    TOKEN_VARIABLE,
)
_OF_KUBERNETES = re.compile(r"\w+_SERVICE_(HOST|PORT)(_\w+)?|\w+_PORT_[0-9]+_\w+")
"""Variables that Kubernetes sets in each container for a service named holdfast."""

log = logging.getLogger(__name__)


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the set variables that are none of Holdfast's, each with the nearest one of these."""
    unknown = [
        name
        for name, value in environment.items()
        if name.startswith(PREFIX)
        and name not in VARIABLES
        and not _OF_KUBERNETES.fullmatch(name)
        and "://" not in value
    ]
    endings = {name.removeprefix(PREFIX): name for name in VARIABLES}
    nearest = {
        name: difflib.get_close_matches(name.removeprefix(PREFIX), endings, 1)
        for name in sorted(unknown)
    }
    return {name: endings[near[0]] if near else None for name, near in nearest.items()}


@cache
def warn_unknown() -> None:
    """Warn about variables that are none of Holdfast's, once in a process."""
    for name, nearest in unknown_variables(os.environ).items():
        log.warning(
            "the environment has %s, which is not read: expected %s; correct the name, or unset it",
            name,
            nearest or f"one of {', '.join(VARIABLES)}",
        )
