"""The reader merges what it knows, and says what it left out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.observe.events import writer as writing
from holdfast.observe.events.reader import EventReader, Omission, decode_event, read_events
from holdfast.observe.events.schema import (
    AgentStarted,
    CheckpointCommitted,
    CheckpointSealed,
    Event,
    StateRead,
    StateRestored,
)
from tests.observe.events.written import at, written
from tests.trust.in_process import StepClock


def sealed(step: int, secs: float = 0.0) -> CheckpointSealed:
    return CheckpointSealed(time=at(secs), step=step, attempt=1, tier="ram")


def omissions(run: Path) -> list[str]:
    found = EventReader(run).read()
    return [f"{one.where}: {one.reason}" for one in found if isinstance(one, Omission)]


def test_hosts_series_and_attempts_are_merged_by_time(tmp_path: Path) -> None:
    written(tmp_path, sealed(1, 1), sealed(4, 4), host="a")
    written(tmp_path, sealed(2, 2), AgentStarted(time=at(5), pid=1), host="b-saves", attempt=2)
    written(tmp_path, CheckpointCommitted(time=at(3), step=3, attempt=1), host="c", attempt=2)
    found = read_events(tmp_path, Event)
    assert [event.time for event in found] == list(map(at, range(1, 6)))
    assert [event.host for event in found] == ["a", "b-saves", "c", "a", "b-saves"]


def test_a_clock_that_is_set_back_keeps_the_order_of_writing(tmp_path: Path) -> None:
    written(tmp_path, sealed(1, 100), sealed(2, 50), sealed(3, 101), host="a")
    written(tmp_path, sealed(9, 60), host="b")
    assert [event.step for event in read_events(tmp_path, CheckpointSealed)] == [9, 1, 2, 3]


def test_kinds_are_chosen_by_class(tmp_path: Path) -> None:
    read = StateRead(step=1, attempt=1, rank=0, sources={"ram": 8}, secs=0.5)
    restored = StateRestored(
        step=2, attempt=1, rank=0, sources={}, secs=1.5, skipped=((3, 1, "bad"),)
    )
    written(tmp_path, read, restored)
    assert [event.sources for event in read_events(tmp_path, StateRead)] == [{"ram": 8}]
    assert [event.skipped for event in read_events(tmp_path, StateRestored)] == [((3, 1, "bad"),)]


def test_a_run_without_events_has_none(tmp_path: Path) -> None:
    assert list(EventReader(tmp_path).read()) == []
    assert list(EventReader(tmp_path / "nowhere").read()) == []


LINE = msgspec.json.encode(sealed(5))
LEFT_OUT: dict[str, tuple[bytes, str]] = {
    "a line cut off": (LINE[:-3], "the line is cut off"),
    "no json": (b"nonsense\n", "no event: "),
    "not an object": (b"[1, 2]\n", "no event: "),
    "no name": (b'{"version":1}\n', "no event: "),
    "an unknown event": (LINE.replace(b"sealed", b"minted") + b"\n", "unknown event 'minted'"),
    "a later version": (LINE.replace(b'n":1', b'n":2') + b"\n", "version 2 of the schema"),
    "a later version of another event": (
        b'{"event":"minted","version":7}\n',
        "version 7 of the schema",
    ),
    "a wrong type": (LINE.replace(b'"step":5', b'"step":"5"') + b"\n", "sealed: Expected `int`"),
    "a step out of bounds": (LINE.replace(b'"step":5', b'"step":-5') + b"\n", "sealed: Expected"),
    "a time without a zone": (LINE.replace(b"00Z", b"00") + b"\n", "sealed: Expected `datetime`"),
    "brackets without end": (b"[" * 100_000 + b"\n", "no event: "),
    "no text": (LINE.replace(b"ram", b"r\xff\xffm") + b"\n", "sealed: "),
    "bytes of nothing": (b"\0" * 3000 + b"\n", "no event: "),
    "a line without end": (b"x" * (3 << 20) + b"\n", ""),
}


@pytest.mark.parametrize(("line", "reason"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_cannot_be_read_is_left_out_with_its_reason(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    written(tmp_path, sealed(1), sealed(2))
    (path,) = tmp_path.glob("events/*-saves.*")
    before = path.read_bytes()
    path.write_bytes(before + line)
    written(tmp_path, sealed(3), host="b")
    assert [event.step for event in read_events(tmp_path, CheckpointSealed)] == [1, 2, 3]
    found = omissions(tmp_path)
    assert found[0].startswith(f"{path.name}, byte {len(before)}: {reason}")
    assert max(map(len, found)) < 300


def test_members_that_a_later_code_adds_are_ignored() -> None:
    found = decode_event(LINE[:-1] + b',"color":"red"}')
    assert isinstance(found, CheckpointSealed)


def test_removed_segments_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SEGMENT_SIZE_BYTES", 300)
    monkeypatch.setattr(writing, "SEGMENT_COUNT_MAX", 4)
    written(tmp_path, *map(sealed, range(20)))
    first, second, *_ = sorted(path.name for path in tmp_path.glob("events/*-saves.*"))
    assert omissions(tmp_path) == [
        f"{first}: segments 1 to {int(first[8:17]) - 1} were removed before it"
    ]
    (tmp_path / "events" / second).unlink()
    assert len(omissions(tmp_path)) == 2


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [_link, _pipe, _folder])
def test_what_is_no_plain_file_is_not_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    written(tmp_path, sealed(1), host="b")
    make(tmp_path / "events" / "a-saves.000000001.jsonl")
    assert [event.step for event in read_events(tmp_path, CheckpointSealed)] == [1]
    assert "cannot be read" in omissions(tmp_path)[0]


def test_a_folder_of_events_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    written(tmp_path / "other", sealed(1))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events").symlink_to(tmp_path / "other" / "events")
    assert read_events(tmp_path / "run", Event) == []
    assert len(omissions(tmp_path / "run")) == 1


def test_each_read_yields_what_is_new_also_in_the_next_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SEGMENT_SIZE_BYTES", 300)
    reader = EventReader(tmp_path)
    for first in range(0, 30, 3):
        written(tmp_path, *map(sealed, range(first, first + 3)))
        found = [item.step for item in reader.read() if isinstance(item, CheckpointSealed)]
        assert found == [first, first + 1, first + 2]


def test_a_line_that_is_being_written_is_yielded_once_it_is_whole(tmp_path: Path) -> None:
    written(tmp_path, sealed(1))
    (path,) = tmp_path.glob("events/*-saves.*")
    reader = EventReader(tmp_path)
    assert len(list(reader.read(is_live=True))) == 1
    line = msgspec.json.encode(sealed(2)) + b"\n"
    for part in (line[:30], line[30:]):
        assert list(reader.read(is_live=True)) == []
        with path.open("ab") as file:
            file.write(part)
    assert [item.step for item in reader.read() if isinstance(item, CheckpointSealed)] == [2]


def test_following_yields_new_events_and_each_problem_once(tmp_path: Path) -> None:
    written(tmp_path, sealed(1))
    (tmp_path / "events" / "b-run.000000001.jsonl").mkdir()

    class WritingClock(StepClock):
        def sleep(self, secs: float) -> None:
            super().sleep(secs)
            written(tmp_path, sealed(len(seen) + 1))

    seen: list[Event | Omission] = []
    clock = WritingClock()
    for item in EventReader(tmp_path).follow(clock, lambda: len(seen) >= 5):
        seen.append(item)
    assert [item.step for item in seen if isinstance(item, CheckpointSealed)][:3] == [1, 3, 4]
    assert sum(isinstance(item, Omission) for item in seen) == 1
