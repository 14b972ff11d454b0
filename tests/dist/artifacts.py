"""Build the wheel and the source distribution, and check what is in them."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from readme_renderer import markdown
from trove_classifiers import classifiers as known_classifiers

from tests.dist.outcome import ROOT, CheckFailedError, expect, succeed

NAME = "holdfast-checkpoint"
CONSTRAINTS = ROOT / "constraints.txt"
OLD_EPOCH = "1735689600"
"""The time of all members of an archive, so that two builds can be compared."""
IN_SDIST = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "SECURITY.md", "pyproject.toml"}


class Artifacts:
    """The wheel and the source distribution in `dist`, built from a copy of the tree.

    The copy has the files that git lists, so no leftover of another build gets into them.
    """

    def __init__(self, folder: Path, dist: Path) -> None:
        self._folder = folder
        self._dist = dist
        self._source = folder / "source"

    def build(self) -> str:
        """Build the sdist from the tree and the wheel from the sdist, in isolation."""
        self._copy_tree()
        shutil.rmtree(self._dist, ignore_errors=True)
        self._build(self._source, self._dist)
        return f"{self.wheel.name}, {self.sdist.name}"

    @property
    def wheel(self) -> Path:
        return self._only("*.whl")

    @property
    def sdist(self) -> Path:
        return self._only("*.tar.gz")

    def check_metadata(self) -> str:
        """Check names, versions, licence, classifiers and addresses, in both files alike."""
        output = succeed([sys.executable, "-m", "twine", "check", "--strict", *self._both()])
        expect(2, output.count("PASSED"), "files that passed `twine check --strict`")
        fields = self.metadata()
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        init = (ROOT / "src" / "holdfast" / "__init__.py").read_text()
        expect(NAME, fields["Name"])
        expect(project["version"], fields["Version"], "version")
        versions = re.findall(r'^__version__ = "(.*)"$', init, re.MULTILINE)
        expect([fields["Version"]], versions, "holdfast.__version__")
        changes = re.findall(r"^## .*?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
        expect([fields["Version"]], changes[:1], "the newest version in CHANGELOG.md")
        expect("Apache-2.0", fields["License-Expression"])
        expect(["LICENSE"], fields.get_all("License-File"))
        expect("text/markdown", fields["Description-Content-Type"])
        self._check_classifiers(fields)
        addresses = fields.get_all("Project-URL", [])
        for address in addresses:
            if not re.search(r", https://[^/ ]+\.[^/ ]+/", address):
                raise CheckFailedError("NAME, https://HOST/PATH", address)
        for requirement in fields.get_all("Requires-Dist", []):
            if Requirement(requirement).url:
                raise CheckFailedError("requirements that an index has", requirement)
        packed = _member_of(self.sdist, "PKG-INFO")
        expect(fields.items(), email.message_from_string(packed.decode()).items(), "in the sdist")
        urls = f"{len(addresses)} addresses" if addresses else "no address of a project's page"
        return f"twine --strict, {len(fields.get_all('Classifier'))} classifiers, {urls}"

    def check_wheel(self) -> str:
        """Check that the wheel has all of src/holdfast, the licence, and nothing else."""
        with zipfile.ZipFile(self.wheel) as archive:
            names = {name for name in archive.namelist() if not name.endswith("/")}
            info = {name for name in names if ".dist-info/" in name}
            licences = [name for name in info if name.endswith("/licenses/LICENSE")]
            expect(1, len(licences), "LICENSE in the wheel")
            expect((ROOT / "LICENSE").read_bytes(), archive.read(licences[0]), "LICENSE")
        package = [path for path in _tracked() if path.startswith("src/holdfast/")]
        source = {path.removeprefix("src/") for path in package}
        if names - info != source:
            raise CheckFailedError(
                "the files of src/holdfast",
                f"besides: {sorted(names - info - source)}, missing: {sorted(source - names)}",
            )
        expect(True, "holdfast/py.typed" in names, "holdfast/py.typed in the wheel")
        expect(True, self.wheel.name.endswith("-py3-none-any.whl"), self.wheel.name)
        return f"{len(source)} files of src/holdfast, py.typed and LICENSE; nothing else"

    def check_sdist(self) -> str:
        """Check what is in the sdist, and that the tree and the sdist build the same wheel."""
        with tarfile.open(self.sdist) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        if not names >= IN_SDIST:
            raise CheckFailedError(f"{sorted(IN_SDIST)}", f"missing: {sorted(IN_SDIST - names)}")
        pages = {path for path in _tracked() if path.startswith("docs/")}
        expect(set(), pages - names, "pages that are not in the sdist")
        expect([], [name for name in names if name.startswith("tests/")], "tests in the sdist")
        again = self._folder / "again"
        shutil.rmtree(again, ignore_errors=True)
        self._build(self._source, again, "--wheel", "--no-isolation")
        (other,) = again.glob("*.whl")
        expected, found = _contents(self.wheel), _contents(other)
        differing = [name for name in expected | found if expected.get(name) != found.get(name)]
        expect([], differing, "members that differ if the wheel is built from the tree")
        return f"{len(names)} entries; the tree builds the same wheel, byte for byte"

    def check_description(self) -> str:
        """Check that the page of an index shows README whole and leads to no missing file."""
        text = str(self.metadata().get_payload())
        html = markdown.render(text)
        if html is None:
            raise CheckFailedError("README.md to be rendered", "nothing")
        page = _Page()
        page.feed(html)
        readme = re.sub(r"^ *```.*?^ *```", "", (ROOT / "README.md").read_text(), flags=re.S | re.M)
        headings = re.findall(r"^#+ +(.+?) *$", readme, re.M)
        expect(headings, page.headings, "headings")
        expect(readme.count("\n| --- |"), page.tables, "tables")
        expect([], page.relative, "links and pictures that the page of an index has not")
        return f"{len(page.headings)} headings, {page.tables} tables, no link to a missing file"

    def metadata(self) -> Message:
        """Return the wheel's metadata."""
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            return email.message_from_string(archive.read(name).decode())

    def _check_classifiers(self, fields: Message) -> None:
        named = fields.get_all("Classifier", [])
        expect([], [name for name in named if name not in known_classifiers], "unknown classifiers")
        expect(True, "Typing :: Typed" in named, "the classifier of py.typed")
        expect(True, "Operating System :: POSIX :: Linux" in named, "the classifier of Linux")
        pattern = re.compile(r"Programming Language :: Python :: (3\.\d+)")
        pythons = [match[1] for match in map(pattern.fullmatch, named) if match]
        allowed = SpecifierSet(fields["Requires-Python"])
        oldest = f"3.{min(int(version[2:]) for version in pythons)}"
        expect(f">={oldest}", str(allowed), "Requires-Python by the classifiers")

    def _copy_tree(self) -> None:
        shutil.rmtree(self._source, ignore_errors=True)
        for path in _tracked():
            target = self._source / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, target)

    def _build(self, source: Path, out: Path, *options: str) -> None:
        succeed(
            [sys.executable, "-m", "build", "--outdir", out, *options, source],
            PIP_CONSTRAINT=str(CONSTRAINTS),
            SOURCE_DATE_EPOCH=OLD_EPOCH,
        )

    def _only(self, pattern: str) -> Path:
        paths = list(self._dist.glob(pattern))
        expect(1, len(paths), f"files {pattern} in dist")
        return paths[0]

    def _both(self) -> list[Path]:
        return [self.wheel, self.sdist]


class _Page(HTMLParser):
    """The headings, tables and relative addresses of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.relative: list[str] = []
        self.tables = 0
        self._is_heading = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if re.fullmatch(r"h[1-6]", tag):
            self._is_heading = True
            self.headings.append("")
        self.tables += tag == "table"
        for name, value in attrs:
            if name in ("href", "src") and not re.match(r"https?://|#", value or ""):
                self.relative.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        if re.fullmatch(r"h[1-6]", tag):
            self._is_heading = False

    def handle_data(self, data: str) -> None:
        if self._is_heading:
            self.headings[-1] += data


def _tracked() -> list[str]:
    """Return the files that are committed or could be."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = listing.stdout.rstrip("\0").split("\0")
    return [path for path in paths if (ROOT / path).is_file()]


def _member_of(sdist: Path, name: str) -> bytes:
    with tarfile.open(sdist) as archive:
        (path,) = (n for n in archive.getnames() if n.count("/") == 1 and n.endswith(f"/{name}"))
        file = archive.extractfile(path)
        assert file is not None
        return file.read()


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
