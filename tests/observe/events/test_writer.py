"""Events are written in full, within their bound, and never at the cost of the agent."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.observe.events import writer as writing
from holdfast.observe.events.reader import EventReader, Omission, read_events
from holdfast.observe.events.schema import (
    AgentStarted,
    CheckpointSealed,
    Event,
    EventsLost,
    FirstStep,
    TrainerLost,
)
from holdfast.observe.events.writer import EventWriter
from holdfast.store.run_directory import RunDirectory
from tests.hosts import wait_until
from tests.observe.events.written import at, written
from tests.trust.in_process import StepClock


def sealed(step: int) -> CheckpointSealed:
    return CheckpointSealed(step=step, attempt=1, tier="ram")


def sizes(run: Path, series: str) -> list[int]:
    return [path.stat().st_size for path in sorted(run.glob(f"events/a-{series}.*.jsonl"))]


def test_an_event_is_stamped_with_time_uptime_host_attempt_and_version(tmp_path: Path) -> None:
    written(tmp_path, AgentStarted(pid=7), host="h", attempt=3)
    (found,) = read_events(tmp_path, AgentStarted)
    stamp = found.version, found.time, found.uptime_secs, found.host, found.run_attempt
    assert (*stamp, found.pid) == (1, at(1000), 1000.0, "h", 3, 7)


def test_an_event_that_has_a_time_keeps_it(tmp_path: Path) -> None:
    written(tmp_path, FirstStep(time=at(3), rank=0, step=8))
    assert read_events(tmp_path, FirstStep)[0].time == at(3)


def test_saves_never_displace_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SEGMENT_SIZE_BYTES", 1000)
    written(tmp_path, TrainerLost(rank=0, pid=1), *map(sealed, range(300)))
    assert len(read_events(tmp_path, TrainerLost)) == 1
    assert min(event.step for event in read_events(tmp_path, CheckpointSealed)) > 0


def test_the_size_of_each_series_is_bounded_and_the_oldest_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SEGMENT_SIZE_BYTES", 1000)
    monkeypatch.setattr(writing, "SEGMENT_COUNT_MAX", 3)
    for first in range(0, 300, 30):
        written(tmp_path, *map(sealed, range(first, first + 30)))
        assert len(sizes(tmp_path, "saves")) <= 3
        assert max(sizes(tmp_path, "saves")) < 1000 + 300
    steps = [event.step for event in read_events(tmp_path, CheckpointSealed)]
    assert steps == list(range(steps[0], 300))
    assert len(steps) > 10


def test_a_line_that_a_crash_cut_off_spoils_no_other(tmp_path: Path) -> None:
    written(tmp_path, sealed(1), sealed(2))
    (path,) = tmp_path.glob("events/a-saves.*.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    written(tmp_path, sealed(3))
    items = list(EventReader(tmp_path).read())
    assert [item.step for item in items if isinstance(item, CheckpointSealed)] == [1, 3]
    (left_out,) = (item for item in items if isinstance(item, Omission))
    assert "no event" in left_out.reason


def test_lost_events_are_counted_once_storage_works_again(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    folder.write_bytes(b"in the way")
    writer = EventWriter(RunDirectory(tmp_path), "a", StepClock())
    for step in range(5):
        writer.write(sealed(step))
    wait_until(lambda: writer._lost_count == 5, 10)
    folder.unlink()
    writer.write(AgentStarted(pid=1))
    writer.close()
    (lost,) = read_events(tmp_path, EventsLost)
    assert lost.count == 5
    assert "exists" in lost.reason
    assert len(read_events(tmp_path, Event)) == 2


def test_a_disk_that_hangs_holds_nobody_up_and_the_queue_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "QUEUE_LINES_MAX", 10)
    monkeypatch.setattr(writing, "CLOSE_SECS", 0.05)
    hanging, entered = threading.Event(), threading.Event()

    class HangingDirectory(RunDirectory):
        def current_folder(self) -> Path:
            entered.set()
            hanging.wait(240)
            return super().current_folder()

    writer = EventWriter(HangingDirectory(tmp_path), "a", StepClock())
    writer.write(sealed(0))
    assert entered.wait(240)
    for step in range(1, 50):
        writer.write(sealed(step))
    assert len(writer._lines) == 10
    writer.close()
    hanging.set()
    assert writer._thread is not None
    writer._thread.join(10)
    assert len(read_events(tmp_path, CheckpointSealed)) == 11
    assert [lost.count for lost in read_events(tmp_path, EventsLost)] == [39]
