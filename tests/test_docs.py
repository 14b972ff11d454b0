"""The documentation's examples do what they say, as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import host

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = re.compile(r"<!-- run -->\n```python\n(.*?)```", re.DOTALL)
ANY = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(MARKED.findall(page.read_text()))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_runs_as_printed(code: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code)
    with host() as made:
        done = subprocess.run(
            [sys.executable, "-W", "error", "example.py"],
            cwd=tmp_path,
            env=made.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "runs").glob("*/checkpoints/*/manifest.json"))


def test_the_first_example_repeats_nothing_when_it_is_run_again(tmp_path: Path) -> None:
    (code,) = MARKED.findall((ROOT / "README.md").read_text())
    (tmp_path / "example.py").write_text(code + "\nprint(start, float(state['w'][0]))\n")
    with host() as made:
        told = []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-W", "error", "example.py"],
                cwd=tmp_path,
                env=made.environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            assert "closing after" not in done.stderr
            told.append(done.stdout.split())
    assert told == [["0", "200.0"], ["200", "200.0"]]


def test_every_example_in_python_is_run() -> None:
    for page in PAGES:
        text = page.read_text()
        assert MARKED.findall(text) == ANY.findall(text), page
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target
