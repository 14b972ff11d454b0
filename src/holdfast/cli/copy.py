"""Implement `holdfast copy`: copy a run or some of its checkpoints to another place."""

from __future__ import annotations

import click

from holdfast.cli import output
from holdfast.cli.interruption import ends_at_interrupt
from holdfast.cli.output import counted
from holdfast.quantities import size_text
from holdfast.trainer.run_copies import copy_run

UPLOADS_SECS = 1.0
"""How long uploads, which notice no Ctrl-C, may go on after it. What is cut off is not visible."""


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.argument("target", metavar="TARGET", type=click.Path())
@click.argument("steps", metavar="[STEP]...", type=click.IntRange(min=0), nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@ends_at_interrupt(UPLOADS_SECS)
def copy(directory: str, target: str, steps: tuple[int, ...], as_json: bool) -> None:
    """Copy the durable checkpoints of the run in DIR to TARGET, or only those of the STEPs.

    DIR and TARGET are directories or URLs of buckets. Every digest is checked. The same command
    continues an interrupted copy. TARGET is opened and trained as a run of its own. Checkpoints of
    abandoned branches, events and logs are not copied. What DIR has damaged, and a STEP that
    it lacks, is copied from its remote tier.
    """
    size_bytes = 0
    with output.stderr().status(f"copying to {target}") as status:

        def show(step: int, part_size_bytes: int) -> None:
            nonlocal size_bytes
            size_bytes += part_size_bytes
            status.update(f"copying step {step} to {target}: {size_text(size_bytes)}")

        done = copy_run(directory, target, steps, show)
    if done.unread_remote is not None:
        output.note(
            f"steps that the run's remote tier {done.unread_remote} alone has were not copied; "
            "give them as STEPs (`holdfast ls` shows them)"
        )
    if as_json:
        output.print_json(
            {
                "copied": done.copied,
                "present": done.present,
                "deleted": done.deleted,
                "written_bytes": size_bytes,
            }
        )
        return
    parts = [f"copied {counted(len(done.copied), 'checkpoint')}, {size_text(size_bytes)}"]
    if done.present:
        parts.append(f"{len(done.present):,} were there")
    if done.deleted:
        parts.append(f"{len(done.deleted):,} were deleted meanwhile")
    output.note(f"{target}: {'; '.join(parts)}")
