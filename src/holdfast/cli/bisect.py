"""Implement `holdfast bisect`: replay a run, and find what is not reproduced."""

from __future__ import annotations

import click

from holdfast.cli import output
from holdfast.cli.diff import NOT_COMPARABLE, print_differences
from holdfast.cli.prove import RunOptions, judged, print_left_out, run_options
from holdfast.proving.bisection import Bisection, BisectRequest, Outcome
from holdfast.proving.bisection import bisect as bisect_run


@click.command(options_metavar="[OPTIONS]")
@click.argument("run", metavar="RUN")
@click.argument("command", metavar="-- CMD…", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--from", "first", metavar="STEP", type=click.IntRange(min=0), help="Replay from it.")
@click.option("--to", "last", metavar="STEP", type=click.IntRange(min=0), help="Replay up to it.")
@click.option(
    "--every",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Save each step of the replays that is a multiple of N.",
)
@run_options
def bisect(
    run: str,
    command: tuple[str, ...],
    first: int | None,
    last: int | None,
    every: int,
    options: RunOptions,
) -> int:
    """Find the first step of RUN that CMD does not reproduce.

    CMD, the program that has trained RUN, goes on from the oldest checkpoint of RUN (--from) up to
    the newest one (--to), in a folder of its own: RUN is only read. The checkpoints of RUN are
    compared with it. From the last one that is equal it is replayed once more: if both replays
    agree, RUN has gone wrong, by a fault of its machine or because another program or library has
    trained it; if they differ, the program is not deterministic. Name RUN as the program does.

    The exit code is 0 if all is reproduced, 1 if not, 2 if it cannot be judged
    (docs/exactness.md).
    """
    request = BisectRequest(
        directory=run, first=first, last=last, every=every, without=options.without
    )
    result = judged(lambda execution: bisect_run(request, execution), command, options)
    if result is None:
        return NOT_COMPARABLE
    if options.as_json:
        output.print_json(result.document)
    else:
        _print(result)
    return 0 if result.outcome is Outcome.REPRODUCED else 1


def _print(result: Bisection) -> None:
    steps = result.verdict.steps
    match result.outcome:
        case Outcome.REPRODUCED:
            text = f"the checkpoints from step {steps[0]} to {steps[-1]} are the same in a replay"
        case Outcome.NOT_REPRODUCED:
            text = (
                f"step {result.reproduced} is reproduced and step {result.step} is not, by two "
                "replays that agree: what the run has computed or stored between them is wrong, or "
                "another program, library or machine has computed it"
            )
        case Outcome.NOT_DETERMINISTIC:
            text = (
                f"two replays differ at step {result.step}, and agree at {result.reproduced}: the "
                "program is not deterministic"
            )
            if result.is_second_equal:
                text += ". The second replay agrees with the run; the first may have met a fault"
    output.print_line(f"{result.outcome.value}: {text}")
    if result.verdict.first is not None:
        print_differences(result.verdict.first.differences, indent="  ")
    print_left_out(result.verdict)
