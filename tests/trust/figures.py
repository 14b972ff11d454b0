"""The figures of the trust tests: told by each soak test, gathered into docs/reliability.md.

`python -m tests.trust.figures` writes the table there from what the last soak run told.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOLD = ROOT / "build" / "soak"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- figures: made by `make soak` -->", "<!-- end of figures -->"


def tell(row: str, wanted: str, reached: str) -> None:
    """Prints a figure, and keeps it for the page; `row` is its key, such as `crash states`."""
    print(f"\n{row}: {reached} (wanted: {wanted})")
    TOLD.mkdir(parents=True, exist_ok=True)
    line = {"row": row, "wanted": wanted, "reached": reached}
    (TOLD / f"{row.replace(' ', '-')}.json").write_text(json.dumps(line))


def write_page() -> None:
    """Puts the table between the page's marks."""
    told = [json.loads(path.read_text()) for path in sorted(TOLD.glob("*.json"))]
    machine = f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}"
    python = f"Python {platform.python_version()}"
    lines = [
        BEGIN,
        f"Taken on {datetime.now(UTC):%Y-%m-%d} with {python} on {machine}.",
        "",
        "| what | wanted | reached |",
        "| --- | --- | --- |",
        *(f"| {t['row']} | {t['wanted']} | {t['reached']} |" for t in told),
        END,
    ]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + "\n".join(lines) + rest.partition(END)[2])


if __name__ == "__main__":
    if not any(TOLD.glob("*.json")):
        sys.exit("no soak test has told a figure; run `make soak`")
    write_page()
