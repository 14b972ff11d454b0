"""`holdfast demo`: trains a small model twice, once with failures, and compares the two."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
from rich.console import Console

from holdfast.demo.plan import HOSTS_MAX


@click.command()
@click.option(
    "--directory",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where everything goes: a new or empty folder. Default: a temporary one.",
)
@click.option(
    "--hosts",
    metavar="N",
    type=click.IntRange(min=1, max=HOSTS_MAX),
    default=1,
    show_default=True,
    help="Train over N hosts, which this machine plays; one is lost, and later another.",
)
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(min=1),
    help="Training steps of each of the two runs. Default: 256, over several hosts 64.",
)
@click.option(
    "--seed",
    metavar="N",
    type=int,
    default=0,
    show_default=True,
    help="Chooses the failures, the initial weights and the order of batches.",
)
@click.option("--kill-agent", is_flag=True, help="Kill the host's agent too.")
@click.option(
    "--interval-secs",
    metavar="SECS",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="The least time between two checkpoints.",
)
@click.option(
    "--chart",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Where the picture of the losses goes. Default: losses.png in DIR.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON document.")
def demo(
    directory: Path | None,
    hosts: int,
    steps: int | None,
    seed: int,
    kill_agent: bool,
    interval_secs: float,
    chart: Path | None,
    as_json: bool,
) -> int:
    """Train a small model, interrupt it, and show that nothing was lost.

    One run is killed and preempted on its way, the other one is not; then both are compared bit by
    bit. Over several hosts one of them is lost with its memory, and later another one. Takes a
    minute or two on a CPU. The exit code is 0 if they are identical.
    """
    # Only the demo needs these packages, and only here.
    from holdfast.demo.main import DemoOptions, run_demo

    if directory is None and as_json:
        directory = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    options = DemoOptions(
        directory=directory,
        hosts=hosts,
        steps=steps,
        seed=seed,
        kill_agent=kill_agent,
        interval_secs=interval_secs,
        chart=chart,
    )
    if directory is None or not as_json:
        return run_demo(options)
    code = run_demo(options, console=Console(stderr=True))
    report = directory / "report.json"
    if report.exists():
        print(report.read_text())
    return code
