"""`docs/events.md` lists the events as the schema defines them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec

from holdfast.observe.events import schema
from holdfast.observe.events.schema import EVENTS, Event, RankPosition, StepTimes, event_name
from holdfast.observe.events.segments import SEGMENT_COUNT_MAX, SEGMENT_SIZE_BYTES

PAGE = Path(__file__).parents[3] / "docs" / "events.md"
OF_ALL = {field.name for field in msgspec.structs.fields(Event)}
OF_CHECKPOINT = {"step", "attempt"}


def meaning(kind: type) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())


def described(kind: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of each member."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        _, _, text = inspect.cleandoc(one.__doc__ or "").partition("Attributes:\n")
        for member in re.findall(r"^    (\w+: .*(?:\n        .*)*)", text, re.MULTILINE):
            name, _, says = " ".join(member.split()).partition(": ")
            found[name] = says.rstrip(".")
    return found


def members(kind: type[msgspec.Struct], without: set[str]) -> str:
    """The members of a class, each with its description."""
    says = described(kind)
    names = [field.name for field in msgspec.structs.fields(kind) if field.name not in without]
    if {*names} >= OF_CHECKPOINT and issubclass(kind, schema.CheckpointEvent):
        names = ["step", "attempt", *(name for name in names if name not in OF_CHECKPOINT)]
    return "; ".join(f"`{name}`" + (f": {says[name]}" if name in says else "") for name in names)


def table() -> list[str]:
    """The lines of the tables."""
    lines = ["| member | meaning |", "| --- | --- |"]
    lines += [f"| `{name}` | {says} |" for name, says in described(Event).items()]
    lines += ["", "| event | meaning | members |", "| --- | --- | --- |"]
    for kind in EVENTS:
        name = f"`{event_name(kind)}`" + (" *" if kind.is_of_saves else "")
        lines.append(f"| {name} | {meaning(kind)} | {members(kind, OF_ALL)} |")
    lines += ["", "| part | meaning | members |", "| --- | --- | --- |"]
    for part, where in ((RankPosition, "`ranks`"), (StepTimes, "`quiet`, `sealing`, `writing`")):
        lines.append(f"| {where} | {meaning(part)} | {members(part, set())} |")
    return lines


def test_the_page_lists_every_event_as_the_schema_defines_it() -> None:
    text = PAGE.read_text()
    wanted = "\n".join(table())
    assert wanted in text, f"docs/events.md lacks this, which is generated:\n{wanted}"


def test_the_page_states_the_bound() -> None:
    series_mib = SEGMENT_SIZE_BYTES * SEGMENT_COUNT_MAX // 2**20
    text = " ".join(PAGE.read_text().split())
    assert f"{SEGMENT_COUNT_MAX} segments of {SEGMENT_SIZE_BYTES // 2**20} MiB" in text
    assert f"{2 * series_mib} MiB per host" in text


def test_every_event_is_in_the_list_and_has_a_name_of_its_own() -> None:
    kinds = [kind for kind in vars(schema).values() if isinstance(kind, type)]
    tagged = {
        kind for kind in kinds if issubclass(kind, Event) and kind.__struct_config__.tag is not None
    }
    named = {kind for kind in tagged if event_name(kind).islower()}
    assert named == set(EVENTS)
    assert len({event_name(kind) for kind in EVENTS}) == len(EVENTS)


def test_each_member_of_an_event_is_described_or_plain() -> None:
    plain = {"pid", "reason", "key", "target_step", "by_attempt", "checkpoints", *OF_CHECKPOINT}
    for kind in EVENTS:
        names = {field.name for field in msgspec.structs.fields(kind)} - OF_ALL - plain
        assert names <= described(kind).keys(), kind


if __name__ == "__main__":
    # Prints the tables for the page.
    print("\n".join(table()))
