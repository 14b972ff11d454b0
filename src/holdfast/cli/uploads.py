"""Implement `holdfast uploads`: list the uploads that killed processes have left in a bucket."""

from __future__ import annotations

from datetime import timedelta

import click

from holdfast.cli import output
from holdfast.cli.amounts import Amount
from holdfast.cli.output import counted
from holdfast.clock import SystemClock
from holdfast.store.location import RunLocation
from holdfast.store.unfinished_uploads import UnfinishedUploads

DEFAULT_HOURS = 24.0


@click.command()
@click.argument("url", metavar="URL", type=str)
@click.option("--abort", is_flag=True, help="Abort them, which removes their parts.")
@click.option(
    "--older-than",
    metavar="HOURS",
    type=Amount(min=0),
    default=DEFAULT_HOURS,
    show_default=True,
    help="Only those that were begun before; a younger one may be under way.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def uploads(url: str, abort: bool, older_than: float, yes: bool, as_json: bool) -> None:
    """List the unfinished uploads of the run at URL, whose parts are billed and not visible.

    A live run's own uploads are among them while they are under way, so --abort leaves those of the
    last day alone. This needs the package boto3, and works for s3:// only.
    """
    run_uploads = UnfinishedUploads(RunLocation.parse(url))
    now, least_age = SystemClock().now(), timedelta(hours=older_than)
    leftovers = [upload for upload in run_uploads.list() if now - upload.began >= least_age]
    for upload in leftovers if not as_json else ():
        hours = (now - upload.began).total_seconds() / 3600
        output.print_line(f"{upload.key}: begun {hours:.1f} hours ago, upload {upload.id}")
    if abort and leftovers:
        question = f"Abort {counted(len(leftovers), 'upload')}?"
        output.confirm(question, is_answered=yes, to_look="no --abort")
        for upload in leftovers:
            run_uploads.abort_upload(upload)
    if as_json:
        rows = [{"key": o.key, "id": o.id, "began": o.began.isoformat()} for o in leftovers]
        output.print_json({"uploads": rows, "aborted": abort})
    elif not leftovers:
        output.print_line(f"no unfinished upload is older than {older_than:g} hours")
    elif abort:
        output.print_line(f"aborted {counted(len(leftovers), 'upload')}")
