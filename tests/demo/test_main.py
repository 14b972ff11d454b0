import io
from pathlib import Path

from rich.console import Console

from holdfast.demo.main import _little_room, run_demo
from holdfast.demo.plan import DemoOptions
from holdfast.demo.runner import Display
from tests.store.places import mounted


def _console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=80), text


def test_a_folder_with_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    console, text = _console()
    assert run_demo(DemoOptions(directory=tmp_path), console=console) == 2
    assert "choose another folder" in text.getvalue()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_too_few_steps_end_the_demo_before_anything_is_started(tmp_path: Path) -> None:
    console, text = _console()
    assert run_demo(DemoOptions(directory=tmp_path / "new", steps=3), console=console) == 2
    assert "at least" in text.getvalue()
    assert list((tmp_path / "new").iterdir()) == []


def test_each_eighth_of_a_run_is_a_line() -> None:
    console, text = _console()
    display = Display(console)
    display.begin("a run", 83)
    for step in range(83):
        display.show_step(step, 2.0)
    display.show_line("[told]")
    lines = text.getvalue().splitlines()
    assert lines[0] == "a run: step 10 of 83, loss 2.000"
    assert lines[-2:] == ["a run: step 83 of 83, loss 2.000", "[told]"]
    assert len(lines) == 10


def test_the_reason_of_a_demo_on_a_full_disk_names_its_room(tmp_path: Path) -> None:
    assert _little_room(tmp_path) == ""
    with mounted("tmpfs", tmp_path / "disk", "size=1m") as disk:
        assert f"The disk of {disk} has 1048576 bytes left: free some" in _little_room(disk)
