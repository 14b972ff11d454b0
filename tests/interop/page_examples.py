"""The examples of docs/jax_trainers.md that need a trainer: the trainers' tests execute them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "jax_trainers.md"
_SECTION = re.compile(r"^## ([^\n]+)$(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"^```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples() -> dict[str, str]:
    """Return the code of each section that has some; a section has at most one example."""
    found = {}
    for heading, text in _SECTION.findall(PAGE.read_text()):
        blocks = _BLOCK.findall(text)
        assert len(blocks) <= 1, heading
        if blocks:
            found[heading] = blocks[0]
    return found
