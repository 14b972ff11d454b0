"""Implement `holdfast doctor`: check a host, and a run's storage, before a training."""

from __future__ import annotations

from collections.abc import Iterator

import click
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.clean import unowned_memory
from holdfast.cli.output import counted, size_text
from holdfast.clock import SystemClock
from holdfast.store.location import RunLocation
from holdfast.trainer.checks.check_results import CheckResult, Severity, noted, passed
from holdfast.trainer.checks.host_checks import check_host
from holdfast.trainer.checks.storage_checks import check_storage, newest_size_bytes

IMAGES_IN_RAM = 2
"""The newest checkpoint, and the next one."""
EXIT_CODES = {Severity.PROBLEM: 1, Severity.WARNING: 3}
_STYLES = {
    Severity.OK: "green",
    Severity.NOTE: "cyan",
    Severity.WARNING: "yellow",
    Severity.PROBLEM: "bold red",
}


@click.command()
@click.argument("directory", metavar="[DIR]", type=click.Path(), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(directory: str | None, as_json: bool) -> int:
    """Check this host, and the storage of the run in DIR, before a training.

    DIR is a directory or the URL of a bucket, and may not exist yet. A few objects of its own are
    written there, 64 MiB in all, and removed. The exit code is 0 if nothing is wrong, 3 after a
    warning, and 1 after a problem, with which a training would fail.
    """
    if directory is not None:
        RunLocation.parse(directory)
    results: list[CheckResult] = []
    for result in _results(directory):
        results.append(result)
        if not as_json:
            _print(result)
    counts = {severity: sum(r.severity is severity for r in results) for severity in Severity}
    if as_json:
        output.print_json(
            {
                "checks": [
                    {
                        "severity": result.severity.value,
                        "subject": result.subject,
                        "found": result.found,
                        "advice": result.advice,
                    }
                    for result in results
                ],
                "problems": counts[Severity.PROBLEM],
                "warnings": counts[Severity.WARNING],
            }
        )
    else:
        problems = counted(counts[Severity.PROBLEM], "problem")
        warnings = counted(counts[Severity.WARNING], "warning")
        output.print_line(f"{counted(len(results), 'check')}: {problems}, {warnings}")
    return next((code for severity, code in EXIT_CODES.items() if counts[severity]), 0)


def _results(directory: str | None) -> Iterator[CheckResult]:
    newest_bytes = newest_size_bytes(directory) if directory is not None else None
    yield from check_host(None if newest_bytes is None else IMAGES_IN_RAM * newest_bytes)
    left = [*unowned_memory()]
    if left:
        size = size_text(sum(leftover.size_bytes for leftover in left))
        yield noted(
            "memory of earlier runs",
            f"{size} in {counted(len(left), 'folder')} that no live run uses",
            "`holdfast clean` removes what is not a checkpoint's only copy",
        )
    else:
        yield passed("memory of earlier runs", "none")
    if directory is not None:
        yield from check_storage(directory, SystemClock())


def _print(result: CheckResult) -> None:
    line = Text(f"{result.severity.value:8}", _STYLES[result.severity])
    line.append(f" {result.subject}: {result.found}", "default")
    output.print_line(line)
    if result.advice:
        output.print_line(Text(f"{'':9}→ {result.advice}", "dim"))
