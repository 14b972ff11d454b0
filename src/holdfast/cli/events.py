"""Implement `holdfast events`: print the history of a run."""

from __future__ import annotations

import sys

import click
import msgspec

from holdfast.cli import output
from holdfast.clock import SystemClock
from holdfast.events.reader import EventReader, Omission
from holdfast.events.schema import EVENTS, CheckpointEvent, Event, event_name
from holdfast.job.run_access import read_only

_NAMES = [event_name(kind) for kind in EVENTS]
_STAMP = {field.name for field in msgspec.structs.fields(Event)}


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
    reader = EventReader(read_only(directory).durable.home)
    for item in reader.follow(SystemClock()) if follow else reader.read():
        if isinstance(item, Omission):
            output.warn(f"left out: {item.where}: {item.reason}")
        elif (not kinds or event_name(item) in kinds) and step in (None, _step(item)):
            sys.stdout.write((_json_line(item) if as_json else line_of(item)) + "\n")
            if follow:
                sys.stdout.flush()


def line_of(event: Event) -> str:
    """Return an event as one readable line."""
    members = {
        name: value
        for name, value in msgspec.structs.asdict(event).items()
        if name not in _STAMP and value not in (None, (), {})
    }
    about = f"attempt {event.run_attempt}"
    if isinstance(event, CheckpointEvent):
        about = f"step {members.pop('step')} of attempt {members.pop('attempt')}"
    says = ", ".join(f"{name} {_text(value)}" for name, value in members.items())
    time = event.time.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    line = f"{time}  {event.host}  {event_name(event)}  {about}" + (f": {says}" if says else "")
    # A name or a reason may hold anything; a line stays a line.
    return "".join(char if char.isprintable() else " " for char in line)


def _step(event: Event) -> int | None:
    return getattr(event, "step", None)


def _json_line(event: Event) -> str:
    return msgspec.json.encode(event).decode()


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
