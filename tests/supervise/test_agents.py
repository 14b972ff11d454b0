from pathlib import Path

from holdfast.clock import SystemClock
from holdfast.supervise.agents import Agents
from holdfast.trainer.process.end_report import TrainerOpened


def opened(run: Path, run_id: str, time_secs: float) -> TrainerOpened:
    return TrainerOpened(
        run=str(run), run_id=run_id, host="h", attempt=1, rank=0, pid=1, time_secs=time_secs
    )


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
