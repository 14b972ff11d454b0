"""Gather the figures of the trust tests, which each soak test reports, into docs/reliability.md.

`python -m tests.trust.figures` writes the reported figures into the table there; rows without a new
report stay, with the day of theirs.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
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
    line = {
        "row": row,
        "wanted": wanted,
        "reached": reached,
        "day": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    (TOLD / f"{row.replace(' ', '-')}.json").write_text(json.dumps(line))


def tell_table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Keep a table of its own for the page, which has marks of this name."""
    TOLD.mkdir(parents=True, exist_ok=True)
    lines = [head, ["---"] * len(head), *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    (TOLD / f"{name.replace(' ', '-')}.md").write_text(text)


def write_page() -> None:
    """Write the reported figures and tables between the page's marks."""
    text = PAGE.read_text()
    for path in TOLD.glob("*.md"):
        name = path.stem.replace("-", " ")
        begin, end = f"<!-- {name}: made by `make soak` -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(f"{begin}\n")
        text = f"{before}{begin}\n{path.read_text()}\n{end}{rest.partition(end)[2]}"
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    lines = {_name(line): line for line in table.splitlines() if line.startswith("| ")}
    for path in TOLD.glob("*.json"):
        told = json.loads(path.read_text())
        lines[told["row"]] = (
            f"| {told['row']} | {told['wanted']} | {told['reached']} | {told['day']} |"
        )
    rows = [lines[name] for name in sorted(lines.keys() - {"what", "---"})]
    machine = f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}"
    head = [
        BEGIN,
        f"Taken with Python {platform.python_version()} on {machine}.",
        "",
        "| what | wanted | reached | taken on |",
        "| --- | --- | --- | --- |",
    ]
    PAGE.write_text(before + "\n".join([*head, *rows, END]) + after)


def _name(line: str) -> str:
    return line.split("|")[1].strip()


if __name__ == "__main__":
    if not any(TOLD.glob("*.json")):
        sys.exit("no soak test has told a figure; run `make soak`")
    write_page()
