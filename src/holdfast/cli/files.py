"""Implement `holdfast export` and `holdfast import`: checkpoints as other programs' files."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from holdfast.cli import output
from holdfast.cli.amounts import Amount
from holdfast.cli.interruption import ends_at_interrupt
from holdfast.cli.output import counted
from holdfast.errors import InvalidArgumentError, StepNotFoundError
from holdfast.quantities import size_text
from holdfast.trainer.run import Run, open_run

DCP_METADATA = ".metadata"
"""The file that marks a folder of `torch.distributed.checkpoint`."""


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.argument("step", metavar="[STEP]", type=click.IntRange(min=0), required=False)
@click.option("--hf", metavar="TARGET", type=click.Path(path_type=Path), help="Write safetensors.")
@click.option("--torch", "file", metavar="FILE", type=click.Path(path_type=Path), help="torch.save")
@click.option(
    "--orbax", metavar="TARGET", type=click.Path(path_type=Path), help="A CheckpointManager's step."
)
@click.option("--prefix", default="", help="Only what is below this path, such as 'model'.")
@click.option("--dtype", help="Convert floating-point arrays, such as to 'bfloat16'.")
@click.option(
    "--max-shard-size",
    "shard_gigabytes",
    metavar="GB",
    type=Amount(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="The size of a file of safetensors.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@ends_at_interrupt()
def export(
    directory: str,
    step: int | None,
    hf: Path | None,
    file: Path | None,
    orbax: Path | None,
    as_json: bool,
    **of_safetensors: Any,
) -> None:
    """Write a checkpoint of the run in DIR as files of other programs.

    Without STEP it is the newest one. All that is read is checked by its digests. With --hf the
    arrays below --prefix are written as safetensors with an index, as Hugging Face's
    `from_pretrained` reads them. With --torch the whole state is written by `torch.save`; what DCP
    has pickled in a checkpoint of `HoldfastWriter` is executed for it. With --orbax it becomes a
    step of the directory DIR of an Orbax `CheckpointManager`, which is made if it is missing.
    """
    if sum(target is not None for target in (hf, file, orbax)) != 1:
        raise InvalidArgumentError("export: expected one of --hf DIR, --torch FILE and --orbax DIR")
    prefix, dtype = of_safetensors["prefix"], of_safetensors["dtype"]
    if hf is None and (prefix or dtype):
        raise InvalidArgumentError("export: --prefix and --dtype are for --hf")
    with open_run(directory) as run:
        number = _step_of(run, step)
        if orbax is not None:
            _use_host_memory()
            from holdfast.interop.orbax.orbax_export import export_orbax

            with _progress(f"exporting step {number}") as show:
                export_orbax(run, number, orbax, show)
            _report(number, [orbax / str(number)], as_json)
            return
        if file is not None:
            from holdfast.interop.torch_files import export_torch

            with _progress(f"exporting step {number}") as show:
                export_torch(directory, number, file, show)
            _report(number, [file], as_json)
            return
        from holdfast.interop.safetensors_export import export_safetensors

        assert hf is not None
        with _progress(f"exporting step {number}") as show:
            files = export_safetensors(
                directory,
                number,
                hf,
                prefix=prefix,
                dtype=dtype,
                shard_size_bytes=int(of_safetensors["shard_gigabytes"] * 10**9),
                progress=show,
            )
        _report(number, files, as_json)


def _report(step: int, paths: Sequence[Path], as_json: bool) -> None:
    """Print what was written."""
    if as_json:
        output.print_json({"step": step, "paths": [str(path) for path in paths]})
    elif len(paths) == 1:
        output.note(f"step {step}: wrote {paths[0]}")
    else:
        written = size_text(sum(path.stat().st_size for path in paths))
        files = counted(len(paths), "file")
        output.note(f"step {step}: wrote {written} in {files} to {paths[0].parent}")


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds bytes to those shown; nothing is shown without a terminal."""
    done = 0
    with output.stderr().status(what) as status:

        def show(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            status.update(f"{what}: {size_text(done)}")

        yield show


def _step_of(run: Run, step: int | None) -> int:
    newest = run.latest_step() if step is None else step
    if newest is None:
        raise StepNotFoundError(f"export {run.directory}: it has no checkpoints yet")
    return newest


def _use_host_memory() -> None:
    """Keep JAX off accelerators, which another program may be using."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


@click.command("import")
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@ends_at_interrupt()
def import_files(source: Path, directory: str, as_json: bool) -> None:
    """Make a run in DIR of what Orbax or PyTorch has saved at SOURCE.

    SOURCE is the directory of an Orbax `CheckpointManager`, of which each step is imported, or one
    of its checkpoints. The same command continues an import that was interrupted: steps that DIR
    has are skipped. Items, metrics and metadata come along, so programs can go on with
    `holdfast.interop.orbax` on DIR.

    Or SOURCE is a file of `torch.save`, of which nothing is executed, or a folder of
    `torch.distributed.checkpoint`, which may hold pickled objects: import those that you trust.
    Then DIR must be new, and has one checkpoint.
    """
    if not source.exists():
        raise InvalidArgumentError(f"import {source}: expected a file or a folder, found nothing")
    if source.is_dir() and not (source / DCP_METADATA).exists():
        _import_orbax(source, directory, as_json)
        return
    from holdfast.interop.torch_files import import_torch

    with _progress(f"importing {source}") as show:
        import_torch(source, Path(directory), show)
    if as_json:
        output.print_json({"run": directory})
    else:
        output.note(f"wrote {directory}")


def _hide_late_errors() -> None:
    """Hide what Orbax's pending reads print after one of them has failed, whose error is raised."""
    before = sys.unraisablehook

    def show(unraisable: sys.UnraisableHookArgs) -> None:
        is_late = str(unraisable.exc_value) == "Event loop is closed"
        if not is_late and not inspect.iscoroutine(unraisable.object):
            before(unraisable)

    sys.unraisablehook = show
    logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


def _import_orbax(source: Path, directory: str, as_json: bool) -> None:
    _use_host_memory()
    _hide_late_errors()
    from holdfast.interop.orbax.orbax_import import import_orbax

    imported: list[int] = []
    skipped: list[int] = []
    with output.stderr().status(f"importing {source}") as status:

        def show(step: int, is_new: bool) -> None:
            (imported if is_new else skipped).append(step)
            output.note(f"step {step}: " + ("imported" if is_new else "skipped, imported before"))
            status.update(f"importing {source}: {counted(len(imported), 'step')}")

        import_orbax(source, directory, show)
    if as_json:
        output.print_json({"run": directory, "imported": imported, "skipped": skipped})
        return
    also = f", skipped {len(skipped)}" if skipped else ""
    output.note(f"wrote {directory}: imported {counted(len(imported), 'step')}{also}")
