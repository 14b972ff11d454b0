"""Print the report as tables for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from holdfast.demo.failures import DemoFailureKind
from holdfast.demo.report import DemoReport, FailureReport, Identity


def print_report(report: DemoReport, console: Console) -> None:
    """Print the failures, then the figures of the run."""
    failures = _table("Failures")
    failures.caption = "time to next step: from the restart; for an agent, from the signal"
    if report.hosts > 1:
        failures.caption += "\nsource of the state: of all hosts together"
    failures.add_column("failure", no_wrap=True)
    for title in ("after\nstep", "steps\nlost", "time to\nnext step", "thereof\nrestore"):
        failures.add_column(title, justify="right", no_wrap=True)
    failures.add_column("source of\nthe state")
    for failure in report.failures:
        failures.add_row(*_failure_cells(failure))
    console.print(failures)
    for failure in report.failures:
        for skipped in failure.skipped:
            console.print(f"skipped: {skipped}", markup=False, highlight=False)

    console.print()
    figures = _table("The interrupted run", show_header=False)
    for name, value in _figures(report):
        figures.add_row(name, value)
    console.print(figures)


def verdict(identity: Identity) -> str:
    """Return the last line of the demo."""
    parts = {
        "parameters": identity.params,
        "optimizer state": identity.opt_state,
        "RNG": identity.rng,
        "order of batches": identity.batches,
        "losses": identity.equal_losses == identity.steps,
    }
    return "bit-identical: " + ", ".join(
        f"{name} {'yes' if same else 'NO'}" for name, same in parts.items()
    )


def describe_sources(sources: dict[str, int] | None) -> str:
    """Return the sources of a state with their sizes, the largest first."""
    if not sources:
        return "nowhere"
    return " + ".join(
        f"{_TIER_NAMES.get(tier, tier)} {size_bytes / 1e6:.1f} MB"
        for tier, size_bytes in sorted(sources.items(), key=lambda item: -item[1])
    )


_TIER_NAMES = {"ram": "RAM", "peer": "peers", "durable": "disk", "remote": "remote"}


def _table(title: str, *, show_header: bool = True) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
        show_header=show_header,
    )


def _failure_cells(failure: FailureReport) -> tuple[str, ...]:
    survived = failure.kind is DemoFailureKind.KILL_AGENT
    sources = failure.sources
    if failure.kind is DemoFailureKind.LOSE_HOST and sources is not None:
        # Shown even if nothing was read from disk, which is what this failure demonstrates.
        sources = {"durable": 0, **sources}
    return (
        f"{failure.host} lost" if failure.kind is DemoFailureKind.LOSE_HOST else failure.kind.value,
        str(failure.last_step),
        str(failure.steps_lost),
        _secs(failure.recovery_secs),
        _secs(failure.restore_secs),
        "the trainer continued" if survived else describe_sources(sources).replace(" + ", "\n+ "),
    )


def _figures(report: DemoReport) -> list[tuple[str, str]]:
    share = report.save_calls_secs / report.training_secs
    same = report.identity
    return [
        *([("hosts", str(report.hosts))] if report.hosts > 1 else []),
        ("loss", f"{report.first_loss:.2f} to {report.last_loss:.2f} nats per byte"),
        ("checkpoints committed", str(report.checkpoints)),
        (
            "interval between checkpoints",
            f"P50 {_secs(report.interval_secs_p50)}, P95 {_secs(report.interval_secs_p95)}",
        ),
        (
            "training time in save() calls",
            f"{report.save_calls_secs:.2f} s of {report.training_secs:.1f} s, {share:.2%}",
        ),
        ("", "(work in the background is not counted)"),
        ("losses equal to the other run's", f"{same.equal_losses} of {same.steps} steps"),
    ]


def _secs(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"
