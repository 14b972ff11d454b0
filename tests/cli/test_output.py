"""Tables come out the same, however they are laid out."""

from __future__ import annotations

import random

import pytest
from rich.text import Text

from holdfast.cli.output import Column, _rendered_lines, plain_lines, print_table

COLUMNS = [
    Column("step", "right"),
    Column("state"),
    Column("größe", "right"),
    Column("", folds=True),
]


def random_cells(seed: int) -> list[list[Text]]:
    rng = random.Random(seed)
    words = ["", "7", "committed", "in RAM (abandoned)", "–", "日本語", "a=0.5 b=-1e-05", "é" * 30]
    return [[Text(rng.choice(words)) for _ in COLUMNS] for _ in range(rng.randrange(6))]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("titles", [True, False])
def test_a_plain_table_is_the_one_that_is_rendered(
    seed: int, titles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    columns = COLUMNS if titles else [Column("", c.justify, c.folds) for c in COLUMNS]
    cells = random_cells(seed)
    plain = [line.rstrip() for line in plain_lines(columns, cells)]
    assert plain == [line.rstrip() for line in _rendered_lines(columns, cells, 0)]


@pytest.mark.parametrize("columns", ["20", "40", "60"])
def test_a_narrow_terminal_loses_no_number(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    titles = [Column("tier"), Column("interval P50", "right"), Column("written", "right")]
    bar = Column("", is_extra=True)
    print_table([*titles, bar], [["other hosts' RAM", "12.5 s", "1,234,567 MB", "█" * 40]])
    out = capsys.readouterr().out
    assert all(part in out for part in ("other hosts' RAM", "12.5 s", "1,234,567 MB"))
    assert "█" not in out
    assert all(len(line) <= int(columns) for line in out.splitlines()) or columns == "20"


def test_a_cell_that_would_break_the_lines_is_laid_out_in_its_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table([Column("a"), Column("b")], [["one\ntwo", "x"]])
    assert capsys.readouterr().out == "a    b\none  x\ntwo\n"
