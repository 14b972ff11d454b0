"""Implement `holdfast demo`: train a small model twice, once with failures, and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from holdfast.cli.amounts import Amount
from holdfast.demo.learner import FRAMEWORKS
from holdfast.demo.plan import HOSTS_MAX


@click.command()
@click.option(
    "--directory",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="A new or empty folder for all files. Default: a temporary one.",
)
@click.option(
    "--url",
    metavar="URL",
    help="Keep the durable checkpoints in a bucket, below this URL. Default: in DIR.",
)
@click.option(
    "--hosts",
    metavar="N",
    type=click.IntRange(min=1, max=HOSTS_MAX),
    default=1,
    show_default=True,
    help="Train on N hosts, simulated on this machine; one is lost, and later another.",
)
@click.option(
    "--framework",
    type=click.Choice(FRAMEWORKS),
    default=FRAMEWORKS[0],
    show_default=True,
    help="What the model is trained with.",
)
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(min=1),
    help="Training steps of each of the two runs. Default: 256, or 64 with several hosts.",
)
@click.option(
    "--seed",
    metavar="N",
    type=int,
    default=0,
    show_default=True,
    help="Determines the failures, the initial weights and the order of batches.",
)
@click.option("--kill-agent", is_flag=True, help="Kill the host's agent too.")
@click.option(
    "--interval-secs",
    metavar="SECS",
    type=Amount(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="The shortest time between two checkpoints.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
def demo(**options: Any) -> int:
    """Train a small model, interrupt it, and show that nothing was lost.

    One run is killed and preempted several times, the other one is not; then both are compared bit
    by bit. With several hosts, one host is lost with its memory, and later another one. The demo
    takes a minute or two on a CPU. The exit code is 0 if the results are identical.
    """
    # Imported here because the demo's modules would slow down every other command.
    from holdfast.demo.main import run_demo
    from holdfast.demo.plan import DemoOptions

    return run_demo(DemoOptions(**options))
