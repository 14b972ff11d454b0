"""The pages of the documentation: examples run as printed, and links lead to what they name."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import holdfast
from holdfast import building, reading
from tests.hosts import finished, host

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "holdfast"
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = re.compile(r"<!-- run -->\n```python\n(.*?)```", re.DOTALL)
COMMANDED = re.compile(r"<!-- run: (holdfast run .*?) -->\n```python\n(.*?)```", re.DOTALL)
ANY = re.compile(r"```python\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
NAME = re.compile(r"`([A-Za-z_][\w.]*)`")
DOTTED = re.compile(r"`([a-z_]+(?:\.\w+)+)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
FILES = {".json", ".jsonl", ".md", ".png", ".py", ".safetensors", ".sock", ".toml"}
NO_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch cannot be had here"
)
EXAMPLES = [
    pytest.param(
        code, id=f"{page.name}-{number}", marks=[NO_TORCH] if "import torch" in code else []
    )
    for page in PAGES
    for number, code in enumerate(MARKED.findall(page.read_text()))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_runs_as_printed(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "example.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with host() as made:
        finished(made.start("-W", "error", "example.py", stem=_stem_for(code)))
    if "CheckpointManager(" in code or "holdfast.save(" in code:
        assert list((tmp_path / "runs").glob("*/checkpoints/manifests/*.json"))


def _stem_for(code: str) -> str:
    """Return the kind of process that has imported the framework of an example."""
    return next((name for name in ("torch", "jax") if f"import {name}" in code), "numpy")


@NO_TORCH
def test_an_example_of_lost_ranks_runs_as_printed(tmp_path: Path) -> None:
    page = ROOT / "docs" / "lost_ranks.md"
    ((command, code),) = COMMANDED.findall(page.read_text())
    (tmp_path / "train.py").write_text(code)
    words = command.split()[1:]
    with host() as made:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", *words, "--", sys.executable, "train.py"],
            cwd=tmp_path,
            env=made.environment | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "runs").glob("*/checkpoints/manifests/*.json"))


def _links(text: str) -> list[tuple[str, str, str]]:
    """Return (text, path, anchor) of each link of a page to a place in this repository."""
    found = []
    for words, target in LINK.findall(BLOCK.sub("", text)):
        path, _, anchor = target.partition("#")
        if ":" not in path:
            found.append((words, path, anchor))
    return found


def _anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in HEADING.findall(BLOCK.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        number, unique = 0, anchor
        while unique in found:
            number += 1
            unique = f"{anchor}-{number}"
        found.add(unique)
    return found


def _bad_links(page: Path, text: str) -> list[str]:
    """Return the links of a page, whose text is `text`, that lead to no file or no heading."""
    bad = []
    for _, path, anchor in _links(text):
        target = page.parent / path if path else page
        if not target.exists():
            bad.append(f"{path}: no such file")
        elif anchor and target.suffix == ".md":
            place = text if target == page else target.read_text()
            if anchor not in _anchors(place):
                bad.append(f"{path}#{anchor}: no such heading")
    return bad


def _names_in(source: str) -> set[str]:
    """Return the names that a module defines or lists: `function`, `Class`, `Class.method`."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            names |= {f"{node.name}.{n.name}" for n in node.body if isinstance(n, functions)}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names |= set(ast.literal_eval(node.value))
    return names


def _missing_names(page: Path, text: str) -> list[str]:
    """Return the names that a page links to a module which does not define them."""
    missing = []
    for words, path, _ in _links(text):
        name = NAME.fullmatch(words)
        if path.endswith(".py") and name and not name[1].endswith(".py"):
            target = page.parent / path
            if target.exists() and name[1] not in _names_in(target.read_text()):
                missing.append(f"{name[1]} in {path}")
    return missing


def _is_in_the_package(dotted: str) -> bool:
    """Return whether `engine.saving.part`, `errors.HoldfastError`, … is a module or a name in one.

    A name that begins with no folder or module of the package counts as another thing's. `manager`
    is the name that pages give to a `CheckpointManager`.
    """
    if dotted.startswith("torch."):
        return True
    parts = dotted.removeprefix("holdfast.").split(".")
    if parts[0] == "manager":
        manager = holdfast.CheckpointManager
        return hasattr(manager, parts[1]) or parts[1] in manager.__annotations__
    if not ((SOURCE / parts[0]).is_dir() or (SOURCE / f"{parts[0]}.py").is_file()):
        return not dotted.startswith("holdfast.") or parts[0] in holdfast.__all__
    place = SOURCE
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place /= f"{parts.pop(0)}.py"
    elif parts and (place / "__init__.py").is_file():
        place /= "__init__.py"
    return not parts or (place.is_file() and ".".join(parts) in _names_in(place.read_text()))


def _wrong_modules(text: str) -> list[str]:
    """Return the dotted names of a page that are not in the package; names of files are none."""
    found = DOTTED.findall(BLOCK.sub("", text))
    return [d for d in found if Path(d).suffix not in FILES and not _is_in_the_package(d)]


STATUS = re.compile(r"\A# \d+\. .+\n\n\*\*Status\.\*\* (In force|Replaced by \[\d{4}\])")
BOUND = re.compile(r"Binds (.+)\.$", re.MULTILINE)


def _unbound(page: Path) -> list[str]:
    """Return the modules that a decision binds and that do not cite it."""
    match = BOUND.search(page.read_text().split("\n\n")[1])
    modules = re.findall(r"`([a-z_.]+)`", match[1]) if match else []
    texts = {name: _source_of(name) for name in modules}
    return [name for name, text in texts.items() if f"decisions/{page.name[:4]}" not in text]


def _source_of(module: str) -> str:
    place = SOURCE / module.replace(".", "/")
    return (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name[:4])
def test_a_decision_has_a_status_and_is_cited_where_it_binds(page: Path) -> None:
    assert STATUS.match(page.read_text()), page
    assert _unbound(page) == []


def test_the_first_example_repeats_nothing_when_it_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = MARKED.findall((ROOT / "README.md").read_text())
    (tmp_path / "example.py").write_text(code + "\nprint(start, float(state['w'][0]))\n")
    monkeypatch.chdir(tmp_path)
    with host() as made:
        printed = []
        for _ in range(2):
            process = made.start("-W", "error", "example.py", stem=_stem_for(code))
            out, said = process.communicate(timeout=300)
            assert process.returncode == 0, said
            assert "closing after" not in said
            printed.append(out.split())
    assert printed == [["0", "200.0"], ["200", "200.0"]]


def test_every_example_in_python_is_run() -> None:
    for page in PAGES:
        text = page.read_text()
        marked = [*MARKED.findall(text), *(code for _, code in COMMANDED.findall(text))]
        assert len(marked) == text.count("```python"), page
        assert sorted(marked) == sorted(ANY.findall(text)), page
    assert len(EXAMPLES) >= 9


def test_the_reference_has_every_public_name() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    names = re.findall(r"^::: ([\w.]+)", text, re.MULTILINE)
    shown = {name.rpartition(".")[2] for name in names}
    assert set(holdfast.__all__) - {"__version__"} <= shown
    integrations = (ROOT / "docs" / "reference" / "integrations.md").read_text()
    for module in (building, reading):
        names = {name for name in module.__all__ if not re.search(rf"\b{name}\b", integrations)}
        assert not names, module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert _bad_links(page, page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_name_that_links_to_a_module_is_defined_there(page: Path) -> None:
    assert _missing_names(page, page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_module_that_a_page_names_is_there(page: Path) -> None:
    assert _wrong_modules(page.read_text()) == []


def test_a_module_that_is_not_there_is_found() -> None:
    gone = ["engine.gone", "holdfast.gone", "manager.gone", "store.slots.Gone", "host.gone.Gone"]
    assert _wrong_modules("".join(f"`{name}` " for name in gone)) == gone
    there = "`engine.saving.part` `manager.save(step)` `holdfast.errors.StorageError` `jax.gone`"
    assert _wrong_modules(there) == []


@pytest.mark.parametrize("link", ["[a](gone.md)", "[a](guide.md#gone)", "[a](#gone)"])
def test_a_bad_link_is_found(link: str) -> None:
    page = ROOT / "docs" / "hosts.md"
    assert _bad_links(page, f"# Here\n{link}") != []
    assert _bad_links(page, "# Here, now\n[a](#here-now) [b](guide.md#errors) [c](guide.md)") == []


def test_a_name_that_a_module_does_not_define_is_found() -> None:
    page = ROOT / "docs" / "contributing.md"
    there = "[`RamTier`](../src/holdfast/trainer/options.py)"
    gone = "[`RamTier.gone`](../src/holdfast/trainer/options.py)"
    assert _missing_names(page, there + gone) == [
        "RamTier.gone in ../src/holdfast/trainer/options.py"
    ]


def test_installing_names_each_variable_and_each_extra_for_users() -> None:
    text = (ROOT / "docs" / "installing.md").read_text()
    source = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    variables = set(re.findall(r'"((?:HOLDFAST|AWS)_[A-Z0-9_]+)"', source))
    # Those are set by the platform, not by users.
    variables = {v for v in variables if not v.startswith(("AWS_CONTAINER_", "AWS_WEB_"))}
    assert {"HOLDFAST_STATE", "HOLDFAST_LOG", "AWS_REGION"} <= variables
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_users = set(extras["optional-dependencies"]) - {"bench", "docs", "dev"}
    assert {name for name in variables | of_users if f"`{name}`" not in text} == set()
