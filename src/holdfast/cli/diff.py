"""Implement `holdfast diff`: compare two checkpoints, and list what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from holdfast.cli import output
from holdfast.cli.output import counted, size_text
from holdfast.comparison.contents import Contents, check_bytes
from holdfast.comparison.differences import Comparison, Difference, compare
from holdfast.comparison.places import opened, with_one_step
from holdfast.errors import HoldfastError

SHOWN_MAX = 50
NOT_COMPARABLE = 2


@click.command()
@click.argument("a", metavar="A[@STEP]")
@click.argument("b", metavar="B[@STEP]")
@click.option("--prefix", default="", help="Only what is at or below this path, such as 'model'.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def diff(a: str, b: str, prefix: str, as_json: bool) -> int:
    """Compare two checkpoints, and list what differs.

    A and B are runs; or a file or folder of safetensors, or what PyTorch has saved. Where STEP is
    missing it is the newest one, of two runs the newest that both have. All arrays are read, so
    that one with damaged bytes is an error. Equal means the same bits; how arrays were
    sharded does not matter. Safetensors have arrays alone, under the names of
    `holdfast export --hf` with the same --prefix.

    The exit code is 0 if they are equal, 1 if they differ, and 2 if they cannot be compared.
    """
    try:
        left_place, right_place = with_one_step(a, b)
        with opened(left_place, prefix) as left, opened(right_place, prefix) as right:
            output.note(f"{left.label} is A, {right.label} is B")
            check_bytes(left)
            check_bytes(right)
            comparison = compare(left, right)
    except HoldfastError as error:
        return _not_comparable(type(error).__name__, str(error), as_json)
    if not comparison.has_common:
        reason = (
            f"compare {a} and {b}: expected an array or a value that both have, found "
            f"{_first_name(left)} in A and {_first_name(right)} in B"
        )
        if left.is_file or right.is_file or prefix:
            reason += (
                f", with --prefix {prefix!r}: of a run what is below it is compared, and names in "
                "safetensors are relative to it"
            )
        return _not_comparable("StructureMismatchError", reason, as_json)
    if as_json:
        document = {"equal": comparison.is_equal, **asdict(comparison)}
        output.print_json(document | {"differences": comparison.documents})
    else:
        _print(comparison)
    return 0 if comparison.is_equal else 1


def _first_name(contents: Contents) -> str:
    return next((f"{name!r}" for name in contents.entries), "nothing")


def _not_comparable(kind: str, reason: str, as_json: bool) -> int:
    output.print_error(reason)
    if as_json:
        output.print_json({"error": kind, "message": reason})
    return NOT_COMPARABLE


def _print(comparison: Comparison) -> None:
    print_differences(comparison.differences)
    for reason in comparison.left_out:
        output.note(f"not compared: {reason}")
    arrays, values = (
        counted(comparison.array_count, "array"),
        counted(comparison.value_count, "value"),
    )
    output.print_line(
        f"{'equal' if comparison.is_equal else 'different'}: {arrays} "
        f"({size_text(comparison.array_bytes)}), {values} and "
        f"{counted(comparison.metric_count, 'metric')} compared"
    )


def print_differences(differences: Sequence[Difference], indent: str = "") -> None:
    """Print the first differences of two checkpoints, a line each."""
    for difference in differences[:SHOWN_MAX]:
        output.print_line(f"{indent}{difference.text}")
    more = len(differences) - SHOWN_MAX
    if more > 0:
        output.print_line(f"{indent}and {counted(more, 'difference')} more, which --json lists")
