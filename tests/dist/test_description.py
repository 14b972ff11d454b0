"""The description of the distribution is README.md without links that need the repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("setup_of_holdfast", ROOT / "setup.py")
assert SPEC is not None
assert SPEC.loader is not None
setup = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(setup)


@pytest.mark.parametrize(
    ("readme", "description"),
    [
        ("see [docs/a.md](docs/a.md).", "see docs/a.md."),
        ("the [first page](docs/index.md#top) and [b](#b)", "the first page and b"),
        ("![a picture](docs/a.svg)", "*a picture*"),
        ("[JAX](https://jax.dev) and [a](a.md)", "[JAX](https://jax.dev) and a"),
        ("f([a, b])\n(c)", "f([a, b])\n(c)"),
    ],
)
def test_links_to_files_become_their_text(readme: str, description: str) -> None:
    assert setup.description(readme) == description


def test_no_word_of_readme_is_lost() -> None:
    readme = (ROOT / "README.md").read_text()
    text = setup.description(readme)
    assert "](docs/" not in text
    assert text.count("\n") == readme.count("\n")
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert (f"docs/{page.name}" in readme) == (f"docs/{page.name}" in text), page
