"""Implement `holdfast export` and `holdfast import`: checkpoints as other programs' files."""

from __future__ import annotations

from pathlib import Path

import click

from holdfast.cli import output
from holdfast.cli.output import counted
from holdfast.errors import InvalidArgumentError, StepNotFoundError
from holdfast.manager import Run, open_run
from holdfast.quantities import size_text


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.argument("step", metavar="[STEP]", type=click.IntRange(min=0), required=False)
@click.option("--hf", metavar="DIR", type=click.Path(path_type=Path), help="Write safetensors.")
@click.option("--torch", "file", metavar="FILE", type=click.Path(path_type=Path), help="torch.save")
@click.option("--prefix", default="", help="Only what is below this path, such as 'model'.")
@click.option("--dtype", help="Convert floating-point arrays, such as to 'bfloat16'.")
@click.option(
    "--max-shard-size",
    "shard_gigabytes",
    metavar="GB",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="The size of a file of safetensors.",
)
def export(
    directory: str,
    step: int | None,
    hf: Path | None,
    file: Path | None,
    prefix: str,
    dtype: str | None,
    shard_gigabytes: float,
) -> None:
    """Write a checkpoint of the run in DIR as files of other programs.

    Without STEP it is the newest one. All that is read is checked by its digests. With --hf the
    arrays below --prefix are written as safetensors with an index, as Hugging Face's
    `from_pretrained` reads them. With --torch the whole state is written by `torch.save`.
    """
    if (hf is None) == (file is None):
        raise InvalidArgumentError("export: expected either --hf DIR or --torch FILE")
    if file is not None and (prefix or dtype):
        raise InvalidArgumentError("export: --prefix and --dtype are for --hf")
    with open_run(directory) as run:
        number = _step_of(run, step)
        if file is not None:
            from holdfast.interop.torch_files import export_torch

            export_torch(run, number, file)
            output.note(f"step {number}: wrote {file}")
            return
        from holdfast.interop.safetensors_export import export_safetensors

        assert hf is not None
        written = 0
        with output.stderr().status(f"exporting step {number}") as status:

            def show(size_bytes: int) -> None:
                nonlocal written
                written += size_bytes
                status.update(f"exporting step {number}: {size_text(written)}")

            files = export_safetensors(
                run,
                number,
                hf,
                prefix=prefix,
                dtype=dtype,
                shard_size_bytes=int(shard_gigabytes * 10**9),
                progress=show,
            )
        output.note(
            f"step {number}: wrote {size_text(written)} in {counted(len(files), 'file')} to {hf}"
        )


def _step_of(run: Run, step: int | None) -> int:
    found = run.latest_step() if step is None else step
    if found is None:
        raise StepNotFoundError(f"export {run.directory}: it has no checkpoints yet")
    return found


@click.command("import")
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@click.argument("directory", metavar="DIR", type=click.Path())
def import_files(source: Path, directory: str) -> None:
    """Make a checkpoint in the new directory DIR of what PyTorch has saved at SOURCE.

    SOURCE is a file of `torch.save`, of which nothing is executed, or a folder of
    `torch.distributed.checkpoint`, which may hold pickled objects: import those that you trust.
    """
    from holdfast.interop.torch_files import import_torch

    import_torch(source, Path(directory))
    output.note(f"wrote {directory}")
