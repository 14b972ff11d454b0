"""Implement `holdfast show`: print the contents of one checkpoint from its records alone."""

from __future__ import annotations

from dataclasses import asdict

import click

from holdfast.cli import output
from holdfast.cli.output import Column, counted, secs_text, size_text, time_text
from holdfast.clock import SystemClock
from holdfast.engine.reading.metadata import ArrayMetadata, CheckpointMetadata, metadata_of
from holdfast.engine.reading.run import ReadableRun
from holdfast.engine.reading.sources import CheckpointSources
from holdfast.errors import StepNotFoundError
from holdfast.format.paths import path_name
from holdfast.format.values import decode_value
from holdfast.trainer.opening.run_access import read_only

VALUE_LENGTH_MAX = 200


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.argument("step", metavar="[STEP]", type=click.IntRange(min=0), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show(directory: str, step: int | None, as_json: bool) -> None:
    """Show the arrays and values of one checkpoint of the run in DIR.

    Without STEP it shows the newest one on the current timeline. For each array it prints the
    shape, the dtype, the grid of the chunks into which it was sharded, and the size in bytes.

    "size" is the size of all images that the checkpoint consists of, as in `holdfast ls`: the
    arrays and the images' headers. "written" is the size of the images that were written for it.
    """
    run = read_only(directory)
    sources = _find(run, step)
    if as_json:
        output.print_json(_document(run, sources))
    else:
        _print(run, sources)


def _find(run: ReadableRun, step: int | None) -> CheckpointSources:
    if step is None:
        view = run.load_view()
        if not view.timeline:
            raise StepNotFoundError(f"show {run.location}: it has no checkpoints yet")
        return view.sources(view.timeline[-1])
    return run.find_sources(step)


def _tiers(sources: CheckpointSources) -> list[str]:
    """Return the tiers that hold a whole copy, the nearest one first."""
    of_ranks = [[copy.store.tier for copy in copies] for copies in sources.parts]
    return [tier for tier in of_ranks[0] if all(tier in tiers for tiers in of_ranks)]


def _document(run: ReadableRun, sources: CheckpointSources) -> dict[str, object]:
    metadata = metadata_of(sources)
    return {
        "run": str(run.location),
        "run_id": run.run_id,
        "step": metadata.step,
        "attempt": metadata.attempt,
        "time": metadata.time,
        "metrics": sources.spec.metrics,
        "process_count": metadata.process_count,
        "size_bytes": metadata.size_bytes,
        "written_bytes": metadata.written_bytes,
        "reused": [asdict(reused) for reused in metadata.reused],
        "tiers": _tiers(sources),
        "arrays": [{"name": name, **asdict(array)} for name, array in metadata.arrays.items()],
        "values": [
            {
                "name": path_name(value.path),
                "type": type(decode_value(value.value)).__name__,
                "value": value.value,
            }
            for value in sources.spec.values
        ],
        "process_values": [path_name(path) for path in sources.spec.process_values],
    }


def _print(run: ReadableRun, sources: CheckpointSources) -> None:
    metadata = metadata_of(sources)
    age = secs_text((SystemClock().now() - metadata.time).total_seconds())
    metrics = " ".join(f"{k}={v:.5g}" for k, v in (metadata.metrics or {}).items())
    inputs = {
        "run": f"{run.location}",
        "checkpoint": f"step {metadata.step}, attempt {metadata.attempt}",
        "taken": f"{time_text(metadata.time)}, {age} ago",
        "size": f"{size_text(metadata.size_bytes)} of {_processes(metadata)}",
        "written": _written(metadata),
        "tiers": ", ".join(_tiers(sources)) or "in parts",
        "metrics": metrics,
    }
    output.print_table(
        [Column(""), Column("", folds=True)],
        [(name, fact) for name, fact in inputs.items() if fact],
    )
    _print_arrays(metadata)
    _print_values(metadata, sources)


def _written(metadata: CheckpointMetadata) -> str:
    """Return how much was written if images were reused: `0.8 MB; reused: 32.8 MB of step 0`."""
    if not metadata.reused:
        return ""
    reused = ", ".join(
        f"{size_text(image.size_bytes)} of step {image.step}" for image in metadata.reused
    )
    return f"{size_text(metadata.written_bytes)}; reused: {reused}"


def _processes(metadata: CheckpointMetadata) -> str:
    return counted(metadata.process_count, "process", "processes")


def _print_arrays(metadata: CheckpointMetadata) -> None:
    total = size_text(sum(array.size_bytes for array in metadata.arrays.values()))
    output.print_line(f"\n{counted(len(metadata.arrays), 'array')}, {total}")
    columns = [
        Column("name", folds=True),
        Column("shape", "right"),
        Column("dtype"),
        Column("grid", "right"),
        Column("bytes", "right"),
    ]
    rows = [
        (name, str(array.shape), _dtype(array), _grid(array), _bytes(array))
        for name, array in metadata.arrays.items()
    ]
    if rows:
        output.print_table(columns, rows, indent=2)


def _dtype(array: ArrayMetadata) -> str:
    return array.dtype if array.prng_impl is None else f"{array.dtype}, {array.prng_impl} key"


def _grid(array: ArrayMetadata) -> str:
    """Return the grid of chunks, such as `2×4`; `1` for an array in one piece."""
    return "×".join(map(str, array.grid)) if any(n > 1 for n in array.grid) else "1"


def _bytes(array: ArrayMetadata) -> str:
    return f"{array.size_bytes:,}" if array.alias_of is None else f"as {array.alias_of}"


def _print_values(metadata: CheckpointMetadata, sources: CheckpointSources) -> None:
    columns = [Column("", folds=True), Column("", folds=True)]
    if metadata.values:
        output.print_line(f"\n{counted(len(metadata.values), 'value')}")
        rows = [(name, _shortened(value)) for name, value in metadata.values.items()]
        output.print_table(columns, rows, indent=2)
    paths = sources.spec.process_values
    if paths:
        output.print_line(f"\n{counted(len(paths), 'object')} with a state of each process's own")
        output.print_table(columns[:1], [(path_name(path),) for path in paths], indent=2)


def _shortened(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to print integers of thousands of digits.
        text = f"{type(value).__name__} with very large integers"
    return text if len(text) <= VALUE_LENGTH_MAX else text[:VALUE_LENGTH_MAX] + "…"
