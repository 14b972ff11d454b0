"""Hooks of the site: pages for what lies outside of `docs`, and the list of decisions.

The pages link to files of the repository, so that they can be read there. On the site, a linked
source file is a page of its own, and CHANGELOG.md and SECURITY.md are. Decisions are listed without
naming each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
SOURCE_LINK = re.compile(r"\]\((?:\.\./)+src/([\w/]+)\.py\)")
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
ROOT_LINK = re.compile(rf"\]\((?:\.\./)*({'|'.join(ROOT_PAGES)})\)")
FOLDER_LINK = re.compile(r"\]\(decisions/\)")
DOCS_LINK = re.compile(r"\]\(docs/")
PAGE = """---
search:
  exclude: true
---

# {path}

```python
{text}
```
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace a pattern in the navigation by the pages that match it.

    A page that the navigation does not name is listed last in the section of tasks.
    """
    config.nav = [_expanded(entry) for entry in config.nav or []]
    named = set(_pages(config.nav))
    others = [path.name for path in sorted(DOCS.glob("*.md")) if path.name not in named]
    (tasks,) = (entry["Tasks"] for entry in config.nav if "Tasks" in entry)
    tasks += others
    config.markdown_extensions.append(_ListsOfDocstrings())
    return config


class _ListsOfDocstrings(Extension):
    """Lets a list follow a line of text, as in docstrings, without a blank line between."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - the name that Markdown calls
        md.preprocessors.register(_BlankLines(md), "lists_of_docstrings", 15)


class _BlankLines(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        spaced: list[str] = []
        for line in lines:
            before = spaced[-1] if spaced else ""
            if line.startswith("- ") and before.endswith(":"):
                spaced.append("")
            spaced.append(line)
        return spaced


def _pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for content in entry.values() if isinstance(entry, dict) else entry:
            yield from _pages(content)


def _expanded(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(content) for title, content in entry.items()}
    if isinstance(entry, list):
        return [_expanded(content) for content in entry]
    if "*" in entry:
        found = sorted(DOCS.glob(entry))
        return ["decisions/index.md", *(str(path.relative_to(DOCS)) for path in found)]
    return entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from files outside of `docs`."""
    linked: set[str] = set()
    for file in files.documentation_pages():
        linked |= set(SOURCE_LINK.findall(file.content_string))
    for path in sorted(linked):
        text = (ROOT / "src" / f"{path}.py").read_text()
        content = PAGE.format(path=f"{path}.py", text=text)
        files.append(File.generated(config, f"source/{path}.md", content=content))
    for name, page in ROOT_PAGES.items():
        text = DOCS_LINK.sub("](", (ROOT / name).read_text())
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "decisions/index.md", content=_decisions()))
    return files


def _decisions() -> str:
    """Return a page that lists the decisions by their headings."""
    rows = []
    for path in sorted((DOCS / "decisions").glob("*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        rows.append(f"- [{title}]({path.name})")
    return "# Decisions\n\n" + "\n".join(rows) + "\n"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links out of `docs` lead to the pages that `on_files` adds."""
    up = "../" * page.file.src_uri.count("/")
    markdown = SOURCE_LINK.sub(rf"]({up}source/\1.md)", markdown)
    markdown = FOLDER_LINK.sub("](decisions/index.md)", markdown)
    return ROOT_LINK.sub(lambda link: f"]({up}{ROOT_PAGES[link[1]]})", markdown)
