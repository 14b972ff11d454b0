"""Print the command line's tables, JSON, sizes and times.

Invariants: names of arrays and paths of files are data and are never parsed as markup. If stdout is
not a terminal, nothing is truncated, folded or coloured.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.quantities import counted as counted
from holdfast.quantities import secs_text as secs_text
from holdfast.quantities import size_text as size_text

WIDE = 10_000
FOLDED_CHARS_MIN = 12
"""The width below which a column that folds is not readable."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        title: Its title.
        justify: The side of its cells.
        folds: Its cells continue on another line on a narrow terminal.
        is_extra: It is left out where there is no room for all columns.
    """

    title: str
    justify: Literal["left", "right"] = "left"
    folds: bool = False
    is_extra: bool = False


def stdout() -> Console:
    """Return the console for results."""
    width = None if _is_narrow() else WIDE
    return Console(width=width, highlight=False, markup=False, emoji=False)


def _is_narrow() -> bool:
    """Return whether lines must fit a width."""
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def stderr() -> Console:
    """Return the console for warnings and progress."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_line(text: str | Text) -> None:
    """Print one line to stdout, without folding it."""
    stdout().print(text, soft_wrap=True)


def note(text: str) -> None:
    """Print one line to stderr."""
    stderr().print(text, soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning, in one line to stderr; the command continues."""
    note(f"warning: {text}")


@contextlib.contextmanager
def showing_log() -> Iterator[None]:
    """Print the warnings in Holdfast's log, in the block, as the command's own."""
    logger, handler = logging.getLogger("holdfast"), logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def confirm(question: str, *, is_answered: bool, to_look: str = "--dry-run") -> None:
    """Ask before something is removed, unless `--yes` has answered.

    Args:
        question: The question.
        is_answered: Whether `--yes` was given.
        to_look: What to pass in order to look only.

    Raises:
        click.UsageError: there is no terminal to ask on.
        click.Abort: the answer is no.
    """
    if is_answered:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"{question} There is no terminal to ask on: pass --yes, or {to_look} to look only.",
            click.get_current_context(),
        )
    click.confirm(question, abort=True, err=True)


def print_error(text: str) -> None:
    """Print an error, in one line to stderr."""
    print("error:", " ".join(text.split()), file=sys.stderr)


def print_json(document: object) -> None:
    """Print a command's one JSON document to stdout."""
    text = msgspec.json.format(msgspec.json.encode(document), indent=2)
    sys.stdout.write(text.decode() + "\n")


def print_table(
    columns: Sequence[Column], rows: Iterable[Sequence[str | Text]], *, indent: int = 0
) -> None:
    """Print a table as narrow as its cells allow; without titles it has no header."""
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    has_plain_cells = all(cell.plain.isprintable() for row in cells for cell in row)
    is_plain = has_plain_cells and not _is_narrow()
    for line in plain_lines(columns, cells) if is_plain else _fitting_lines(columns, cells, indent):
        sys.stdout.write(" " * indent + line.rstrip() + "\n")


def plain_lines(columns: Sequence[Column], cells: Sequence[Sequence[Text]]) -> Iterator[str]:
    """Yield the lines of a table with printable cells, for an output without width and colours.

    This takes a tenth of the time of the general layout, which matters for thousands of rows.
    """
    titles = [Text(column.title) for column in columns]
    rows = [titles, *cells] if any(column.title for column in columns) else cells
    widths = [max((row[i].cell_len for row in rows), default=0) for i in range(len(columns))]
    for row in rows:
        padded = []
        for column, cell, width in zip(columns, row, widths, strict=True):
            space = " " * (width - cell.cell_len)
            padded.append(space + cell.plain if column.justify == "right" else cell.plain + space)
        yield "  ".join(padded)


def _fitting_lines(
    columns: Sequence[Column], cells: Sequence[Sequence[Text]], indent: int
) -> Iterator[str]:
    """Yield the lines of a table that loses no number, however narrow the terminal is."""
    room = stdout().width - indent
    if _least_width(columns, cells) > room:
        kept = [index for index, column in enumerate(columns) if not column.is_extra]
        columns = [columns[index] for index in kept]
        cells = [[row[index] for index in kept] for row in cells]
    if _least_width(columns, cells) <= room:
        yield from _rendered_lines(columns, cells, indent)
        return
    for row in cells:
        for number, (column, cell) in enumerate(zip(columns, row, strict=True)):
            if cell.plain:
                title = f"{column.title}: " if number and column.title else ""
                yield "  " * bool(number) + title + cell.plain


def _least_width(columns: Sequence[Column], cells: Sequence[Sequence[Text]]) -> int:
    width = 2 * (len(columns) - 1)
    for index, column in enumerate(columns):
        own = max([len(column.title), *(row[index].cell_len for row in cells)])
        width += min(own, FOLDED_CHARS_MIN) if column.folds else own
    return width


def _rendered_lines(
    columns: Sequence[Column], cells: Sequence[Sequence[Text]], indent: int
) -> Iterator[str]:
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        show_header=any(column.title for column in columns),
        header_style="bold",
    )
    for column in columns:
        table.add_column(
            column.title,
            justify=column.justify,
            no_wrap=not column.folds,
            overflow="fold" if column.folds else "ellipsis",
        )
    for row in cells:
        table.add_row(*row)
    console = stdout()
    console.width -= indent
    with console.capture() as captured:
        console.print(table)
    yield from captured.get().splitlines()


def time_text(time: datetime) -> str:
    """Return a readable time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC")
