"""`holdfast events` prints the history of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.run import create_run
from holdfast.observe.events.schema import (
    CheckpointCommitted,
    CheckpointFailed,
    StateRestored,
    TrainerLost,
)
from holdfast.store.disk import DiskStore
from tests.observe.events.written import at, written


@pytest.fixture
def run(tmp_path: Path) -> Path:
    clock = SystemClock()
    create_run(DiskStore(tmp_path, clock), str(tmp_path), "1" * 32, clock.now())
    written(
        tmp_path,
        CheckpointCommitted(time=at(1), step=7, attempt=1, bytes=80, secs=0.25),
        TrainerLost(time=at(3), rank=2, pid=5, last_step=9),
        StateRestored(time=at(4), step=7, attempt=1, rank=2, sources={"ram": 80}, secs=0.5),
    )
    written(
        tmp_path,
        CheckpointFailed(time=at(2), step=8, attempt=1, reason="no\nroom \x1b[31m"),
        host="b",
    )
    return tmp_path


def test_a_run_without_events_prints_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = SystemClock()
    create_run(DiskStore(tmp_path, clock), str(tmp_path), "1" * 32, clock.now())
    assert main(["events", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"{tmp_path}: no events yet\n")


def test_events_are_readable_lines_in_the_order_of_time(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2026-08-01 12:00:01.000  a  committed  step 7 of attempt 1: by save, bytes 80, secs 0.25",
        "2026-08-01 12:00:02.000  b  failed  step 8 of attempt 1: reason no room  [31m",
        "2026-08-01 12:00:03.000  a  trainer_lost  attempt 1: rank 2, pid 5, last_step 9, "
        "blocked_secs 0",
        "2026-08-01 12:00:04.000  a  restored  step 7 of attempt 1: rank 2, "
        'sources {"ram":80}, secs 0.5, by resume',
    ]


def test_events_are_filtered_by_kind_and_step(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", str(run), "--kind", "failed", "--kind", "trainer_lost"]) == 0
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()] == [
        "failed",
        "trainer_lost",
    ]
    assert main(["events", str(run), "--step", "7"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_json_lines_have_every_member(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(run), "--json", "--step", "7"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["event"], first["bytes"], first["run_attempt"]) == ("committed", 80, 1)
    assert (second["sources"], second["skipped"]) == ({"ram": 80}, [])


def test_what_is_left_out_is_a_warning(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "events" / "b-run.000000001.jsonl").open("ab") as file:
        file.write(b'{"event":"minted","version":1}\n')
    assert main(["events", str(run)]) == 0
    found = capsys.readouterr()
    assert len(found.out.splitlines()) == 4
    assert "warning: left out: b-run.000000001.jsonl" in found.err
    assert "unknown event 'minted'" in found.err


def test_a_directory_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")
