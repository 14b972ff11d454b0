from pathlib import Path

import pytest
from msgspec import structs

from holdfast.clock import SystemClock
from holdfast.format.names import ATTEMPTS, RUN_FILE
from holdfast.format.records import RunRecord
from holdfast.format.sealed import seal
from holdfast.host.wire.protocol import AgentStatus
from holdfast.observe.events.reader import read_events
from holdfast.observe.events.schema import CommandEnded
from holdfast.store.disk import DiskStore
from holdfast.supervise.agents import Agents
from holdfast.trainer.process.end_report import TrainerEnd, TrainerOpened
from tests.supervise.test_attempt_watch import status


def opened(run: Path, run_id: str, time_secs: float) -> TrainerOpened:
    return TrainerOpened(
        run=str(run), run_id=run_id, host="h", attempt=1, rank=0, pid=1, time_secs=time_secs
    )


def end(run: Path, *, is_gone: bool) -> TrainerEnd:
    return TrainerEnd(
        run=str(run),
        rank=0,
        pid=1,
        last_step=1,
        is_preempted=False,
        is_finished=False,
        is_gone=is_gone,
    )


def put_record(run: Path, run_id: str) -> None:
    clock = SystemClock()
    DiskStore(run, clock).put(RUN_FILE, seal(RunRecord(run_id=run_id, time=clock.now())))


def test_another_run_at_the_same_place_is_shown_once(tmp_path: Path) -> None:
    lines: list[str] = []
    agents = Agents(SystemClock(), lines.append)
    first, second = opened(tmp_path, "first", 1.0), opened(tmp_path, "second", 2.0)
    for reports in ([first], [first], [second], [second], [second, first]):
        agents.note_agents(reports)
    (line,) = lines
    assert f"{tmp_path} is another one than before: second, where first was" in line


def test_runs_at_two_places_are_no_replacement(tmp_path: Path) -> None:
    lines: list[str] = []
    agents = Agents(SystemClock(), lines.append)
    agents.note_agents([opened(tmp_path / "a", "first", 1.0), opened(tmp_path / "b", "other", 2.0)])
    agents.note_agents([opened(tmp_path / "a", "first", 3.0)])
    assert lines == []


def test_a_run_that_went_while_it_was_open_is_gone(tmp_path: Path) -> None:
    def gone(*, closes: int, is_gone: bool = False) -> str:
        agents = Agents(SystemClock(), lambda line: None)
        reports = [opened(tmp_path / "run", "first", 1.0), opened(tmp_path / "run", "first", 2.0)]
        agents.note_agents(reports)
        ends = [end(tmp_path / "run", is_gone=is_gone)] * closes
        agents.note_end(reports, ends)
        # A start that fails before it opens the run.
        agents.note_end([], [])
        return agents.gone_run()

    assert f"the run at {tmp_path / 'run'} is not there any more" in gone(closes=0)
    # It was opened twice, and closed once before its process was killed.
    assert gone(closes=1)
    # A run of a program's own that it closed before it removed it.
    assert not gone(closes=2)
    assert gone(closes=2, is_gone=True)
    (tmp_path / "run").mkdir()
    assert gone(closes=0)
    put_record(tmp_path / "run", "other")
    assert gone(closes=0).endswith("is another one than before (other, where first was)")
    put_record(tmp_path / "run", "first")
    assert not gone(closes=0)
    # It has lost its record alone.
    (tmp_path / "run" / RUN_FILE).unlink()
    (tmp_path / "run" / ATTEMPTS).mkdir()
    (tmp_path / "run" / ATTEMPTS / "000000001.json").touch()
    assert not gone(closes=0)


def test_a_run_that_is_back_while_its_agent_is_asked_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def back(run_id: str, host: str) -> list[AgentStatus]:
        run.mkdir()
        put_record(run, "first")
        return [structs.replace(status(), run=str(run), run_id=run_id)]

    monkeypatch.setattr("holdfast.supervise.agents._statuses_of", lambda *_: [])
    agents = Agents(SystemClock(), lambda line: None)
    report = opened(run, "first", 1.0)
    agents.note_agents([report])
    agents.note_end([report], [])
    monkeypatch.setattr("holdfast.supervise.agents._statuses_of", back)
    assert agents.gone_run() == ""


def test_an_end_is_in_the_events_of_the_runs_that_had_it(tmp_path: Path) -> None:
    lines: list[str] = []
    agents = Agents(SystemClock(), lines.append)
    runs = [tmp_path / name for name in ("before", "last", "gone")]
    for run in runs[:2]:
        run.mkdir()
        (run / RUN_FILE).write_bytes(b"")
    starts = [opened(run, run.name, 1.0) for run in runs]
    for reports in (starts[:1], starts[1:], []):
        agents.note_agents(reports)
        agents.note_end(reports, [])
    agents.report_event(CommandEnded(cause="killed", code=137, reason="", restarts=0))
    assert [len(read_events(run, CommandEnded)) for run in runs] == [0, 1, 0]
    assert lines == []


def test_a_run_in_a_bucket_is_never_found_gone(tmp_path: Path) -> None:
    agents = Agents(SystemClock(), lambda line: None)
    report = structs.replace(opened(tmp_path, "first", 1.0), run="s3://bucket/run")
    agents.note_agents([report])
    agents.note_end([report], [])
    assert not agents.gone_run()
