"""Locate the folder of a run's agent on this host: its control block and its RAM tier.

It is the agent's place too, with its socket and its lock (`local_agent.place`).

See docs/decisions/0005.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from holdfast.local_agent.place import roots, safe_name

WORDS = "words"
GROUP = "group.json"
RAM = "ram"


def user_name() -> str:
    """Return the name of this process's user; its number if it has no name here."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def agent_folders(run_id: str, host: str) -> list[Path]:
    """Return the possible folders of a run's agent on `host`, the preferred one first."""
    return [root / f"{run_id}-{safe_name(host)}" for root in roots()]


def ram_folder(folder: Path) -> Path:
    """Return the RAM tier's root within an agent's folder."""
    return folder / RAM
