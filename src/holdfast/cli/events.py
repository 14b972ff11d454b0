"""Implement `holdfast events`: print the history of a run."""

from __future__ import annotations

import sys

import click
import msgspec

from holdfast.cli import output
from holdfast.clock import SystemClock
from holdfast.observe.events.reader import Omission, line_of
from holdfast.observe.events.schema import EVENTS, Event, event_name
from holdfast.trainer.opening.run_access import events_of, read_only

_NAMES = [event_name(kind) for kind in EVENTS]


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--follow", is_flag=True, help="Continue with each new event, until interrupted.")
@click.option(
    "--kind",
    "kinds",
    metavar="NAME",
    type=click.Choice(_NAMES),
    multiple=True,
    help="Only events of this name, as in docs/events.md. May be repeated.",
)
@click.option("--step", metavar="N", type=click.IntRange(min=0), help="Only events of this step.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def events(
    directory: str, follow: bool, kinds: tuple[str, ...], step: int | None, as_json: bool
) -> None:
    """Print the events of the run in DIR, of all hosts and attempts, in the order of time.

    What cannot be read is reported on standard error.
    """
    reader = events_of(read_only(directory))
    has_any = False
    for item in reader.follow(SystemClock()) if follow else reader.read():
        has_any = True
        if isinstance(item, Omission):
            output.warn(f"left out: {item.where}: {item.reason}")
        elif (not kinds or event_name(item) in kinds) and step in (None, _step(item)):
            sys.stdout.write((_json_line(item) if as_json else line_of(item)) + "\n")
            if follow:
                sys.stdout.flush()

    if not has_any:
        output.note(f"{directory}: no events yet")


def _step(event: Event) -> int | None:
    return getattr(event, "step", None)


def _json_line(event: Event) -> str:
    return msgspec.json.encode(event).decode()
