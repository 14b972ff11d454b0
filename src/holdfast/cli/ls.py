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
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option(
    "--limit", metavar="N", type=click.IntRange(min=1), help="List only the N newest checkpoints."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def ls(directory: str, limit: int | None, as_json: bool) -> None:
    """List the checkpoints of the run in DIR, in ascending order of steps.

    If DIR is no run and has runs in it, list these: their names and newest steps.

    Checkpoints that are not on the current timeline, because the run went back to an earlier step,
    are marked as abandoned. Images are not read; `holdfast verify` reads them.

    "tiers" is where each one is: in this host's RAM, in DIR (durable), and in the remote
    tier, of a run that was trained with one (remote).

    "size" is the size of all images that a checkpoint consists of, "written" that of the images
    written for it. The others hold unchanged arrays and were written for earlier checkpoints.
    `holdfast show` counts in the same way.
    """
    try:
        run = read_only(directory)
    except NotARunError:
        folders = _folders_of_runs(directory)
        if not folders:
            raise
        _list_runs(directory, folders, as_json=as_json)
        return
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
        return
    if not inventory.rows:
        output.print_line(f"{run.location}: no checkpoints yet")
        return
    _print(inventory)


def _folders_of_runs(directory: str) -> list[Path]:
    """Return the directories in `directory` that are runs, by name; none at a URL."""
    location = RunLocation.parse(directory)
    if location.is_url or not location.folder.is_dir():
        return []
    with translated("list", location.folder):
        return sorted(folder.parent for folder in location.folder.glob(f"*/{RUN_FILE}"))


def _list_runs(directory: str, folders: Sequence[Path], *, as_json: bool) -> None:
    rows: list[dict[str, object]] = []
    for folder in folders:
        row: dict[str, object] = {"run": str(folder), "latest_step": None, "problem": None}
        try:
            with open_run(folder) as run:
                row["latest_step"] = run.latest_step()
        except HoldfastError as error:
            row["problem"] = str(error)
        rows.append(row)
    if as_json:
        output.print_json({"directory": str(RunLocation.parse(directory)), "runs": rows})
        return
    columns = [Column("run"), Column("newest step", "right")]
    cells: list[list[str | Text]] = [
        [folder.name, "?" if row["problem"] else _step_cell(row["latest_step"])]
        for folder, row in zip(folders, rows, strict=True)
    ]
    output.print_table(columns, cells)
    for folder, row in zip(folders, rows, strict=True):
        if row["problem"] is not None:
            output.print_line(Text(f"{folder.name}: {row['problem']}", "red"))


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
