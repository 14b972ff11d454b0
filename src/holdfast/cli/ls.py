"""Implement `holdfast ls`: list the checkpoints in the durable tiers and this host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.output import Column, counted, secs_text, size_text
from holdfast.clock import SystemClock
from holdfast.engine.reading.inventory import Inventory, Row, State, take_inventory
from holdfast.errors import HoldfastError, NotARunError, translated
from holdfast.format.names import RUN_FILE
from holdfast.observe.state_words import step_text, tiers_text
from holdfast.store.location import RunLocation
from holdfast.trainer.opening.run_access import read_only
from holdfast.trainer.run import open_run

_STYLES = {
    State.COMMITTED: "green",
    State.IN_RAM: "cyan",
    State.UNCOMMITTED: "yellow",
    State.DAMAGED: "bold red",
}


@click.command()
@click.argument("directories", metavar="DIR…", nargs=-1, required=True, type=click.Path())
@click.option(
    "--limit", metavar="N", type=click.IntRange(min=1), help="List only the N newest checkpoints."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def ls(directories: tuple[str, ...], limit: int | None, as_json: bool) -> int:
    """List the checkpoints of the run in DIR, in ascending order of steps.

    If DIR is no run and has runs in it, or several are given, list these runs and their newest
    steps.

    Checkpoints that are not on the current timeline, because the run went back to an earlier step,
    are marked as abandoned. Images are not read; `holdfast verify` reads them.

    "tiers" is where each one is: in this host's RAM, in DIR (durable), and in the remote
    tier, of a run that was trained with one (remote).

    "size" is the size of all images that a checkpoint consists of, "written" that of the images
    written for it. The others hold unchanged arrays and were written for earlier checkpoints.
    `holdfast show` counts in the same way.
    """
    if len(directories) > 1:
        places = [place for directory in directories for place in _places_of(directory)]
        problems = _list_runs({"directories": [*directories]}, places, as_json=as_json)
        return 1 if problems else 0
    directory = directories[0]
    try:
        run = read_only(directory)
    except NotARunError:
        folders = _folders_of_runs(directory)
        if not folders:
            raise
        places = [(folder.name, str(folder)) for folder in folders]
        _list_runs({"directory": str(RunLocation.parse(directory))}, places, as_json=as_json)
        return 0
    inventory = take_inventory(run, limit)
    for problem in inventory.problems:
        output.warn(problem)
    if as_json:
        output.print_json(
            {
                "run": str(run.location),
                "run_id": run.run_id,
                "latest_step": inventory.latest_step,
                "count": inventory.count,
                "checkpoints": [_document(row) for row in inventory.rows],
            }
        )
        return 0
    if not inventory.rows:
        output.print_line(f"{run.location}: no checkpoints yet")
        return 0
    _print(inventory)
    return 0


def _folders_of_runs(directory: str) -> list[Path]:
    """Return the directories in `directory` that are runs, by name; none at a URL."""
    location = RunLocation.parse(directory)
    if location.is_url or not location.folder.is_dir():
        return []
    with translated("list", location.folder):
        return sorted(folder.parent for folder in location.folder.glob(f"*/{RUN_FILE}"))


def _places_of(directory: str) -> list[tuple[str, str]]:
    """Return the name and the place of a run, or of each run in a directory that is none."""
    location = RunLocation.parse(directory)
    if not location.is_url and not location.record.exists():
        folders = _folders_of_runs(directory)
        if folders:
            return [(f"{directory.rstrip('/')}/{folder.name}", str(folder)) for folder in folders]
    return [(directory, directory)]


def _list_runs(
    document: dict[str, object], places: Sequence[tuple[str, str]], *, as_json: bool
) -> int:
    """Print the newest step of each run.

    Args:
        document: What else the JSON document has.
        places: The names of the runs, and their directories or URLs.
        as_json: Whether to print the document.

    Returns:
        The number of runs that cannot be read.
    """
    rows: list[dict[str, object]] = []
    for _, place in places:
        row: dict[str, object] = {"run": place, "latest_step": None, "problem": None}
        try:
            with open_run(place) as run:
                row["latest_step"] = run.latest_step()
        except HoldfastError as error:
            row["problem"] = str(error)
        rows.append(row)
    problems = [
        (name, row["problem"])
        for (name, _), row in zip(places, rows, strict=True)
        if row["problem"]
    ]
    if as_json:
        output.print_json({**document, "runs": rows})
        return len(problems)
    columns = [Column("run"), Column("newest step", "right")]
    cells: list[list[str | Text]] = [
        [name, "?" if row["problem"] else _step_cell(row["latest_step"])]
        for (name, _), row in zip(places, rows, strict=True)
    ]
    output.print_table(columns, cells)
    for name, problem in problems:
        output.print_line(Text(f"{name}: {problem}", "red"))
    return len(problems)


def _step_cell(step: object) -> str:
    return "none yet" if step is None else str(step)


def _document(row: Row) -> dict[str, object]:
    return {
        "step": row.id.step,
        "attempt": row.id.attempt.number,
        "time": row.time,
        "age_secs": _age_secs(row),
        "size_bytes": row.size_bytes,
        "written_bytes": row.written_bytes,
        "tiers": row.tiers,
        "state": row.state.value,
        "on_timeline": row.is_on_timeline,
        "metrics": row.metrics,
        "problem": row.problem,
    }


def _age_secs(row: Row) -> float | None:
    if row.time is None:
        return None
    return round(max(0.0, (SystemClock().now() - row.time).total_seconds()), 3)


def _print(inventory: Inventory) -> None:
    columns = [
        Column("step", "right"),
        Column("attempt", "right"),
        Column("age", "right"),
        Column("size", "right"),
        Column("written", "right"),
        Column("tiers"),
        Column("state"),
        Column("metrics", folds=True),
    ]
    if not any(row.metrics for row in inventory.rows):
        columns.pop()
    output.print_table(columns, [_cells(row)[: len(columns)] for row in inventory.rows])
    for row in inventory.rows:
        if row.problem is not None:
            style = "red" if row.state is State.DAMAGED else "yellow"
            output.print_line(
                Text(f"step {row.id.step}, attempt {row.id.attempt}: {row.problem}", style)
            )
    hidden = inventory.count - len(inventory.rows)
    total = size_text(sum(row.written_bytes for row in inventory.rows))
    parts = [f"{counted(len(inventory.rows), 'checkpoint')}, {total} written"]
    if hidden:
        parts.append(f"{hidden:,} older not shown")
    if inventory.latest_step is not None:
        parts.append(f"newest on the timeline: {step_text(inventory.latest_step)}")
    output.print_line("; ".join(parts))


def _cells(row: Row) -> list[str | Text]:
    state = Text(row.state.value, _STYLES[row.state])
    if row.is_on_timeline is False:
        state.append(" (abandoned)", "dim")
    age = _age_secs(row)
    return [
        str(row.id.step),
        str(row.id.attempt),
        "?" if age is None else secs_text(age),
        size_text(row.size_bytes),
        size_text(row.written_bytes),
        tiers_text(row.tiers),
        state,
        " ".join(f"{name}={_number(value)}" for name, value in (row.metrics or {}).items()),
    ]


def _number(value: float | str) -> str:
    return f"{value:.5g}" if isinstance(value, float | int) else value
