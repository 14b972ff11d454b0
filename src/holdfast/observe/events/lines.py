"""Word an event as one line of text."""

from __future__ import annotations

import msgspec

from holdfast.observe.events.schema import CheckpointEvent, Event, event_name

_STAMP = {field.name for field in msgspec.structs.fields(Event)}


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


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
