"""Make the distribution's description of README.md. All other metadata is in pyproject.toml.

A package index shows the description without the repository's files. So a link to a file becomes
its text, which names the file, and a picture becomes its alternative text.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

RELATIVE = r"\[([^\]]*)\]\((?!https?://)[^)\s]*\)"
PICTURE = re.compile("!" + RELATIVE)
LINK = re.compile(RELATIVE)


def description(readme: str) -> str:
    """Return the text of README.md without links and pictures that need the repository."""
    return LINK.sub(r"\1", PICTURE.sub(r"*\1*", readme))


if __name__ == "__main__":
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=description(readme),
        long_description_content_type="text/markdown",
    )
